"""Choose the attention kernel of a run: the fastest that works on this machine."""

import copy
import importlib.util
import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import is_flash_attn_2_available, is_kernels_available

from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.model.arguments import GPT2, FlashKernel
from gpt2_repro.model.document_mask import Documents
from gpt2_repro.model.packed_attention import HEAD_SIZE_MULTIPLE, MOST_HEAD_SIZE, packed_attention
from gpt2_repro.model.pretraining import PACKED, SDPA


logger = logging.getLogger(__name__)

PACKAGE: FlashKernel = "flash_attention_2"
HUB_KERNEL: FlashKernel = "kernels-community/flash-attn2"
FLASH = (PACKAGE, HUB_KERNEL)
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
    if name in ("causal_cudnn", PACKED):
        if machine.document_mask or machine.length % 128:
            return "cuDNN is wrong for document masks and for rows whose length is not a multiple of 128"
        if name == PACKED and torch.version.hip is not None:
            return "there is no NVIDIA GPU"
        if name == PACKED and importlib.util.find_spec("cudnn") is None:
            return "nvidia-cudnn-frontend is not installed (requirements-gpu.txt)"
        return None
    if machine.one_row_compiled and not machine.document_mask:
        # _is_packed_sequence in transformers 5.23 branches on the position ids. Position ids are not read if the lengths
        # of documents are passed.
        return "torch.compile cannot compile transformers' flash attention for a micro-batch of 1 row"
    if name == PACKAGE and not is_flash_attn_2_available():
        return "flash-attn is not installed (requirements-gpu.txt)"
    if name == HUB_KERNEL and not is_kernels_available():
        return "the package kernels is not installed in the version that transformers needs"
    return None


def packed_obstacle(config: PreTrainedConfig) -> str | None:
    """Return why packed_cudnn cannot compute the attention of a model, or None if it can."""
    if config.model_type != GPT2:
        return "it needs --model_type gpt2, where one product computes queries, keys and values"
    if config.scale_attn_by_inverse_layer_idx or not config.scale_attn_weights:
        return "it always scales attention by the square root of the head size"
    if config.attn_pdrop:
        return "it has no dropout"
    head_size = config.hidden_size // config.num_attention_heads
    if head_size > MOST_HEAD_SIZE or head_size % HEAD_SIZE_MULTIPLE:
        return f"the head size {head_size} is above {MOST_HEAD_SIZE} or not a multiple of {HEAD_SIZE_MULTIPLE}"
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
        _require_kernel(requested, machine, config, rows)
        return Choice(requested, "as requested")
    if not machine.cuda:
        return Choice("causal_sdpa", "torch's SDPA, because there is no NVIDIA or AMD GPU")
    obstacles = {name: obstacle(name, machine) for name in (*FLASH, *SDPA)}
    if obstacles[PACKAGE] is None:
        obstacles[HUB_KERNEL] = "the package flash-attn has the same kernel"
    if machine.document_mask:
        return _choose_for_documents(obstacles, machine, config, rows)
    if earlier:
        problem = obstacles.get(earlier, "it is only used on request")
        if problem is None:
            return Choice(earlier, "as at the start of the run")
        why = "The run began with the attention kernel %s, but %s. All usable kernels are timed again."
        logger.warning(why, earlier, problem)
    shape = f"{rows} rows of {machine.length} tokens on {torch.cuda.get_device_name()}"
    return fastest(time_kernels(obstacles, machine, config, rows), shape)


def _require_kernel(name: str, machine: Machine, config: PreTrainedConfig, rows: int) -> None:
    """Raise UserError if an attention kernel cannot be used, or gives other results than causal_sdpa."""
    problem: str | float | None = obstacle(name, machine)
    if problem is None and name == PACKED:
        problem = packed_obstacle(config)
    if problem is None and name in (*FLASH, PACKED):
        problem = time_kernels({name: None, "causal_sdpa": None}, machine, config, rows)[name]
    if isinstance(problem, str):
        raise UserError(f"{name} cannot be used: {problem}. Pass --attn_implementation auto.")


def _choose_for_documents(
    obstacles: Mapping[str, str | None], machine: Machine, config: PreTrainedConfig, rows: int
) -> Choice:
    """Return the attention kernel of a run with document masks."""
    candidates = {name: obstacles[name] for name in (*FLASH, "causal_sdpa")}
    timings = time_kernels(candidates, machine, config, rows)
    for name in FLASH:
        if isinstance(timings[name], float):
            return Choice(name, "it takes document lengths instead of a mask")
    why = "; ".join(f"{name}: {timings[name]}" for name in FLASH)
    return Choice("causal_sdpa", f"torch's SDPA with a document mask; {why}")


