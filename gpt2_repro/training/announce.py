"""What a run is before it starts: the facts of environment.json, and the same said in lines."""

import dataclasses
import logging
from typing import Any

from transformers import PreTrainedModel

from gpt2_repro.compute import BatchPlan
from gpt2_repro.hardware import find_accelerator
from gpt2_repro.model.scale import measure
from gpt2_repro.training.arguments import PretrainingArguments
from gpt2_repro.training.run_directory import describe_environment


logger = logging.getLogger(__name__)


def describe_run(
    args: PretrainingArguments,
    plan: BatchPlan,
    model: PreTrainedModel,
    data: dict[str, Any],
    attention: tuple[str, str],
    beside_default: dict[str, Any],
) -> dict[str, Any]:
    """Everything a reader needs to know where this run's numbers come from.

    Args:
        data: the manifest of the prepared folder.
        attention: its name and why it was chosen.
        beside_default: the deviations from the default recipe, and the reference whose curve is to be expected.
    """
    scale = measure(model, plan.sequence_length)
    return (
        describe_environment()
        | {
            "accelerator": dataclasses.asdict(find_accelerator(use_cpu=args.use_cpu)),
            "plan": dataclasses.asdict(plan) | {"total_tokens": plan.total_tokens},
            "architecture": model.config.model_type,
            "parameters": scale.parameters,
            "active_parameters": scale.active,
            "flops_per_token": scale.flops_per_token,
            "precision": "bf16" if args.bf16 else "fp32",
            "attention": f"{attention[0]} ({attention[1]})",
            "document_mask": model.documents is not None,
            "usd_per_hour": args.usd_per_hour or None,
            "seed": args.seed,
            "data": data,
        }
        | beside_default
    )


def announce(environment: dict[str, Any]) -> dict[str, Any]:
    """Say what will be trained, in numbers that a person can check; return the same facts."""
    plan, data = environment["plan"], environment["data"]
    counts, by_length = data["counts"]["train"], plan["by_length"]
    if by_length:
        epochs = plan["total_tokens"] / max(1, counts["row_tokens"])
    else:
        epochs = plan["max_steps"] * (plan["tokens_per_step"] // plan["sequence_length"]) / max(1, counts["rows"])
    active = environment["active_parameters"]
    logger.info(
        "model: %s, %s parameters%s, attention %s%s",
        environment["architecture"],
        f"{environment['parameters']:,}",
        f", {active:,} active for a token" if active < environment["parameters"] else "",
        environment["attention"],
        ", kept inside documents" if environment["document_mask"] else "",
    )
    batch = (
        "batch: %s targets a step without padding, give or take a row's, in passes of at most %s x %s positions of like "
        "length x %s processes x %s accumulation steps"
        if by_length
        else "batch: %s tokens a step = %s rows x %s tokens x %s processes x %s accumulation steps"
    )
    logger.info(
        batch,
        f"{plan['tokens_per_step']:,}",
        plan["micro_batch_size"],
        plan["sequence_length"],
        plan["num_processes"],
        plan["gradient_accumulation_steps"],
    )
    logger.info(
        "length: %s steps = %s%s tokens, %.2f epochs of %s",
        f"{plan['max_steps']:,}",
        "at most " if data["request"]["packing"] == "wrap" and not by_length else "",
        f"{plan['total_tokens']:,}",
        epochs,
        data["source"]["name"],
    )
    further = {name: counts for name, counts in data["counts"].items() if name.startswith("validation_")}
    if further:
        logger.info("validation: also on %s", ", ".join(name.removeprefix("validation_") for name in further))
    return environment
