"""Choose the attention kernel of a run: the fastest that works on this machine."""

import copy
import functools
import logging
import math
from collections.abc import Mapping
from typing import NamedTuple, get_args

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import is_flash_attn_2_available, is_kernels_available

from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.model.arguments import FlashKernel
from gpt2_repro.model.document_mask import Documents
from gpt2_repro.model.pretraining import SDPA


logger = logging.getLogger(__name__)

FLASH = PACKAGE, HUB_KERNEL = get_args(FlashKernel)
TIMING_SECONDS = 0.3  # per kernel, after a warm-up
# bf16 keeps 8 bits: correct outputs and gradients of unit scale agree within a few percent, wrong ones do not.
MOST_DIFFERENCE = 0.05


class Machine(NamedTuple):
    """The properties of a machine and a run that decide which kernels can be used."""

    cuda: bool  # a GPU of NVIDIA, or of AMD with ROCm
    bf16: bool
    length: int  # targets per row
    one_row_compiled: bool = False  # whether torch.compile is used with one row per forward pass
    document_mask: bool = False
    fp16: bool = False


class Choice(NamedTuple):
    """The attention kernel of a run, and the reason."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def obstacle(name: str, machine: Machine) -> str | None:
    """Return why the attention kernel `name` cannot be used, or None if it can."""
    if name in ("causal_sdpa", "eager"):
        return None
    if not machine.cuda:
        return "there is no NVIDIA or AMD GPU"
    if not (machine.bf16 or machine.fp16):
        return "it needs bf16 or fp16, which this run does not use"
    if torch.cuda.get_device_capability() < (8, 0):
        return "this GPU is older than Ampere"
    if name == "causal_cudnn":
        reason = "cuDNN is wrong for document masks and for rows whose length is not a multiple of 128"
        return reason if machine.document_mask or machine.length % 128 else None
    if machine.one_row_compiled and not machine.document_mask:
        # _is_packed_sequence in transformers 5.23 branches on the position ids. Position ids are not read if the lengths
        # of documents are passed.
        return "torch.compile cannot compile transformers' flash attention for a micro-batch of 1 row"
    if name == PACKAGE and not is_flash_attn_2_available():
        return "flash-attn is not installed (requirements-gpu.txt)"
    if name == HUB_KERNEL and not is_kernels_available():
        return "the package kernels is not installed in the version that transformers needs"
    return None


def choose_attention(
    requested: str, machine: Machine, config: PreTrainedConfig, *, rows: int, earlier: str = ""
) -> Choice:
    """Return the attention kernel: `requested`, or the fastest one if this is "auto".

    Args:
        requested: the field attn_implementation of the recipe.
        config: configuration of the model to train. Kernels are timed with its number and size of heads.
        rows: rows per forward pass.
        earlier: the kernel that this run used before on the same GPU model. "auto" uses it again if possible.

    Raises UserError if `requested` names a kernel that cannot be used.
    """
    if requested != "auto":
        problem: str | float | None = obstacle(requested, machine)
        if problem is None and requested in FLASH:
            problem = time_kernels({requested: None, "causal_sdpa": None}, machine, config, rows)[requested]
        if isinstance(problem, str):
            raise UserError(f"{requested} cannot be used: {problem}. Pass --attn_implementation auto.")
        return Choice(requested, "as requested")
    if not machine.cuda:
        return Choice("causal_sdpa", "torch's SDPA, because there is no NVIDIA or AMD GPU")
    obstacles = {name: obstacle(name, machine) for name in (*FLASH, *SDPA)}
    if obstacles[PACKAGE] is None:
        obstacles[HUB_KERNEL] = "the package flash-attn has the same kernel"
    if machine.document_mask:
        timings = time_kernels({name: obstacles[name] for name in (*FLASH, "causal_sdpa")}, machine, config, rows)
        if usable := [name for name in FLASH if isinstance(timings[name], float)]:
            return Choice(usable[0], "it takes document lengths instead of a mask")
        why = "; ".join(f"{name}: {timings[name]}" for name in FLASH)
        return Choice("causal_sdpa", f"torch's SDPA with a document mask; {why}")
    if earlier:
        if (problem := obstacles.get(earlier, "this version does not have it")) is None:
            return Choice(earlier, "as at the start of the run")
        why = "The run began with the attention kernel %s, but %s. All usable kernels are timed again."
        logger.warning(why, earlier, problem)
    shape = f"{rows} rows of {machine.length} tokens on {torch.cuda.get_device_name()}"
    return fastest(time_kernels(obstacles, machine, config, rows), shape)


def fastest(timings: Mapping[str, float | str], shape: str) -> Choice:
    """Return the fastest kernel, or causal_sdpa if no kernel was timed. Log all times."""
    times = sorted((time, name) for name, time in timings.items() if not isinstance(time, str))
    logger.info("attention, forward and backward, %s:", shape)
    for name, result in timings.items():
        logger.info("  %-30s %s", name, result if isinstance(result, str) else f"{result:.2f} ms")
    if not times:
        return Choice("causal_sdpa", "no kernel could be timed")
    others = ", ".join(f"{name} {time:.2f}" for time, name in times[1:]) or "the only kernel"
    return Choice(times[0][1], f"{times[0][0]:.2f} ms; {others}")


def time_kernels(
    obstacles: Mapping[str, str | None], machine: Machine, config: PreTrainedConfig, rows: int
) -> dict[str, float | str]:
    """Return each kernel's time of one forward and backward pass, in milliseconds.

    Queries, keys and values are parts of one tensor, as in a GPT-2. The time includes copying their gradients into one
    tensor.

    If a kernel cannot be used or gives other results than causal_sdpa, its value is the reason instead.

    Args:
        obstacles: for each kernel, the reason why it cannot be used, or None if it can.
        config: the configuration with the number and size of heads.
        rows: rows per forward pass.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in training (pretraining.py); only causal_cudnn turns it on
    timings: dict[str, float | str] = {name: reason for name, reason in obstacles.items() if reason is not None}
    expected: list[Tensor] = []
    # causal_sdpa first, because its results are the expected ones.
    for name in sorted(obstacles.keys() - timings.keys(), key=lambda name: (name != "causal_sdpa", name)):
        try:
            timings[name], results = _run_kernel(name, machine, config, rows)
            expected = expected or results
            if (difference := _difference(results, expected)) > MOST_DIFFERENCE:
                timings[name] = f"it differs from causal_sdpa by {difference:.3f}"
        except Exception as error:  # packages of kernels raise errors of their own
            timings[name] = f"it fails on this machine ({in_a_line(error)[:200]})"
    return timings


