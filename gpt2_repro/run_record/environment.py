"""Dataclasses for environment.json, which has the batch plan, and for how saved weights were trained."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from gpt2_repro.hardware import Accelerator


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """The number of optimizer steps in a run, and the forward passes in each step."""

    tokens_per_step: int
    sequence_length: int
    micro_batch_size: int  # rows per process in one forward pass
    num_processes: int
    gradient_accumulation_steps: int
    max_steps: int

    @property
    def rows_per_step(self) -> int:
        """Number of rows per optimizer step."""
        return self.tokens_per_step // self.sequence_length

    @property
    def total_tokens(self) -> int:
        """Number of target tokens in the complete run."""
        return self.max_steps * self.tokens_per_step


@dataclasses.dataclass(frozen=True)
class Environment:
    """The content of environment.json. Unrecorded values are None, 0 or empty."""

    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    commit: str | None = None
    command: str | None = None
    accelerator: Accelerator = Accelerator("", "", 0, None, None)
    plan: BatchPlan = BatchPlan(0, 0, 0, 0, 0, 0)
    architecture: str = "gpt2"
    parameters: int = 0  # without the padding of the vocabulary
    active_parameters: int = 0  # that each token uses, without idle experts
    flops_per_token: float = 0
    precision: str | None = None
    attention: str | None = None  # the implementation, and in parentheses why it was chosen
    document_mask: bool = False
    usd_per_hour: float | None = None
    seed: int | None = None
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # manifest of the prepared data
    reference: str | None = None  # published runs whose loss curve the run should follow
    # Fields that differ from the default recipe. None: not recorded.
    deviations: list[Mapping[str, Any]] | None = None
    run_identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # must not change on resume
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # optimizer, dtypes and compilation
    startup: Mapping[str, float] = dataclasses.field(default_factory=dict)  # seconds of each phase of the last start

    def to_json(self) -> dict[str, Any]:
        """Return the object to write to environment.json."""
        document = dataclasses.asdict(self)
        document["plan"]["total_tokens"] = self.plan.total_tokens
        return document


# Read from the manifest if possible: after a resume or --resume_from, other files describe a later state.
@dataclasses.dataclass(frozen=True)
class TrainingRecord:
    """The training that led to the weights in a checkpoint-N or final/."""

    step: int = 0
    tokens: int = 0
    # Validation losses at this step in nats per token. The keys are metrics such as `eval_loss`.
    losses: Mapping[str, float] = dataclasses.field(default_factory=dict)
    environment: Environment = Environment()
    sha256: str = ""  # of the manifest, which identifies the checkpoint
    averaged: bool | None = None  # whether the weights are an average over steps (--ema_steps). None: unknown

    @property
    def weights(self) -> str:
        """Which weights of a run with --ema_steps these are, or "" for other runs."""
        steps = self.environment.run_identity.get("ema_steps")
        if not steps or self.averaged is None:
            return ""
        if self.averaged:
            return f"an average over steps (`ema_steps` {steps:,})"
        return f"those of step {self.step:,}, not the average over steps (`ema_steps` {steps:,})"
