"""The kernels that kernels.py compares, and the packages that they need. Imports no torch."""

import importlib.util
from collections.abc import Mapping
from typing import Any, NamedTuple


class Shapes(NamedTuple):
    """The sizes of a pass of GPT-2 124M."""

    rows: int = 64
    length: int = 1024
    heads: int = 12
    head_size: int = 64
    vocab_size: int = 50_257
    padded_vocab_size: int = 50_304

    @property
    def width(self) -> int:
        return self.heads * self.head_size

    @property
    def tokens(self) -> int:
        return self.rows * self.length


SMALL = Shapes(rows=4, length=128, heads=2, head_size=16, vocab_size=307, padded_vocab_size=384)


class Candidate(NamedTuple):
    """A function that computes the same as others of its group."""

    group: str
    name: str
    make: str  # function of kernel_candidates.py
    needs: str = ""  # modules
    gpu: bool = True  # whether it needs a GPU
    seconds: int = 6  # it starts only if so much time is left, and is killed after LIMIT_FACTOR times as much


PRODUCTS = "products"
# The kernels that train.py uses now, by group and type of device.
CURRENT = {
    ("attention", "cuda"): "causal_cudnn",
    ("attention", "cpu"): "causal_sdpa",
    ("MLP", "cuda"): "torch",
    ("MLP", "cpu"): "torch",
    ("loss", "cuda"): "ours, Triton",
    ("loss", "cpu"): "ours, torch",
}
# In this order, as long as the time suffices: first what decides the most, last what compiles for long.
CANDIDATES = (
    Candidate("attention", "causal_cudnn", "causal_cudnn", seconds=15),
    Candidate("attention", "packed_attention", "packed_attention", "gpt2_repro.model.packed_attention cudnn"),
    Candidate("MLP", "torch", "torch_mlp", gpu=False, seconds=10),
    Candidate("MLP", "gelu_mlp", "gelu_mlp", "gpt2_repro.model.gelu_products nvmath"),
    Candidate(PRODUCTS, "c_attn", "products_of_c_attn", gpu=False, seconds=3),
    Candidate(PRODUCTS, "attn.c_proj", "products_of_attention_projection", gpu=False, seconds=3),
    Candidate(PRODUCTS, "c_fc", "products_of_c_fc", gpu=False, seconds=3),
    Candidate(PRODUCTS, "mlp.c_proj", "products_of_mlp_projection", gpu=False, seconds=3),
    Candidate(PRODUCTS, "lm_head", "products_of_head", gpu=False, seconds=3),
    Candidate("loss", "ours, Triton", "triton_loss", seconds=10),
    Candidate("MLP", "QuACK", "quack_mlp", "cutlass quack", seconds=12),
    Candidate("attention", "FlashAttention-2", "flash_attention_2", "flash_attn.flash_attn_interface"),
    Candidate("loss", "QuACK's softmax", "quack_loss", "cutlass quack", seconds=12),
    Candidate("loss", "Liger", "liger_loss", "liger_kernel"),
    Candidate("attention", "FlashAttention-4", "flash_attention_4", "cutlass flash_attn.cute", seconds=15),
    Candidate("attention", "causal_sdpa", "causal_sdpa", gpu=False),
    Candidate("loss", "ours, torch", "torch_loss", gpu=False, seconds=8),
)


def is_entry_of(entry: Mapping[str, Any], candidate: Candidate) -> bool:
    return entry["group"] == candidate.group and entry["name"] == candidate.name


def without_result(entries: list[dict[str, Any]]) -> list[Candidate]:
    """Return the candidates that are not among results."""
    tried = {(entry["group"], entry["name"]) for entry in entries if "started" not in entry}
    return [each for each in CANDIDATES if (each.group, each.name) not in tried]


def obstacle(candidate: Candidate, device: str) -> str | None:
    """Return why a candidate cannot be tried, or None."""
    for module in candidate.needs.split():
        if not is_installed(module):
            return f"{module} is not installed"
    if candidate.gpu and device == "cpu":
        return "it needs a GPU"
    return None


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        # Either the package that contains it, or one that this package needs, which the candidate's own error names.
        return error.name != module.partition(".")[0]
    except ImportError:
        return True
