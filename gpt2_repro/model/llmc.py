"""Read and write the model files of llm.c, which contain a GPT-2 model."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from gpt2_repro.errors import UserError
from gpt2_repro.model.size import gpt2_parameters, padded_size


# The format is that of train_gpt2.py and dev/eval/export_hf.py of llm.c. A file begins with a header of 256 int32
# values: MAGIC, version, window, vocabulary, layers, heads, width, padded vocabulary and zeros. The tensors follow, in
# the layout of PyTorch's Linear: one kind of tensor for all layers, then the next kind for all layers.
MAGIC = 20240326
DTYPES = {"float32": 3, "bfloat16": 5}
LAYER_NORM_EPSILON = 1e-5
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # the files have none; the default is 0.1
BLOCKS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")


def require_gpt2(model: PreTrainedModel) -> None:
    """Raise UserError if llm.c would compute something else than a model."""
    config = model.config
    if type(model) is not GPT2LMHeadModel or config.n_inner not in (None, 4 * config.n_embd):
        kind = type(model).__name__
        raise UserError(f"llm.c reads only GPT-2 with a feed-forward width of 4 x n_embd, not this {kind}.")
    is_scaled = config.scale_attn_weights and not config.scale_attn_by_inverse_layer_idx
    # The first one is exact, the others are the same approximation.
    if config.activation_function not in ("gelu", "gelu_new", "gelu_pytorch_tanh") or not is_scaled:
        raise UserError("llm.c reads only GPT-2 with GELU and the usual scale of attention.")
    if config.layer_norm_epsilon != LAYER_NORM_EPSILON:
        raise UserError(f"llm.c reads only GPT-2 with layer_norm_epsilon {LAYER_NORM_EPSILON}.")
    if not torch.equal(model.lm_head.weight, model.transformer.wte.weight):
        raise UserError("llm.c reads only GPT-2 whose output layer shares its weights with the embeddings.")


def transposed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of GPT-2's weights, those of transformers' Conv1D in the layout of Linear, or the reverse."""
    return {name: w.t() if ".c_" in name and name.endswith(".weight") else w for name, w in weights.items()}


def write_llmc(model: PreTrainedModel, path: Path, *, dtype: str) -> None:
    """Write a GPT-2 as a model file of llm.c in `dtype`, or raise UserError."""
    require_gpt2(model)
    config = model.config
    padded = padded_size(config.vocab_size, 128)  # rows of the token embeddings
    header = np.zeros(256, dtype=np.int32)
    shape = (config.n_layer, config.n_head, config.n_embd, padded)
    header[:8] = (MAGIC, DTYPES[dtype], config.n_positions, config.vocab_size, *shape)
    with path.open("wb") as file:
        file.write(header.tobytes())
        for name, tensor in _tensors(model):
            if name == "wte.weight":
                tensor = torch.nn.functional.pad(tensor, (0, 0, 0, padded - config.vocab_size))
            file.write(tensor.to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy().tobytes())


def read_llmc(path: Path) -> PreTrainedModel:
    """Return the GPT-2 in a model file of llm.c in fp32, or raise UserError."""
    header = np.fromfile(path, dtype=np.int32, count=256)
    if len(header) < 256 or header[0] != MAGIC or header[1] not in DTYPES.values():
        raise UserError(f"{path} is not a model file of llm.c. Such a file starts with {MAGIC} and version 3 or 5.")
    _, version, window, vocabulary, layers, heads, width, padded = header[:8].tolist()
    kind = torch.float32 if version == DTYPES["float32"] else torch.bfloat16
    count = gpt2_parameters(n_layer=layers, n_embd=width, n_positions=window, vocab_size=padded)
    size, expected = path.stat().st_size, 1024 + count * kind.itemsize
    # Before anything is allocated. Each layer needs far more bytes in the file than an empty layer in memory.
    if size != expected or min(header[2:8]) < 1 or vocabulary > padded or width % heads or layers > width:
        raise UserError(f"{path} is damaged: it has {size:,} bytes instead of {expected:,}, or an impossible shape.")
    shape = {"n_positions": window, "vocab_size": vocabulary, "n_layer": layers, "n_head": heads, "n_embd": width}
    # The file has no special ids. The default would be 50256.
    model = GPT2LMHeadModel(GPT2Config(**shape, **NO_DROPOUT, bos_token_id=None, eos_token_id=None)).eval()
    values = torch.from_file(str(path), size=size, dtype=torch.uint8)[1024:].view(kind)
    for name, tensor in _tensors(model):
        written = torch.Size((padded if name == "wte.weight" else len(tensor), *tensor.shape[1:]))
        tensor.copy_(values[: written.numel()].reshape(written)[: len(tensor)])
        values = values[written.numel() :]
    return model


def _tensors(model: GPT2LMHeadModel) -> Iterator[tuple[str, Tensor]]:
    """Yield names and views of the weights, in the order and layout of llm.c's model file."""
    weights, layers = transposed(model.transformer.state_dict()), range(model.config.n_layer)
    inner = [f"h.{layer}.{block}.{part}" for block in BLOCKS for part in ("weight", "bias") for layer in layers]
    for name in ["wte.weight", "wpe.weight", *inner, "ln_f.weight", "ln_f.bias"]:
        yield name, weights[name]
