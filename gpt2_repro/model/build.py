"""Build the model to train."""

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from gpt2_repro.errors import UserError
from gpt2_repro.hardware import total_memory
from gpt2_repro.model.compilation import compile_loss
from gpt2_repro.model.configuration import stock_model
from gpt2_repro.model.document_mask import Documents
from gpt2_repro.model.initial_weights import start_from
from gpt2_repro.model.pretraining import make_pretraining
from gpt2_repro.model.size import gpt2_parameters


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

    Raises UserError if the model is too large for the memory of the machine, and also if the checkpoint `init_from`
    cannot be loaded or does not match the model or the data.
    """
    _check_memory(config)
    model = stock_model(config, attention=attention)
    if init_from:
        start_from(init_from, model, tokenizer)
    make_pretraining(model, vocab_size=config.true_vocab_size, documents=documents)
    if compiled:
        compile_loss(model)
    return model


def _check_memory(config: PreTrainedConfig) -> None:
    """Raise UserError if the model does not fit into the memory of the machine."""
    shape = {"n_layer": config.num_hidden_layers, "n_embd": config.hidden_size, "vocab_size": config.vocab_size}
    parameters = gpt2_parameters(**shape, n_positions=config.max_position_embeddings)
    # fp32 weights; without a GPU also their gradients and the two moments of AdamW.
    needed = parameters * (4 if torch.cuda.is_available() else 16)
    if needed > (memory := total_memory()):  # not the free memory: a full page cache can be emptied
        size = f"{parameters / 1e6:,.0f} M parameters needs about {needed / 1e9:,.0f} GB of memory"
        fix = "Pass a smaller --n_layer or --n_embd."
        raise UserError(f"A model with {size}. This machine has {memory / 1e9:.0f} GB. {fix}")
