"""Describe a run before it starts, for environment.json and for the log."""

import contextlib
import logging
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gpt2_repro.batch_plan import BatchPlan
from gpt2_repro.hardware import find_accelerator
from gpt2_repro.manifest import Manifest
from gpt2_repro.model.scale import measure
from gpt2_repro.model.size import gpt2_parameters
from gpt2_repro.run_record.environment import Environment
from gpt2_repro.training.pretraining_arguments import PretrainingArguments


logger = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers", "flash-attn")


def describe_run(
    args: PretrainingArguments, plan: BatchPlan, model: PreTrainedModel, data: Manifest, **further: Any
) -> Environment:
    """Return the contents of environment.json for a run that is about to start.

    Args:
        further: the fields of Environment that cannot be derived from the other arguments, such as `attention`.
    """
    scale = measure(model, plan.sequence_length)
    return Environment(
        versions=_versions(),
        commit=_commit(),
        command=" ".join(sys.argv),
        accelerator=find_accelerator(use_cpu=args.use_cpu),
        plan=plan,
        architecture=model.config.model_type,
        parameters=scale.parameters,
        active_parameters=scale.active,
        flops_per_token=scale.flops_per_token,
        precision="bf16" if args.bf16 else "fp32",
        document_mask=model.documents is not None,
        usd_per_hour=args.usd_per_hour or None,
        seed=args.seed,
        data=data.to_json(),
        **further,
    )


def announce(environment: Environment) -> Environment:
    """Log the model, batch size and length of a run, and return `environment`."""
    plan, data, active = environment.plan, environment.data, environment.active_parameters
    counts, step = data["counts"]["train"], f"{plan.tokens_per_step:,}"
    model = f"{environment.architecture}, {environment.parameters:,} parameters"
    if active < environment.parameters:
        model += f", {active:,} active per token"
    asked = environment.run_identity
    shape = {"n_layer": asked["n_layer"], "n_embd": asked["n_embd"], "vocab_size": data["vocab_size"]}
    if (gpt2 := gpt2_parameters(**shape, n_positions=plan.sequence_length)) != environment.parameters:
        model += f" (GPT-2 of this shape: {gpt2:,})"
    mask = ", within documents only" if environment.document_mask else ""
    logger.info("model: %s, attention %s%s", model, environment.attention, mask)
    layout = f"{plan.num_processes} processes x {plan.gradient_accumulation_steps} accumulation steps"
    rows, length = plan.micro_batch_size, plan.sequence_length
    if plan.by_length:
        epochs = plan.total_tokens / max(1, counts["row_tokens"])
        passes = f"passes of at most {rows} x {length} positions (rows of similar length)"
        logger.info("batch: about %s targets per step (without padding), in %s x %s", step, passes, layout)
    else:
        epochs = plan.max_steps * plan.rows_per_step / max(1, counts["rows"])
        logger.info("batch: %s tokens per step = %s rows x %s tokens x %s", step, rows, length, layout)
    bound = "at most " if data["request"]["packing"] == "wrap" and not plan.by_length else ""
    tokens = f"{bound}{plan.total_tokens:,} tokens"
    steps, source = f"{plan.max_steps:,}", data["source"]["name"]
    if source == "files":
        source = ", ".join(data["request"]["data_files"])
    logger.info("length: %s steps = %s, %.2f epochs of %s", steps, tokens, epochs, source)
    if further := [name.removeprefix("validation_") for name in data["counts"] if name.startswith("validation_")]:
        logger.info("additional validation sets: %s", ", ".join(further))
    return environment


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _commit() -> str | None:
    git = ["git", "-C", str(Path(__file__).parents[2]), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        return None
