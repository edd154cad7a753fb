"""Describe a run at its start and at its end, for environment.json and for the log."""

import contextlib
import logging
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

from transformers import PreTrainedModel

from gpt2_repro.evaluation.references import explained
from gpt2_repro.hardware import find_accelerator
from gpt2_repro.launchers import INSTALLED, ROOT
from gpt2_repro.model.configuration import measure
from gpt2_repro.run_record.environment import Environment
from gpt2_repro.run_record.time_breakdown import breakdown
from gpt2_repro.training.deviations import compare_with_default
from gpt2_repro.training.settings import RunSetup
from gpt2_repro.training.trainer import PretrainingTrainer


logger = logging.getLogger(__name__)

SECRET = re.compile(r"://[^/\s]*:[^/\s]*@|://\S*\?\S*=\S*")  # a password or a query in a URL
PACKAGES = ("gpt2-repro", "torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers", "flash-attn")


def describe_run(setup: RunSetup, model: PreTrainedModel, *, attention: str) -> Environment:
    """Return the contents of environment.json for a run that is about to start."""
    settings = setup.settings
    reference, deviations = compare_with_default(setup.recipe)
    scale = measure(model, setup.plan.sequence_length)
    precision = settings.precision or "fp32"
    if settings.bf16:
        precision = "bf16"
    return Environment(
        versions=_versions(),
        commit=_commit(),
        command=SECRET.sub("://…", " ".join(sys.argv)),
        accelerator=find_accelerator(use_cpu=settings.use_cpu),
        plan=setup.plan,
        architecture=model.config.model_type,
        parameters=scale.parameters,
        active_parameters=scale.active,
        flops_per_token=scale.flops_per_token,
        precision=precision,
        document_mask=model.documents is not None,
        usd_per_hour=settings.usd_per_hour or None,
        seed=settings.seed,
        data=setup.data.manifest.to_json(),
        attention=attention,
        reference=reference,
        deviations=deviations,
        run_identity=setup.identity.values,
    )


def announce(environment: Environment) -> None:
    """Log the model, batch size and length of a run."""
    active = f"{environment.active_parameters:,} active per token"
    model = f"{environment.architecture}, {environment.parameters:,} parameters ({active})"
    mask = ""
    if environment.document_mask:
        mask = ", within documents only"
    logger.info("model: %s, attention %s%s", model, environment.attention, mask)
    plan = environment.plan
    rows = f"{plan.micro_batch_size} rows x {plan.sequence_length} tokens"
    layout = f"{rows} x {plan.num_processes} processes x {plan.gradient_accumulation_steps} accumulation steps"
    logger.info("batch: %s tokens per step = %s", f"{plan.tokens_per_step:,}", layout)
    data = environment.data
    length = f"{plan.total_tokens:,} tokens"
    num_rows = data["counts"]["train"]["rows"]
    tokens_per_epoch = max(1, num_rows * plan.sequence_length)
    epochs = plan.total_tokens / tokens_per_epoch
    bound = "="
    if data["request"]["packing"] == "wrap":
        bound = "<="  # rows can be shorter than the sequence length
    source = data["source"]["name"]
    if source == "files":
        source = ", ".join(data["request"]["data_files"])
    logger.info("length: %s steps %s %s, %.2f epochs of %s", f"{plan.max_steps:,}", bound, length, epochs, source)


def report_end(trainer: PretrainingTrainer) -> None:
    """Log whether the loss is in the range of llm.c's runs, the time by activity, and how to continue."""
    losses = trainer.eval_losses
    if "eval_loss" in losses:
        message = explained(trainer.environment.reference, int(losses["step"]), losses["eval_loss"])
        if message:
            logger.info(message)
    table = breakdown(trainer.run.time_breakdown(), usd_per_hour=trainer.args.settings.usd_per_hour)
    logger.info("time of the run by activity:\n  %s", "\n  ".join(table.lines()[1:]))
    step = trainer.state.global_step
    reason = trainer.when.reason
    if reason and reason.startswith("--"):
        option = reason.partition(" ")[0]
        message = "Stopped at step %d, because of %s. Run the command with a larger %s to continue."
        logger.info(message, step, reason, option)
    elif reason:
        logger.info("Stopped at step %d. Run the command again to continue.", step)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _commit() -> str | None:
    if INSTALLED:
        return None  # the folder can be in another repository
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(OSError):
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None
    return None
