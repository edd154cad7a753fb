"""Build the model to train."""

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from gpt2_repro.model.compilation import compile_loss
from gpt2_repro.model.configuration import stock_model
from gpt2_repro.model.document_mask import Documents
from gpt2_repro.model.initial_weights import start_from
from gpt2_repro.model.pretraining import make_pretraining


def build_model(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    attention: str,
    init_from: str = "",
    documents: Documents | None = None,
    compiled: bool = False,
) -> PreTrainedModel:
    """Return an fp32 model whose forward computes the pre-training loss.

    Args:
        tokenizer: the tokenizer of the data. The checkpoint `init_from` must have the same tokenizer.
        init_from: a folder or Hub id with initial weights. If empty, weights are random.
        documents: if given, tokens attend only to their own document.
        compiled: compile the loss with torch.compile.

    Raises UserError if the checkpoint `init_from` cannot be loaded, or does not match the model or the data.
    """
    model = stock_model(config, attention=attention)
    if init_from:
        start_from(init_from, model, tokenizer)
    make_pretraining(model, vocab_size=config.true_vocab_size, documents=documents)
    if compiled:
        compile_loss(model)
    return model
