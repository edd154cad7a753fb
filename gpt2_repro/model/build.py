"""Build the model to train, and compile its loss."""

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.hardware import total_memory
from gpt2_repro.model.architecture import scale_residual_weights
from gpt2_repro.model.arguments import MlpImplementation
from gpt2_repro.model.configuration import stock_model
from gpt2_repro.model.document_mask import Documents
from gpt2_repro.model.initial_weights import start_from
from gpt2_repro.model.pretraining import (
    PACKED,
    make_pretraining,
    sum_biases_by_row,
    use_gelu_products,
    use_packed_attention,
)
from gpt2_repro.model.size import gpt2_parameters


logger = logging.getLogger(__name__)

# Next to the runs and not in /tmp, which a rented machine loses when it stops.
CACHE = ".cache/inductor"


def build_model(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    attention: str,
    mlp: MlpImplementation = "torch",
    init_from: str | None = "",
    documents: Documents | None = None,
    compiled: bool = False,
) -> PreTrainedModel:
    """Return an fp32 model whose forward computes the pre-training loss.

    Args:
        tokenizer: the tokenizer of the data. The checkpoint `init_from` must have the same tokenizer.
        init_from: a folder or Hub id with initial weights. If empty, weights are random. If None, they are NaN: a
            checkpoint will be loaded.
        documents: if given, tokens attend only to their own document.
        compiled: compile the loss with torch.compile.

    Raises UserError for a model that does not fit into the memory, and for an `init_from` that does not fit.
    """
    _check_memory(config)
    model = stock_model(config, attention=attention, is_random=init_from is not None)
    scale_residual_weights(model)
    if init_from:
        start_from(init_from, model, tokenizer)
    make_pretraining(model, vocab_size=config.true_vocab_size, documents=documents)
    if attention == PACKED:
        use_packed_attention(model)
    if mlp == "cublaslt":
        use_gelu_products(model)
    if compiled:
        compile_loss(model)
    return model


def _check_memory(config: PreTrainedConfig) -> None:
    parameters = gpt2_parameters(
        n_layer=config.num_hidden_layers,
        n_embd=config.hidden_size,
        n_positions=config.max_position_embeddings,
        vocab_size=config.vocab_size,
    )
    # fp32 weights; without a GPU also their gradients and the two moments of AdamW.
    needed = 4 * parameters
    if not torch.cuda.is_available():
        needed = 16 * parameters
    memory = total_memory()  # not the free memory: a full page cache can be emptied
    if needed > memory:
        size = f"{parameters / 1e6:,.0f} M parameters needs about {needed / 1e9:,.0f} GB of memory"
        fix = "Pass a smaller --n_layer or --n_embd."
        raise UserError(f"A model with {size}. This machine has {memory / 1e9:.0f} GB. {fix}")


def compile_loss(model: PreTrainedModel, *, backend: Any = "inductor") -> None:
    """Compile the loss of a model from `make_pretraining` into one graph, or one per bucket of DDP's gradients.

    If an attention kernel cannot be compiled, the model switches to causal_sdpa. `model.compiled_graphs` lists what
    each compiled graph is for, "training" or "validation".

    Compiled code is cached in $TORCHINDUCTOR_CACHE_DIR (default: .cache/inductor).
    """
    # Importing transformers sets this variable to torch's default in /tmp. That value is replaced, too.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(CACHE).resolve())
    # By default, torch (2.13) does not cache a graph with an autograd.Function or a choice of SDPA kernels, and traces
    # and partitions it again at each start. The key of the cache contains the code of both.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    cacheable = torch._inductor.config.unsafe_marked_cacheable_functions
    for function in ("_backend_from_string", "_sdpa_kernel"):
        cacheable[f"torch.nn.attention.{function}"] = "1"
    torch._inductor.config.unsafe_marked_cacheable_functions = cacheable
    # Under DDP, torch splits the graph at each 25 MB of gradients, 14 times for 124M, so that a part is reduced while the
    # next part is computed. A single process reduces nothing.
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    torch._dynamo.config.optimize_ddp = processes > 1
    compiler = torch._dynamo.lookup_backend(backend)
    model.compiled_graphs = []

    def log_and_compile(graph: Any, inputs: list[Any], **options: Any) -> Any:
        kind = "validation"
        if torch.is_grad_enabled():
            kind = "training"
        if kind not in model.compiled_graphs:
            cache = os.environ["TORCHINDUCTOR_CACHE_DIR"]
            logger.info("compiling the %s step; compiled code is cached in %s", kind, cache)
        model.compiled_graphs.append(kind)
        return compiler(graph, inputs, **options)

    if model.config.model_type == "gpt2" and torch.cuda.is_available():
        sum_biases_by_row(model)
    # Only the loss: DDP and DeepSpeed wrap an ordinary module, and sampling and scoring have changing input shapes.
    compiled = torch.compile(model.summed_loss, backend=log_and_compile, fullgraph=True, dynamic=False)

    def compiled_loss(input_ids: Tensor, shift_labels: Tensor, **attention: Any) -> Tensor:
        try:
            return compiled(input_ids, shift_labels, **attention)
        except torch._dynamo.exc.TorchDynamoException as error:
            kernel = model.config._attn_implementation
            if kernel == "causal_sdpa":
                raise
            text = "The attention kernel %s cannot be compiled (%s). The run uses the kernel causal_sdpa instead."
            logger.warning(text, kernel, in_a_line(error)[:200])
            model.compiled_graphs.clear()
            model.set_attn_implementation("causal_sdpa")
            attention = {}
            if model.documents:
                attention = model.documents.attention(model, input_ids)
            return compiled(input_ids, shift_labels, **attention)

    model.summed_loss = compiled_loss
