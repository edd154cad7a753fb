"""From what a recipe says to what this machine will do: device, precision, accumulation, steps."""

import logging
import os
from typing import Any

from transformers.training_args import OptimizerNames

from gpt2_repro import hardware
from gpt2_repro.batch_plan import BatchPlan, plan_run
from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.manifest import Manifest
from gpt2_repro.preflight.prices import price_of
from gpt2_repro.supervision import WENT_BACK, noted
from gpt2_repro.training.arguments import MUON, PretrainingArguments
from gpt2_repro.training.engine import prepare_deepspeed
from gpt2_repro.training.launcher import SHARDING, check_launcher, launcher_name
from gpt2_repro.training.sharding import allow_fsdp_on_cpu, build_whole
from gpt2_repro.training.tracking import check_reporting


logger = logging.getLogger(__name__)


def resolve_arguments(
    asked: dict[str, Any], *, sequence_length: int, stem: str, title: str = "", manifest: Manifest | None = None
) -> tuple[PretrainingArguments, BatchPlan]:
    """The arguments with everything derived, and the plan they follow.

    Args:
        asked: every field of PretrainingArguments as the recipe and the command line say it.
        sequence_length: targets of a row.
        stem: names the run directory where none is asked for.
        title: names the run for tracking services where no other name is asked for.
        manifest: of the prepared folder; None for full rows, as many as it takes.

    Raises UserError for a device that is not there or cannot be used, more processes than GPUs, tokens per step that
    do not divide or cannot be cut, a sampling strategy that does not fit, a DeepSpeed JSON that would not do what it says, and what transformers refuses.
    """
    check_launcher()
    launcher, any_hardware = launcher_name(), asked["accept_any_hardware"]
    use_cpu = hardware.choose_device(use_cpu=asked["use_cpu"], accept_any_hardware=any_hardware)
    if not use_cpu:
        hardware.check_processes(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    bf16, precision = hardware.choose_bf16(asked["bf16"], use_cpu=use_cpu, accept_any_hardware=any_hardware)
    plan = plan_run(
        asked,
        sequence_length=sequence_length,
        packing=manifest.form.packing if manifest else "concat",
        min_length=manifest.form.min_length if manifest else 0,
        num_processes=int(os.environ.get("WORLD_SIZE", "1")),
        epoch_targets=manifest.counts["train"].row_tokens if manifest else None,
    )
    if launcher in SHARDING and asked["torch_compile"]:
        raise UserError(
            f"{launcher} cuts the compiled loss apart: leave out --torch_compile, or launch with --config_file "
            "accelerate_configs/zero1.yaml"
        )
    compile_asked = False if plan.by_length or launcher in SHARDING else asked["torch_compile"]
    compiles = hardware.choose_compile(compile_asked, use_cpu=use_cpu, accept_any_hardware=any_hardware)
    derived = {
        "output_dir": asked["output_dir"] or f"runs/{stem}",
        "run_name": asked["run_name"] or title or stem,
        "use_cpu": use_cpu,
        "bf16": bf16,
        "max_steps": plan.max_steps,
        "torch_compile": compiles,
        # Copies of pinned memory need not wait for what the GPU still does.
        # Batches that differ in size cannot be made even, and need not be: all processes have equally many.
        "accelerator_config": {"non_blocking": True, "even_batches": not plan.by_length},
        "dataloader_persistent_workers": asked["dataloader_num_workers"] > 0,
        "usd_per_hour": asked["usd_per_hour"] or _list_price(use_cpu=use_cpu),
        "eval_on_start": asked["eval_on_start"] and asked["eval_strategy"] != "no",
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        # A command that is started again after it went back goes on from there.
        "resume_from": "" if asked["resume_from"] == noted(WENT_BACK) else asked["resume_from"],
    }
    if asked["max_usd"] and not asked["usd_per_hour"]:
        raise UserError("--max_usd needs the price of the machine: --usd_per_hour")
    optimizers = [MUON, *(name.value for name in OptimizerNames)]
    if asked["optim"] not in optimizers:
        raise UserError(f"there is no --optim {asked['optim']}: {did_you_mean(asked['optim'], optimizers)}")
    if not 0 <= asked["decay_fraction"] <= 1:
        raise UserError(f"--decay_fraction {asked['decay_fraction']} must be from 0 to 1")
    if asked["optim"] == MUON and launcher != "ddp":
        raise UserError(
            f"muon updates whole matrices and {launcher} cuts them up: launch with --config_file "
            "accelerate_configs/ddp.yaml"
        )
    prepare_deepspeed(use_cpu=use_cpu)
    try:
        args = PretrainingArguments(**(asked | derived))
    except ValueError as error:
        raise UserError(" ".join(str(error).split())) from None
    # One process is one device: on a machine with several GPUs Trainer would wrap the model in DataParallel.
    args._n_gpu = min(1, args.n_gpu)
    build_whole()
    if launcher == "fsdp2" and use_cpu:
        allow_fsdp_on_cpu()
    check_reporting(args.report_to)
    logger.info("precision: %s", precision)
    if plan.by_length:
        logger.info("compilation: off, for train_sampling_strategy group_by_length gives every pass another shape")
    elif launcher in SHARDING:
        logger.info("compilation: off, for %s fetches weights between layers", launcher)
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
