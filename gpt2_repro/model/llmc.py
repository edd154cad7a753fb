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
HEADER_BYTES = 1024
DTYPES = {"float32": 3, "bfloat16": 5}
LAYER_NORM_EPSILON = 1e-5
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # the files have none; the default is 0.1
GELU = ("gelu", "gelu_new", "gelu_pytorch_tanh")  # the first one is exact, the others are the same approximation
BLOCKS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")


def require_gpt2(model: PreTrainedModel) -> None:
    """Raise UserError if llm.c would compute something else than a model."""
    config = model.config
    if type(model) is not GPT2LMHeadModel:
        raise UserError(f"llm.c reads only GPT-2, not {type(model).__name__}.")
    if config.n_inner not in (None, 4 * config.n_embd):
        raise UserError("llm.c reads only GPT-2 with a feed-forward width of 4 x n_embd.")
    is_scaled = config.scale_attn_weights and not config.scale_attn_by_inverse_layer_idx
    has_gelu = config.activation_function in GELU
    if not has_gelu or not is_scaled:
        raise UserError("llm.c reads only GPT-2 with GELU and the usual scale of attention.")
    if config.layer_norm_epsilon != LAYER_NORM_EPSILON:
        raise UserError(f"llm.c reads only GPT-2 with layer_norm_epsilon {LAYER_NORM_EPSILON}.")
    head = model.lm_head.weight
    if not torch.equal(head, model.transformer.wte.weight):
        raise UserError("llm.c reads only GPT-2 whose output layer shares its weights with the embeddings.")


def transposed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of GPT-2's weights, those of transformers' Conv1D in the layout of Linear, or the reverse."""
    views: dict[str, Tensor] = {}
    for name, weight in weights.items():
        is_conv1d = ".c_" in name and name.endswith(".weight")
        views[name] = weight
        if is_conv1d:
            views[name] = weight.t()
    return views


def write_llmc(model: PreTrainedModel, path: Path, *, dtype: str) -> None:
    """Write a GPT-2 as a model file of llm.c in `dtype`, or raise UserError."""
    require_gpt2(model)
    config = model.config
    padded = padded_size(config.vocab_size, 128)  # rows of the token embeddings
    header = np.zeros(256, dtype=np.int32)
    header[0] = MAGIC
    header[1] = DTYPES[dtype]
    header[2] = config.n_positions
    header[3] = config.vocab_size
    header[4] = config.n_layer
    header[5] = config.n_head
    header[6] = config.n_embd
    header[7] = padded
    padding = padded - config.vocab_size
    torch_dtype = getattr(torch, dtype)
    with path.open("wb") as file:
        file.write(header.tobytes())
        for name, tensor in _tensors(model):
            if name == "wte.weight":
                tensor = torch.nn.functional.pad(tensor, (0, 0, 0, padding))
            values = tensor.to(torch_dtype).contiguous()
            content = values.view(torch.uint8).numpy()
            file.write(content.tobytes())


def read_llmc(path: Path) -> PreTrainedModel:
    """Return the GPT-2 in a model file of llm.c in fp32, or raise UserError."""
    header = np.fromfile(path, dtype=np.int32, count=256)
    has_header = len(header) == 256 and header[0] == MAGIC
    if not has_header or header[1] not in DTYPES.values():
        raise UserError(f"{path} is not a model file of llm.c. Such a file starts with {MAGIC} and version 3 or 5.")
    _, version, window, vocabulary, layers, heads, width, padded = header[:8].tolist()
    dtype = torch.bfloat16
    if version == DTYPES["float32"]:
        dtype = torch.float32
    parameters = gpt2_parameters(n_layer=layers, n_embd=width, n_positions=window, vocab_size=padded)
    size = path.stat().st_size
    expected = HEADER_BYTES + parameters * dtype.itemsize
    # Before anything is allocated. Each layer needs far more bytes in the file than an empty layer in memory.
    has_sizes = min(header[2:8]) >= 1
    is_possible = has_sizes and vocabulary <= padded and width % heads == 0 and layers <= width
    if size != expected or not is_possible:
        raise UserError(f"{path} is damaged: it has {size:,} bytes instead of {expected:,}, or an impossible shape.")
    config = GPT2Config(
        n_positions=window,
        vocab_size=vocabulary,
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        bos_token_id=None,  # the file has no special ids; the default would be 50256
        eos_token_id=None,
        **NO_DROPOUT,
    )
    model = GPT2LMHeadModel(config).eval()
    content = torch.from_file(str(path), size=size, dtype=torch.uint8)
    values = content[HEADER_BYTES:].view(dtype)
    for name, tensor in _tensors(model):
        rows = len(tensor)
        if name == "wte.weight":
            rows = padded
        shape = torch.Size([rows, *tensor.shape[1:]])
        end = shape.numel()
        stored = values[:end].reshape(shape)
        tensor.copy_(stored[: len(tensor)])
        values = values[end:]
    return model


def _tensors(model: GPT2LMHeadModel) -> Iterator[tuple[str, Tensor]]:
    """Yield names and views of the weights, in the order and layout of llm.c's model file."""
    names = ["wte.weight", "wpe.weight"]
    layers = range(model.config.n_layer)
    for block in BLOCKS:
        names += [f"h.{layer}.{block}.weight" for layer in layers]
        names += [f"h.{layer}.{block}.bias" for layer in layers]
    names += ["ln_f.weight", "ln_f.bias"]
    weights = transposed(model.transformer.state_dict())
    for name in names:
        yield name, weights[name]
