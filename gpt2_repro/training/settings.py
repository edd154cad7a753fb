"""Derive the settings of a run from its recipe and the machine."""

import dataclasses
import logging
import math
import os
import re
from typing import TYPE_CHECKING, Any

from gpt2_repro import hardware
from gpt2_repro.checkpoints.resuming import RunIdentity, Start
from gpt2_repro.config import values_of
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.fields import settings_of
from gpt2_repro.launchers import FSDP2, RECOMMENDED, Launcher, current_launcher
from gpt2_repro.manifest import Manifest
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.optim import MUON
from gpt2_repro.planning.batch_plan import plan_run
from gpt2_repro.planning.cost import price_of
from gpt2_repro.recipe import TrainingRecipe, TrainingSection, output_dir_of
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.environment import BatchPlan
from gpt2_repro.run_record.notes import WENT_BACK, noted
from gpt2_repro.training.launch_checks import check_launcher


if TYPE_CHECKING:
    from gpt2_repro.training.trainer import PretrainingArguments

logger = logging.getLogger(__name__)

DEFAULT_OPTIMIZER = "adamw_torch_fused"
# Optimizers of transformers whose update of a weight does not depend on the other weights of its matrix, so that they
# can be used with DeepSpeed, which flattens the weights.
ELEMENTWISE_OPTIMIZERS = (
    DEFAULT_OPTIMIZER,
    *("adamw_torch", "adamw_apex_fused", "adamw_anyprecision", "sgd", "adagrad", "rmsprop"),
    *("adamw_bnb_8bit", "paged_adamw_32bit", "paged_adamw_8bit"),
    *("lion_32bit", "lion_8bit", "paged_lion_32bit"),
)


@dataclasses.dataclass(frozen=True)
class RunSetup:
    """What is known of a run before it starts.

    Attributes:
        recipe: as in the file and on the command line, with the sizes that are derived from the data.
        settings: the section `training:` of the recipe, resolved for this machine and launcher.
        run: the run directory.
        identity: the settings that must not change on a resume.
    """

    recipe: TrainingRecipe
    settings: TrainingSection
    plan: BatchPlan
    data: PreparedData
    run: RunRecord
    identity: RunIdentity


def check_optimizer(optim: str) -> None:
    """Raise UserError for optimizers of transformers (5.23) that PretrainingTrainer would use wrongly."""
    reason = None
    if optim.startswith("schedule_free_"):
        reason = "validation, checkpoints and final/ would not use its average of the weights. --ema_steps has one"
    elif optim in ("lomo", "adalomo") or optim.endswith("_layerwise"):
        reason = "it updates weights in the backward pass, before gradients are accumulated, clipped and checked"
    elif optim.startswith(("galore_", "apollo_")):
        reason = "transformers would ignore --weight_decay with it"  # trainer_optimizer.py, _setup_low_rank_optimizer
    if reason is not None:
        raise UserError(f"--optim {optim} is not supported: {reason}.")


