"""From what a recipe says to what this machine will do: device, precision, accumulation, steps."""

import logging
import os

from gpt2_repro import hardware
from gpt2_repro.batch_plan import BatchPlan
from gpt2_repro.errors import UserError
from gpt2_repro.launchers import LAUNCHERS, current_launcher, recommended_launcher
from gpt2_repro.preflight.cost import price_of
from gpt2_repro.recipe import values_of
from gpt2_repro.supervision import WENT_BACK, noted
from gpt2_repro.training.arguments import MUON, PretrainingArguments, TrainingRecipe, output_dir_of, warmup_steps
from gpt2_repro.training.engine import allow_fsdp_on_cpu, build_whole, prepare_deepspeed
from gpt2_repro.training.launcher import check_launcher
from gpt2_repro.training.tracking import check_reporting
from gpt2_repro.training.workload import plan_run


logger = logging.getLogger(__name__)


def resolve_arguments(
    recipe: TrainingRecipe, *, epoch_targets: int | None = None
) -> tuple[PretrainingArguments, BatchPlan]:
    """Return the arguments with everything derived for this machine, and the plan that they follow.

    Args:
        epoch_targets: targets of all training rows; None for as many full rows as the run needs.

    Raises UserError for a device that is not there or cannot be used, more processes than GPUs, tokens per step that do
    not divide or cannot be cut, a sampling strategy that does not fit, a DeepSpeed JSON with settings that would have no
    effect, and everything that transformers refuses.
    """
    asked = recipe.training
    check_launcher()
    launcher, any_hardware = current_launcher(), asked.accept_any_hardware
    use_cpu = hardware.choose_device(use_cpu=asked.use_cpu, accept_any_hardware=any_hardware)
    if not use_cpu:
        hardware.check_processes(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    bf16, precision = hardware.choose_bf16(asked.bf16, use_cpu=use_cpu, accept_any_hardware=any_hardware)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    plan = plan_run(asked, recipe.data, num_processes=processes, epoch_targets=epoch_targets)
    if asked.torch_compile and not launcher.torch_compile:
        fix = f"Leave it out, or launch with --config_file {recommended_launcher().config}."
        raise UserError(f"{launcher.name} cannot do --torch_compile, because it shards weights. {fix}")
    compile_asked = asked.torch_compile if launcher.torch_compile and not plan.by_length else False
    compiles = hardware.choose_compile(compile_asked, use_cpu=use_cpu, accept_any_hardware=any_hardware)
    derived = {
        "output_dir": output_dir_of(recipe),
        "run_name": asked.run_name or recipe.title,
        "use_cpu": use_cpu,
        "bf16": bf16,
        "max_steps": plan.max_steps,
        "warmup_steps": warmup_steps(asked, plan.max_steps),
        "torch_compile": compiles,
        # Copies of pinned memory need not wait for what the GPU still does.
        # Batches that differ in size cannot be made even, and need not be: all processes have equally many.
        "accelerator_config": {"non_blocking": not use_cpu, "even_batches": not plan.by_length},
        "dataloader_persistent_workers": asked.dataloader_num_workers > 0,
        "usd_per_hour": asked.usd_per_hour or _list_price(use_cpu=use_cpu),
        "eval_on_start": asked.eval_on_start and asked.eval_strategy != "no",
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        # A command that is started again after it went back goes on from there.
        "resume_from": "" if asked.resume_from == noted(WENT_BACK) else asked.resume_from,
    }
    if asked.max_usd and not asked.usd_per_hour:
        raise UserError("--max_usd needs the price of the machine: --usd_per_hour")
    if asked.optim == MUON and not launcher.muon:
        fix = f"Launch with --config_file {recommended_launcher(muon=True).config}."
        raise UserError(f"{launcher.name} cannot run muon, because it shards matrices. {fix}")
    prepare_deepspeed(use_cpu=use_cpu)
    try:
        args = PretrainingArguments(**(values_of(asked) | derived))
    except ValueError as error:
        raise UserError(" ".join(str(error).split())) from None
    # One process is one device: on a machine with several GPUs Trainer would wrap the model in DataParallel.
    args._n_gpu = min(1, args.n_gpu)
    build_whole()
    if launcher == LAUNCHERS["fsdp2"] and use_cpu:
        allow_fsdp_on_cpu()
    check_reporting(args.report_to)
    logger.info("precision: %s", precision)
    if plan.by_length:
        logger.info("compilation: off, for train_sampling_strategy group_by_length gives every pass another shape")
    elif not launcher.torch_compile:
        logger.info("compilation: off, for %s fetches weights between layers", launcher.name)
    return args, plan


def _list_price(*, use_cpu: bool) -> float:
    """What all processes' cards cost an hour by the price table; 0 for a card that it does not have, and for a CPU."""
    accelerator = hardware.find_accelerator(use_cpu=use_cpu)
    price = price_of(accelerator.name) if accelerator.kind == "cuda" else None
    if price is None:
        return 0.0
    cards = int(os.environ.get("WORLD_SIZE", "1"))
    told = "price: $%.2f an hour for %d x %s, %s; pass --usd_per_hour to change it"
    logger.info(told, cards * price.usd_per_hour, cards, price.card, price)
    return cards * price.usd_per_hour
