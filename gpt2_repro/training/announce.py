"""What a run is before it starts: the facts of environment.json, and the same said in lines."""

import dataclasses
import logging
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gpt2_repro.batch_plan import BatchPlan
from gpt2_repro.formatting import now
from gpt2_repro.hardware import find_accelerator
from gpt2_repro.manifest import Manifest
from gpt2_repro.model.scale import measure
from gpt2_repro.training.arguments import PretrainingArguments


logger = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers", "flash-attn")


def describe_run(
    args: PretrainingArguments,
    plan: BatchPlan,
    model: PreTrainedModel,
    data: Manifest,
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
            "data": data.to_json(),
        }
        | beside_default
    )


def announce(environment: dict[str, Any]) -> dict[str, Any]:
    """Log what will be trained, in numbers that a person can check. Returns the same facts."""
    plan, data, active = environment["plan"], environment["data"], environment["active_parameters"]
    counts, by_length, step = data["counts"]["train"], plan["by_length"], f"{plan['tokens_per_step']:,}"
    model = f"{environment['architecture']}, {environment['parameters']:,} parameters"
    if active < environment["parameters"]:
        model += f", {active:,} active for a token"
    mask = ", kept inside documents" if environment["document_mask"] else ""
    logger.info("model: %s, attention %s%s", model, environment["attention"], mask)
    layout = f"{plan['num_processes']} processes x {plan['gradient_accumulation_steps']} accumulation steps"
    rows, length = plan["micro_batch_size"], plan["sequence_length"]
    if by_length:
        epochs = plan["total_tokens"] / max(1, counts["row_tokens"])
        passes = f"passes of at most {rows} x {length} positions of like length"
        logger.info("batch: about %s targets a step without padding, in %s x %s", step, passes, layout)
    else:
        epochs = plan["max_steps"] * (plan["tokens_per_step"] // length) / max(1, counts["rows"])
        logger.info("batch: %s tokens a step = %s rows x %s tokens x %s", step, rows, length, layout)
    bound = "at most " if data["request"]["packing"] == "wrap" and not by_length else ""
    tokens = f"{bound}{plan['total_tokens']:,} tokens"
    logger.info(
        "length: %s steps = %s, %.2f epochs of %s", f"{plan['max_steps']:,}", tokens, epochs, data["source"]["name"]
    )
    if further := [name.removeprefix("validation_") for name in data["counts"] if name.startswith("validation_")]:
        logger.info("validation: also on %s", ", ".join(further))
    return environment


def describe_environment() -> dict[str, Any]:
    """Versions, the commit and the command: what it takes to say where a number comes from."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    root = Path(__file__).parents[2]
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        commit = None
    return {"versions": versions, "commit": commit, "command": " ".join(sys.argv), "started": now()}
