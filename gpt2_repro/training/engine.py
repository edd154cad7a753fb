"""Set up DeepSpeed, check the training engine, and read the fp32 weights."""

import ctypes
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import accelerate.optimizer
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, extract_model_from_parallel
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from gpt2_repro import ranks
from gpt2_repro.errors import RunFailed, UserError
from gpt2_repro.optim import MUON
from gpt2_repro.optim.muon import MuonWithAdamW, count_pieces
from gpt2_repro.recipe import TrainingSection
from gpt2_repro.run_record.environment import Environment
from gpt2_repro.training import sharded
from gpt2_repro.training.sharded import whole


logger = logging.getLogger(__name__)


PRODUCTS = {"bf16": "bfloat16", "fp16": "float16"}  # dtypes of matrix products


def keep_freed_memory() -> None:
    """Let glibc keep 128 MB of freed memory, which the next step on a CPU would otherwise fault in again."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 1 << 27)  # M_TRIM_THRESHOLD <malloc.h>
        libc.mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD: its largest value, which glibc would reach by itself


def prepare_deepspeed(*, use_cpu: bool) -> None:
    """Hide warnings about DeepSpeed's calls. If `use_cpu`, make DeepSpeed run on the CPU."""
    # DeepSpeed 0.19.8 calls these functions on every step. torch 2.13 renamed them.
    warnings.filterwarnings("ignore", message=".*(all_gather_into|reduce_scatter)_tensor.*", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device", category=UserWarning)  # in each save
    if not use_cpu or importlib.util.find_spec("deepspeed") is None:
        return
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return
    import deepspeed.ops
    import deepspeed.runtime.compiler

    # Use gloo between CPU processes. DeepSpeed would compile an operator, which takes 26 s and needs a compiler. After
    # a killed compilation, the next compilation waits forever for a lock (deepspeed/comm/torch.py, 0.19.8).
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed imports its own Muon to check the optimizer. This would also import torch's compiler, which takes 2 s.
    compiler = deepspeed.runtime.compiler.compile
    deepspeed.runtime.compiler.compile = lambda: lambda function: function
    import deepspeed.runtime.zero.muon.original_muon

    deepspeed.runtime.compiler.compile = compiler


def allow_fsdp_on_cpu() -> None:
    """Make accelerate use FSDP on CPU processes."""
    # accelerate (1.15, state.py) silently ignores FSDP on CPUs.
    PartialState()._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def own_optimizer(
    model: PreTrainedModel, settings: TrainingSection, *, deepspeed: bool
) -> tuple[type, dict[str, Any]] | None:
    """Return the class and the options of Muon, or None for other optimizers.

    The result is for Trainer's argument `optimizer_cls_and_kwargs`.
    """
    if settings.optim != MUON:
        return None
    if deepspeed:
        from deepspeed.runtime.zero import utils

        utils.ZERO_SUPPORTED_OPTIMIZERS.append(MuonWithAdamW)
    options = {
        "lr": settings.learning_rate,
        "betas": (settings.adam_beta1, settings.adam_beta2),
        "eps": settings.adam_epsilon,
        "pieces": count_pieces(model),
        "momentum": settings.muon_momentum,
    }
    return MuonWithAdamW, options


def skip_repeated_work(wrapped: nn.Module, model: nn.Module, optimizer: Any) -> None:
    """Remove host work that Trainer and accelerate repeat in every step.

    `wrapped` is the training engine: the DDP, DeepSpeed or FSDP wrapper around the model.
    """
    # Trainer calls train() before each micro-batch and zero_grad() after each step. Both visit every module. DeepSpeed
    # (0.19.8, ZeRO-1 to 3) has already deleted the gradients in its step, so accelerate's zero_grad() does nothing.
    set_mode = wrapped.train

    def train(mode: bool = True) -> nn.Module:
        if mode and model.training:
            return wrapped
        return set_mode(mode)

    wrapped.train = train
    wrapped.zero_grad = optimizer.zero_grad
    # accelerate (1.15) searches for this package twice per step.
    accelerate.optimizer.is_lomo_available = lambda: False


def add_gradients_directly(zero: Any) -> None:
    """Let ZeRO-1 add each bf16 gradient to its fp32 sum without an fp32 copy of the gradient."""
    # DeepSpeed (0.19.8, runtime/bf16_optimizer.py) copies each gradient of each micro-batch, which is one more kernel.
    if type(zero).__name__ != "BF16_Optimizer":
        return

    @torch.no_grad()
    def add(weight: Any, group: int, index: int, clear_lp_grads: bool) -> None:
        if weight.grad is not None:
            total = zero.fp32_groups_gradients[group][index]
            total.add_(weight.grad.view(-1))
            zero.fp32_groups_has_gradients[group][index] = True

    zero._update_hp_grad = add


def clip_without_waiting(zero: Any) -> None:
    """Let ZeRO-1 in bf16 clip on the device. The update guard has to skip updates that are not finite.

    DeepSpeed (0.19.8) reads the norm twice and copies a number to the device, and each time waits for it. Then a GPU is
    idle until the host has queued the next pass: about 4 ms.
    """
    from deepspeed.runtime import bf16_optimizer, utils

    def clip(input_tensors: Any, max_norm: float, global_norm: torch.Tensor, mpu: Any) -> None:
        for gradients in zero.fp32_groups_gradients_flat:
            factor = max_norm / (global_norm + 1e-6)
            gradients.mul_(factor.clamp(max=1.0))

    utils.mask_nan_or_inf_with_val_inplace = lambda norm, device: None
    bf16_optimizer.is_invalid_grad_norm = lambda norm: False
    bf16_optimizer.clip_tensors_by_global_norm = clip


def save_files_with(engine: Any, save: Callable[[Any, str], None]) -> None:
    """Let DeepSpeed write the files of its checkpoints with `save`, which takes an object and a path."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.zero.config import ZeroStageEnum

    class StagedCheckpointEngine(TorchCheckpointEngine):
        def save(self, state_dict: Any, path: str) -> None:
            save(state_dict, path)

    engine.checkpoint_engine = StagedCheckpointEngine()
    # Python 3.11.2 stores an enum as a call of getattr, which a resume refuses. Later versions store its value.
    ZeroStageEnum.__reduce_ex__ = lambda stage, _: (ZeroStageEnum, (stage.value,))


def prepare_first_save() -> None:
    """Do the one-time set-up for saving, so that it does not delay the first save."""
    get_checkpoint_conversion_mapping("")  # builds the tables that save_pretrained needs
    extract_model_from_parallel(nn.Identity())  # imports DeepSpeed


def load_universal_form(accelerator: Any) -> None:
    """Let DeepSpeed load a checkpoint in universal form. Call this before the engine is built."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    options = dict(config.get("checkpoint", {}))
    options["load_universal"] = True
    config["checkpoint"] = options


def describe_engine(accelerator: Any, wrapped: nn.Module, inner: Any) -> dict[str, Any]:
    """Return the class, dtypes and settings of the training engine."""
    weight = next(wrapped.parameters())
    dtype = _name(weight.dtype)
    autocast = accelerator.mixed_precision
    if accelerator.distributed_type == "DEEPSPEED":
        autocast = "no"
    facts: dict[str, Any] = {
        "engine": type(wrapped).__name__,
        "processes": accelerator.num_processes,
        "zero_stage": None,
        "weights": dtype,
        "matrix_products": PRODUCTS.get(autocast, dtype),
        "master_weights": dtype,
        "gradient_sums": dtype,
    }
    if facts["engine"] == "DeepSpeedEngine":
        zero: Any = wrapped.optimizer
        # The weights that are updated. ZeRO-3 passes them to its optimizer piece by piece during the step.
        groups = getattr(zero, "fp32_partitioned_groups_flat", None)
        if groups:
            masters = groups[0]
        else:
            masters = inner.param_groups[0]["params"][0]
        _, sum_dtype = wrapped.get_data_types()
        facts["zero_stage"] = wrapped.zero_optimization_stage()
        facts["zero_optimizer"] = type(zero).__name__
        facts["master_weights"] = _name(masters.dtype)
        facts["gradient_sums"] = _name(sum_dtype)
        facts["clip"] = zero.clip_grad
        facts["rows_per_pass"] = wrapped.train_micro_batch_size_per_gpu()
        facts["accumulation_steps"] = wrapped.gradient_accumulation_steps()
    for key, own in sharded.dtypes_of_fsdp(wrapped).items():
        facts[key] = dtype
        if own is not None:
            facts[key] = _name(own)
    facts["optimizer"] = type(inner).__name__
    return facts


def fix_restored_optimizer(wrapped: nn.Module, optimizer: torch.optim.Optimizer, *, weight_decay: float) -> None:
    """Correct optimizer state that DeepSpeed 0.19.8 restores wrongly."""
    # Checkpoints in universal form (one file per weight) load step counts to the CPU (runtime/base_optimizer.py).
    # Under ZeRO-3, all groups share one step count, and each group increments it (runtime/zero/stage3.py).
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        if isinstance(step, torch.Tensor):
            device = step.device
            if on_device:
                device = parameter.device
            state["step"] = step.to(device, copy=True)
    if type(wrapped).__name__ != "DeepSpeedEngine":
        return
    engine: Any = wrapped
    # ZeRO restores the limit of the checkpoint and ignores the configuration (runtime/zero/stage_1_and_2.py,
    # `_load_global_state`; runtime/bf16_optimizer.py).
    engine.optimizer.clip_grad = engine.gradient_clipping()
    if engine.zero_optimization_stage() == 3:
        sharded.fix_weight_decay(optimizer, weight_decay)


def loss_scale(accelerator: Any, zero: Any) -> Callable[[], float] | None:
    """Return a function that reads the loss scale, which waits for the device. None: the loss is not scaled.

    `zero` is DeepSpeed's optimizer, or None without DeepSpeed.
    """
    if accelerator.scaler is not None:
        return accelerator.scaler.get_scale
    if zero is not None and accelerator.mixed_precision == "fp16":
        return lambda: float(zero.loss_scale)
    return None


def check_engine(facts: dict[str, Any], environment: Environment, *, max_grad_norm: float) -> None:
    """Raise UserError if the engine does not train as the recipe requires."""
    plan = environment.plan
    expected: dict[str, Any] = {
        "processes": plan.num_processes,
        "master_weights": "float32",
        "matrix_products": PRODUCTS.get(environment.precision or "", "float32"),
    }
    if facts["zero_stage"] is not None:
        expected["clip"] = max_grad_norm
        expected["rows_per_pass"] = plan.micro_batch_size
        expected["accumulation_steps"] = plan.gradient_accumulation_steps
    for key, value in expected.items():
        actual = facts[key]
        if actual != value:
            problem = f"The training engine uses {key} {actual}, but the recipe needs {value}."
            raise UserError(f"{problem} Pass --config_file with a file from accelerate_configs/ to accelerate launch.")
    if facts["gradient_sums"] == "bfloat16" and plan.gradient_accumulation_steps > 1:
        logger.warning("Gradients are added in bf16. In the DeepSpeed JSON, set data_types.grad_accum_dtype to fp32.")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fp32_weights(model: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """Return every weight (or its master) in fp32 on the CPU. A collective.

    A rank without `keep` gets {}.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        master = _full_master(parameter)  # all ranks take part; the device has one complete weight at a time
        if keep:
            weights[name] = master.to("cpu", torch.float32, copy=True)
    return weights


def set_masters(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Set DeepSpeed's fp32 master weights to the complete `weights`."""
    parameters: dict[str, Any] = dict(model.named_parameters())
    for name, weight in weights.items():
        parameter = parameters[name]
        if sharded.is_zero3(parameter):
            sharded.set_master_of_zero3(parameter, weight)
        else:
            parameter.set_full_hp_param(weight.flatten())


def _full_master(parameter: Any) -> torch.Tensor:
    if sharded.is_zero3(parameter):
        return parameter._z3_optimizer.get_full_hp_param(parameter)
    if hasattr(parameter, "_hp_mapping"):  # ZeRO-1 and 2
        return parameter.get_full_hp_param()
    return whole(parameter.detach())


def clip_gradients(accelerator: Any, optimizer: Any, limit: float) -> torch.Tensor:
    """Scale the gradients of an optimizer down to an L2 norm of at most `limit`.

    Returns the norm before scaling, as a DTensor if the gradients are sharded.
    """
    accelerator.unscale_gradients(optimizer)  # in fp16
    parameters: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameters.append(parameter)
    parts: list[Any] = []
    for parameter in parameters:
        part = parameter.grad
        if part.device.type == "cpu" and part.dim() > 1:
            # On a CPU, torch's fp32 norm of millions of elements is up to 7e-4 too small (2.13). Norms of rows are exact.
            norms = torch.linalg.vector_norm(part, dim=-1)
            part = norms.double()
        parts.append(part)
    norm = nn.utils.get_total_norm(parts)
    norm = norm.float()
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


def require_same_weights(model: nn.Module, *, step: int) -> None:
    """Raise RunFailed if the weights of the ranks differ in any bit.

    Sharded weights are not compared. This is a collective: call it on all ranks.
    """
    if sharded.has_shards(model) or os.environ.get("WORLD_SIZE", "1") == "1":
        return
    # The hash is the XOR of the bits. A flipped bit changes it. The order of the reduction does not.
    hashes_of_weights = [torch.hash_tensor(weight.detach()) for weight in model.parameters()]
    hashes = torch.stack(hashes_of_weights).view(torch.int64)
    table = ranks.gather(hashes.cpu())
    differs = table != table[0]
    if not differs.any():
        return
    odd_ranks = differs.any(dim=1).nonzero().flatten()
    odd = ", ".join(str(rank) for rank in odd_ranks.tolist())
    names = [name for name, _ in model.named_parameters()]
    odd_weights = differs.any(dim=0).nonzero().flatten()
    first = names[int(odd_weights[0])]
    problem = f"At step {step} the weights of rank {odd} differ from the weights of rank 0, first in {first}."
    raise RunFailed(f"{problem} A GPU or its connection is faulty. Set NCCL_P2P_DISABLE=1 or use another machine.")
