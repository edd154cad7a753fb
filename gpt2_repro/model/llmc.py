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
    views: dict[str, Tensor] = {}
    for name, weight in weights.items():
        is_conv1d = ".c_" in name and name.endswith(".weight")
        views[name] = weight.t() if is_conv1d else weight
    return views


def write_llmc(model: PreTrainedModel, path: Path, *, dtype: str) -> None:
    """Write a GPT-2 as a model file of llm.c in `dtype`, or raise UserError."""
    require_gpt2(model)
    config = model.config
    padded = padded_size(config.vocab_size, 128)  # rows of the token embeddings
    header = np.zeros(256, dtype=np.int32)
    header[:4] = (MAGIC, DTYPES[dtype], config.n_positions, config.vocab_size)
    header[4:8] = (config.n_layer, config.n_head, config.n_embd, padded)
    with path.open("wb") as file:
        file.write(header.tobytes())
        for name, tensor in _tensors(model):
            if name == "wte.weight":
                tensor = torch.nn.functional.pad(tensor, (0, 0, 0, padded - config.vocab_size))
            values = tensor.to(getattr(torch, dtype)).contiguous()
            file.write(values.view(torch.uint8).numpy().tobytes())


def read_llmc(path: Path) -> PreTrainedModel:
    """Return the GPT-2 in a model file of llm.c in fp32, or raise UserError."""
    header = np.fromfile(path, dtype=np.int32, count=256)
    if len(header) < 256 or header[0] != MAGIC or header[1] not in DTYPES.values():
        raise UserError(f"{path} is not a model file of llm.c. Such a file starts with {MAGIC} and version 3 or 5.")
    _, version, window, vocabulary, layers, heads, width, padded = header[:8].tolist()
    kind = torch.float32 if version == DTYPES["float32"] else torch.bfloat16
    count = gpt2_parameters(n_layer=layers, n_embd=width, n_positions=window, vocab_size=padded)
    size = path.stat().st_size
    expected = 1024 + count * kind.itemsize
    # Before anything is allocated. Each layer needs far more bytes in the file than an empty layer in memory.
    is_impossible = min(header[2:8]) < 1 or vocabulary > padded or width % heads or layers > width
    if size != expected or is_impossible:
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
    values = torch.from_file(str(path), size=size, dtype=torch.uint8)[1024:].view(kind)
    for name, tensor in _tensors(model):
        rows = padded if name == "wte.weight" else len(tensor)
        shape = torch.Size([rows, *tensor.shape[1:]])
        tensor.copy_(values[: shape.numel()].reshape(shape)[: len(tensor)])
        values = values[shape.numel() :]
    return model


def _tensors(model: GPT2LMHeadModel) -> Iterator[tuple[str, Tensor]]:
    """Yield names and views of the weights, in the order and layout of llm.c's model file."""
    names = ["wte.weight", "wpe.weight"]
    for block in BLOCKS:
        for part in ("weight", "bias"):
            names += [f"h.{layer}.{block}.{part}" for layer in range(model.config.n_layer)]
    names += ["ln_f.weight", "ln_f.bias"]
    weights = transposed(model.transformer.state_dict())
    for name in names:
        yield name, weights[name]