def resolve_settings(recipe: TrainingRecipe) -> tuple[TrainingSection, BatchPlan]:
    """Return the settings for this machine and launcher, and the batch plan.

    Args:
        recipe: a recipe whose model and batch sizes are set (not 0), see `sizing.follow_data`.

    Raises UserError for settings that the machine or the launcher does not support.
    """
    check_launcher()
    training = recipe.training
    launcher = current_launcher()
    any_hardware = training.accept_any_hardware
    use_cpu = hardware.uses_cpu(use_cpu=training.use_cpu, accept_any_hardware=any_hardware)
    if not use_cpu:
        hardware.check_processes(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    asked = training.asked_precision
    precision, reason = hardware.choose_precision(asked, use_cpu=use_cpu, accept_any_hardware=any_hardware)
    plan = plan_run(training, recipe.data, num_processes=int(os.environ.get("WORLD_SIZE", "1")))
    if not launcher.whole_weights:
        _check_sharded(training, launcher, precision)
    check_optimizer(training.optim)
    if launcher.deepspeed_json and training.optim not in (*ELEMENTWISE_OPTIMIZERS, MUON):
        fix = f"Pass --optim {DEFAULT_OPTIMIZER}, or launch with --config_file accelerate_configs/ddp.yaml."
        problem = f"DeepSpeed flattens the weights, and --optim {training.optim} may depend on their shapes"
        raise UserError(f"{problem}. {fix}")
    if training.max_usd and not training.usd_per_hour:
        raise UserError("--max_usd needs the price of the machine. Pass --usd_per_hour.")
    compiles = training.torch_compile if launcher.whole_weights else False
    warmup = training.warmup_steps
    if warmup < 1:
        warmup = round(warmup * plan.max_steps)
    workers = training.dataloader_num_workers
    if workers is None:
        workers = 0 if use_cpu else 2  # on a CPU, they keep old copies of the weights: 1.7 GB for GPT-2 124M
    logger.info("precision: %s", reason)
    settings = dataclasses.replace(
        training,
        output_dir=output_dir_of(recipe),
        run_name=tracking_name(training.run_name or recipe.title),
        use_cpu=use_cpu,
        bf16=precision == "bf16",
        precision="fp16" if precision == "fp16" else "",
        max_steps=plan.max_steps,
        warmup_steps=int(warmup),
        torch_compile=hardware.choose_compile(compiles, use_cpu=use_cpu, accept_any_hardware=any_hardware),
        dataloader_num_workers=workers,
        usd_per_hour=training.usd_per_hour or _list_price(use_cpu=use_cpu),
        eval_on_start=training.eval_on_start and training.eval_strategy != "no",
        # If a supervised run has gone back to this checkpoint already, it resumes from its newest one.
        resume_from="" if training.resume_from == noted(WENT_BACK) else training.resume_from,
    )
    if settings.profile_step > settings.last_step:
        raise UserError(f"--profile_step {settings.profile_step} is after the last step, {settings.last_step}.")
    return settings, plan


def _check_sharded(training: TrainingSection, launcher: Launcher, precision: str) -> None:
    """Raise UserError for options that need complete weights, under a launcher that shards them."""
    option = ""
    if training.torch_compile:
        option = "--torch_compile"
    elif training.optim == MUON:
        option = f"--optim {training.optim}"
    elif training.ema_steps:
        option = f"--ema_steps {training.ema_steps}"
    elif precision == "fp16":
        option = "--precision fp16"
    if option:
        fix = f"Launch with --config_file {RECOMMENDED.config}."
        raise UserError(f"{option} needs complete weights, but {launcher.name} shards the weights. {fix}")


def run_identity_of(
    settings: TrainingSection, plan: BatchPlan, *, data: Manifest, model: ModelArguments
) -> RunIdentity:
    """Return the settings of a run that must not change on a resume."""
    validation = {split: sha256 for split, sha256 in data.sha256.items() if split != "train"}
    values: dict[str, Any] = {
        "data": data.sha256["train"],
        "validation": validation,  # otherwise the losses of two texts would be in one curve
        "tokenizer": data.tokenizer_sha256,
        "sequence_length": plan.sequence_length,
        "tokens_per_step": plan.tokens_per_step,
        "max_steps": plan.max_steps,
    }
    changeable = {"data", "validation"}
    all_values = values_of(settings) | values_of(model)
    for name, setting in settings_of(settings, model).items():
        if not setting.is_trajectory or name == "total_tokens":  # max_steps follows from it
            continue
        values.setdefault(name, all_values[name])
        if setting.role == "changeable":
            changeable.add(name)
    return RunIdentity(values, changeable, settings.allow_resume_change)


def settings_from(settings: TrainingSection, start: Start) -> TrainingSection:
    """Return the settings of a run that begins at `start`: whether it validates first."""
    step = start.step
    if not step:
        return settings
    if settings.eval_strategy == "no":
        is_due = False
    else:
        is_due = step % settings.eval_steps == 0 or step == settings.last_step
    return dataclasses.replace(settings, eval_on_start=is_due and not start.is_validated)


def to_training_arguments(settings: TrainingSection, plan: BatchPlan) -> "PretrainingArguments":
    """Return the training arguments of this process. On several processes, this starts the process group.

    Raises UserError for settings that transformers does not support.
    """
    # Imports of several seconds.
    from transformers import TrainingArguments

    from gpt2_repro.training.engine import allow_fsdp_on_cpu, keep_freed_memory, prepare_deepspeed
    from gpt2_repro.training.sharded import build_whole
    from gpt2_repro.training.tracking import check_reporting
    from gpt2_repro.training.trainer import PretrainingArguments

    if settings.use_cpu:
        keep_freed_memory()
    prepare_deepspeed(use_cpu=settings.use_cpu)
    further = settings.trainer.values
    known = TrainingArguments.__dataclass_fields__
    for name in sorted(further):
        if name not in known:
            raise UserError(f"trainer has no field {name!r}. {did_you_mean(name, known)}")
    shared = {name: value for name, value in values_of(settings).items() if name in known}
    derived = {
        # The Trainer subclass builds Muon and the schedule, which transformers does not have, and model/build.py
        # compiles the loss. Trainer would compile the DDP or DeepSpeed wrapper.
        "optim": DEFAULT_OPTIMIZER if settings.optim == MUON else settings.optim,
        "lr_scheduler_type": "constant",
        "torch_compile": False,
        "fp16": settings.precision == "fp16",
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        # Copies from pinned memory need not wait for the work that is queued on the GPU.
        "accelerator_config": {"non_blocking": not settings.use_cpu},
        "remove_unused_columns": False,  # the collator reads the rows itself
        "ddp_find_unused_parameters": False,
    }
    defaults: dict[str, Any] = {"logging_nan_inf_filter": False, "logging_first_step": True}
    workers = settings.dataloader_num_workers
    if workers:
        # Trainer reads all micro-batches of a step at once. The workers load them during the step before.
        defaults["dataloader_prefetch_factor"] = max(2, math.ceil(plan.gradient_accumulation_steps / workers))
    try:
        args = PretrainingArguments(settings=settings, **shared | defaults | further | derived)
    except (ValueError, TypeError) as error:
        raise UserError(" ".join(str(error).split())) from None
    # Each process uses one device. With several GPUs, Trainer would wrap the model in DataParallel.
    args._n_gpu = min(1, args.n_gpu)
    build_whole()
    if current_launcher() == FSDP2 and settings.use_cpu:
        allow_fsdp_on_cpu()
    check_reporting(args.report_to)
    return args


def tracking_name(name: str) -> str:
    """Return a run's name for tracking services.

    With WANDB_LOG_MODEL, it has only the characters that wandb allows in the names of the models of a run.
    """
    if os.environ.get("WANDB_LOG_MODEL", "false") == "false":
        return name
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)


def _list_price(*, use_cpu: bool) -> float:
    """Return the list price of the GPUs of all processes in dollars per hour, or 0 if it is not known."""
    accelerator = hardware.find_accelerator(use_cpu=use_cpu)
    price = price_of(accelerator.name) if accelerator.kind == "cuda" else None
    if price is None:
        return 0.0
    cards = int(os.environ.get("WORLD_SIZE", "1"))
    message = "price: $%.2f per hour for %d x %s, %s. Pass --usd_per_hour to change it."
    logger.info(message, cards * price.usd_per_hour, cards, price.card, price)
    return cards * price.usd_per_hour