def fastest(timings: Mapping[str, float | str], shape: str) -> Choice:
    """Return the fastest kernel, or causal_sdpa if no kernel was timed. Log all times."""
    times: list[tuple[float, str]] = []
    logger.info("attention, forward and backward, %s:", shape)
    for name, result in timings.items():
        if isinstance(result, str):
            logger.info("  %-30s %s", name, result)
        else:
            logger.info("  %-30s %.2f ms", name, result)
            times.append((result, name))
    if not times:
        return Choice("causal_sdpa", "no kernel could be timed")
    times.sort()
    best_time, best = times[0]
    others = "the only kernel"
    if len(times) > 1:
        others = ", ".join(f"{name} {time:.2f}" for time, name in times[1:])
    return Choice(best, f"{best_time:.2f} ms; {others}")


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
    timings: dict[str, float | str] = {}
    usable: list[str] = []
    for name, reason in obstacles.items():
        if reason is None:
            usable.append(name)
        else:
            timings[name] = reason
    usable.sort()
    if "causal_sdpa" in usable:  # first, because its results are the expected ones
        usable.remove("causal_sdpa")
        usable.insert(0, "causal_sdpa")
    expected: list[Tensor] = []
    for name in usable:
        try:
            milliseconds, results = _run_kernel(name, machine, config, rows)
            timings[name] = milliseconds
            if not expected:
                expected = results
            difference = largest_difference(results, expected)
            if difference > MOST_DIFFERENCE:
                timings[name] = f"it differs from causal_sdpa by {difference:.3f}"
        except Exception as error:  # packages of kernels raise errors of their own
            message = in_a_line(error)[:200]
            timings[name] = f"it fails on this machine ({message})"
    return timings


def _run_kernel(name: str, machine: Machine, config: PreTrainedConfig, rows: int) -> tuple[float, list[Tensor]]:
    """Return a kernel's median time in milliseconds, and its output and gradients."""
    from torch.utils.benchmark import Timer  # imports setuptools

    if machine.bf16:
        dtype = torch.bfloat16
    elif machine.fp16:
        dtype = torch.float16
    else:
        dtype = torch.float32
    device = "cpu"
    if machine.cuda:
        device = "cuda"
    single = copy.deepcopy(config)
    single.num_hidden_layers = 1
    single.vocab_size = 128
    single.bos_token_id = single.eos_token_id = None  # ids outside this small vocabulary cause a warning
    model = AutoModelForCausalLM.from_config(single, dtype=dtype, attn_implementation=name)
    attentions = [module for module in model.modules() if hasattr(module, "is_causal")]
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", heads)
    counts = [heads, groups, groups]  # of queries, keys and values
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    length = config.max_position_embeddings
    torch.manual_seed(0)
    joint = torch.randn(rows, length, sum(counts), width, device=device, dtype=dtype, requires_grad=True)
    direction = torch.randn(rows, length, heads, width, device=device, dtype=dtype)
    ids = torch.arange(rows * length, device=device).view(rows, length) % 37
    lengths: dict[str, Any] = {}
    if machine.document_mask:
        lengths = Documents(separator=0).attention(model, ids)
    mask = lengths.pop("attention_mask", None)
    attend: Any = AttentionInterface()[model.config._attn_implementation]

    def run() -> list[Tensor]:
        if name == PACKED:
            out = packed_attention(joint.flatten(2), heads).view_as(direction)
        else:
            query, key, value = (part.transpose(1, 2) for part in joint.split(counts, 2))
            outputs = attend(attentions[0], query, key, value, mask, dropout=0.0, scaling=width**-0.5, **lengths)
            out = outputs[0]
        [gradient] = torch.autograd.grad(out, joint, direction)
        return [out.detach(), *gradient.split(counts, 2)]

    results = run()
    timing = Timer("run()", globals={"run": run}).blocked_autorange(min_run_time=TIMING_SECONDS)
    return timing.median * 1e3, results


def largest_difference(results: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference relative to the largest expected value."""
    largest = 0.0
    for result, target in zip(results, expected, strict=True):
        scale = target.abs().max().float()
        difference = (result - target).abs().max().float() / scale
        difference = difference.nan_to_num(math.inf)
        largest = max(largest, float(difference))
    return largest
