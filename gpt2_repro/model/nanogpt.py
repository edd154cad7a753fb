"""Read checkpoints of nanoGPT and build-nanogpt, which contain a GPT-2 model."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.model.configuration import FAILURES
from gpt2_repro.model.llmc import NO_DROPOUT, transposed
from gpt2_repro.model.size import gpt2_parameters


# Names of the shape in nanoGPT and in transformers. The modules have the same names, but nanoGPT has Linear layers
# where transformers has Conv1D, whose weights are transposed.
SHAPE = {
    "block_size": "n_positions",
    "vocab_size": "vocab_size",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
}
MASKS = (".attn.bias", ".attn.masked_bias")  # buffers


class _BuildConfig:
    """Stands for build-nanogpt's class GPTConfig, which its checkpoints name."""


def open_nanogpt(path: Path) -> tuple[GPT2Config, dict[str, Tensor]]:
    """Return the configuration and the memory-mapped weights of a checkpoint, or raise UserError.

    The vocabulary keeps its size, usually 50,304 ids. No code of the file is run: torch's unpickler builds only tensors
    and plain containers.
    """
    try:
        with torch.serialization.safe_globals([(_BuildConfig, "__main__.GPTConfig")]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        # nanoGPT's GELU is exact. build-nanogpt has GPT-2's approximation.
        built = content.get("config")
        if isinstance(built, _BuildConfig):
            shape = vars(built)
            activation = "gelu_pytorch_tanh"
        else:
            shape = content.get("model_args")
            activation = "gelu"
        weights: dict[str, Tensor] = {}
        for name, tensor in content["model"].items():
            weights[name.removeprefix("_orig_mod.")] = tensor
        total = sum(tensor.numel() for tensor in weights.values())
        sizes = {ours: int(shape[theirs]) for theirs, ours in SHAPE.items()}
        claimed = gpt2_parameters(
            n_layer=sizes["n_layer"],
            n_embd=sizes["n_embd"],
            n_positions=sizes["n_positions"],
            vocab_size=sizes["vocab_size"],
        )
        # Before a model is built. At most half of its weights, the biases, may be missing.
        is_possible = min(sizes.values()) > 0 and sizes["n_layer"] <= len(weights)
        if not is_possible or claimed > 2 * total or total > path.stat().st_size:
            raise ValueError("its shape does not fit its size")
        config = GPT2Config(
            activation_function=activation,
            bos_token_id=None,
            eos_token_id=None,
            **sizes,
            **NO_DROPOUT,
        )
        return config, weights
    except Exception as error:  # torch raises many kinds for damaged and refused pickles
        raise UserError(f"{path} is not a checkpoint of nanoGPT or build-nanogpt ({in_a_line(error)}).") from None


def read_nanogpt(path: Path) -> PreTrainedModel:
    """Return the GPT-2 in a checkpoint of nanoGPT or build-nanogpt in fp32, or raise UserError.

    Missing biases become zeros.
    """
    config, weights = open_nanogpt(path)
    try:
        without_masks = {name: tensor for name, tensor in weights.items() if not name.endswith(MASKS)}
        state = transposed(without_masks)
        model = GPT2LMHeadModel(config)
        missing, unexpected = model.load_state_dict(state, strict=False)
    except FAILURES as error:
        raise UserError(f"{path} has weights of other shapes: {in_a_line(error)[:200]}.") from None
    wrong = list(unexpected)
    wrong += [name for name in missing if not name.endswith(".bias")]
    if wrong:
        raise UserError(f"{path} is not a GPT-2: its weights differ in {wrong[0]}.")
    if not torch.equal(state["lm_head.weight"], state["transformer.wte.weight"]):
        raise UserError(f"{path} has an output layer with its own weights. GPT-2 shares them with the embeddings.")
    return model.eval()