def _run_kernel(name: str, machine: Machine, config: PreTrainedConfig, rows: int) -> tuple[float, list[Tensor]]:
    """Return a kernel's median time in milliseconds, and its output and gradients."""
    from torch.utils.benchmark import Timer  # imports setuptools

    dtype = torch.bfloat16 if machine.bf16 else torch.float16 if machine.fp16 else torch.float32
    device = "cuda" if machine.cuda else "cpu"
    single = copy.deepcopy(config)
    single.num_hidden_layers, single.vocab_size = 1, 128
    single.bos_token_id = single.eos_token_id = None  # ids outside this small vocabulary cause a warning
    model = AutoModelForCausalLM.from_config(single, dtype=dtype, attn_implementation=name)
    module = next(each for each in model.modules() if hasattr(each, "is_causal"))
    heads, length = config.num_attention_heads, config.max_position_embeddings
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    torch.manual_seed(0)
    groups = getattr(config, "num_key_value_heads", heads)
    counts = [heads, groups, groups]
    draw = functools.partial(torch.randn, device=device, dtype=dtype)
    joint, direction = draw(rows, length, sum(counts), width), draw(rows, length, heads, width)
    joint.requires_grad_()
    ids = torch.arange(rows * length, device=device).view(rows, length) % 37
    lengths = Documents(separator=0).attention(model, ids) if machine.document_mask else {}
    mask = lengths.pop("attention_mask", None)
    attend = AttentionInterface()[model.config._attn_implementation]

    def run() -> list[Tensor]:
        inputs = (part.transpose(1, 2) for part in joint.split(counts, 2))
        out = attend(module, *inputs, mask, dropout=0.0, scaling=width**-0.5, **lengths)[0]
        (gradient,) = torch.autograd.grad(out, joint, direction)
        return [out.detach(), *gradient.split(counts, 2)]

    results = run()
    return Timer("run()", globals={"run": run}).blocked_autorange(min_run_time=TIMING_SECONDS).median * 1e3, results


def _difference(results: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference relative to the largest expected value."""
    pairs = zip(results, expected, strict=True)
    differences = torch.stack([(a - b).abs().max().float() / b.abs().max().float() for a, b in pairs])
    return float(differences.nan_to_num(math.inf).max())
