"""Derive the training arguments of a run from its recipe and the machine."""

import logging
import os
from collections.abc import Callable
from types import SimpleNamespace

from gpt2_repro import hardware
from gpt2_repro.batch_plan import BatchPlan
from gpt2_repro.errors import UserError
from gpt2_repro.launchers import LAUNCHERS, current_launcher, recommended_launcher
from gpt2_repro.optim import OWN_OPTIMIZERS
from gpt2_repro.preflight.cost import price_of
from gpt2_repro.recipe import values_of
from gpt2_repro.run_record.supervision import WENT_BACK, noted
from gpt2_repro.training.arguments import (
    PretrainingArguments,
    TrainingRecipe,
    output_dir_of,
    warmup_steps,
)
from gpt2_repro.training.engine import allow_fsdp_on_cpu, build_whole, prepare_deepspeed
from gpt2_repro.training.launcher import check_launcher
from gpt2_repro.training.tracking import check_reporting
from gpt2_repro.training.workload import plan_run


logger = logging.getLogger(__name__)


def resolve_arguments(
    recipe: TrainingRecipe,
    *,
    check: Callable[[SimpleNamespace, BatchPlan], None] | None = None,
) -> tuple[PretrainingArguments, BatchPlan]:
    """Return the training arguments and the batch plan for this machine.

    Args:
        recipe: a recipe whose model and batch sizes are set (not 0), see `sizing.follow_data`.
        check: a function that is called before the slow imports of transformers. Its arguments are an object with
            the settings as attributes, and the batch plan. It may raise UserError.

    Raises UserError for settings that the machine, the launcher or transformers does not support.
    """
    training = recipe.training
    check_launcher()
    launcher, any_hardware = current_launcher(), training.accept_any_hardware
    use_cpu = hardware.choose_device(use_cpu=training.use_cpu, accept_any_hardware=any_hardware)
    if not use_cpu:
        hardware.check_processes(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    bf16, precision = hardware.choose_bf16(training.bf16, use_cpu=use_cpu, accept_any_hardware=any_hardware)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    plan = plan_run(training, recipe.data, num_processes=processes)
    if training.torch_compile and not launcher.whole_weights:
        fix = f"Omit --torch_compile, or launch with --config_file {recommended_launcher().config}."
        raise UserError(
            f"--torch_compile does not work with {launcher.name}, because this launcher shards the weights. {fix}"
        )
    compile_requested = training.torch_compile if launcher.whole_weights and not plan.by_length else False
    compiles = hardware.choose_compile(compile_requested, use_cpu=use_cpu, accept_any_hardware=any_hardware)
    derived = {
        "output_dir": output_dir_of(recipe),
        "run_name": training.run_name or recipe.title,
        "use_cpu": use_cpu,
        "bf16": bf16,
        "max_steps": plan.max_steps,
        "warmup_steps": warmup_steps(training, plan.max_steps),
        "torch_compile": compiles,
        # Copies from pinned memory need not wait for the work that is queued on the GPU.
        # Batches by length differ in size, so accelerate cannot even them out. All processes have the same number.
        "accelerator_config": {"non_blocking": not use_cpu, "even_batches": not plan.by_length},
        "dataloader_persistent_workers": training.dataloader_num_workers > 0,
        "usd_per_hour": training.usd_per_hour or _list_price(use_cpu=use_cpu),
        "eval_on_start": training.eval_on_start and training.eval_strategy != "no",
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        # If a supervised run has gone back to this checkpoint already, it resumes from its newest one.
        "resume_from": "" if training.resume_from == noted(WENT_BACK) else training.resume_from,
    }
    if training.max_usd and not training.usd_per_hour:
        raise UserError("--max_usd needs the price of the machine. Pass --usd_per_hour.")
    needs_whole = f"--optim {training.optim}" if training.optim in OWN_OPTIMIZERS else ""
    needs_whole = needs_whole or (f"--ema_steps {training.ema_steps}" if training.ema_steps else "")
    if needs_whole and not launcher.whole_weights:
        fix = f"Launch with --config_file {recommended_launcher().config}."
        raise UserError(f"{needs_whole} needs complete weights, but {launcher.name} shards the weights. {fix}")
    settings = values_of(training) | derived
    if check:
        check(SimpleNamespace(**settings), plan)
    prepare_deepspeed(use_cpu=use_cpu)
    try:
        args = PretrainingArguments(**settings)
    except ValueError as error:
        raise UserError(" ".join(str(error).split())) from None
    # Each process uses one device. With several GPUs, Trainer would wrap the model in DataParallel.
    args._n_gpu = min(1, args.n_gpu)
    build_whole()
    if launcher == LAUNCHERS["fsdp2"] and use_cpu:
        allow_fsdp_on_cpu()
    check_reporting(args.report_to)
    logger.info("precision: %s", precision)
    if plan.by_length:
        logger.info("compilation: off, because with group_by_length the batches have different shapes")
    elif not launcher.whole_weights:
        logger.info("compilation: off, because %s shards the weights", launcher.name)
    return args, plan


def _list_price(*, use_cpu: bool) -> float:
    """Return the list price of the GPUs of all processes in dollars per hour.

    Returns 0 on a CPU, or if the price is not known.
    """
    accelerator = hardware.find_accelerator(use_cpu=use_cpu)
    price = price_of(accelerator.name) if accelerator.kind == "cuda" else None
    if price is None:
        return 0.0
    cards = int(os.environ.get("WORLD_SIZE", "1"))
    message = "price: $%.2f per hour for %d x %s, %s. Pass --usd_per_hour to change it."
    logger.info(message, cards * price.usd_per_hour, cards, price.card, price)
    return cards * price.usd_per_hour
