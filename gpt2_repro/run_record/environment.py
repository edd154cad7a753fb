"""Dataclasses for environment.json, and for how saved weights were trained."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from gpt2_repro.batch_plan import BatchPlan
from gpt2_repro.hardware import Accelerator


@dataclasses.dataclass(frozen=True)
class Environment:
    """The content of environment.json. Unrecorded values are None, 0 or empty.

    Args:
        parameters: number of parameters, without the padding of the vocabulary.
        active_parameters: number of parameters that each token uses, without idle experts.
        attention: name of the attention implementation, and in parentheses why it was chosen.
        data: manifest of the prepared data.
        reference: published runs whose loss curve the run should follow.
        deviations: fields that differ from the default recipe.
        run_identity: settings that must not change on resume.
        engine: optimizer, dtypes and compilation of the training engine.
    """

    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    commit: str | None = None
    command: str | None = None
    accelerator: Accelerator = Accelerator("", "", 0, None, None)
    plan: BatchPlan = BatchPlan(0, 0, 0, 0, 0, 0)
    architecture: str = "gpt2"
    parameters: int = 0
    active_parameters: int = 0
    flops_per_token: float = 0
    precision: str | None = None
    attention: str | None = None
    document_mask: bool = False
    usd_per_hour: float | None = None
    seed: int | None = None
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reference: str | None = None
    deviations: list[Mapping[str, Any]] | None = None  # earlier versions did not record deviations
    run_identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the object to write to environment.json."""
        document = dataclasses.asdict(self)
        document["plan"]["total_tokens"] = self.plan.total_tokens
        return document


# Read from the manifest if possible: after --extend_to or --resume_from, other files describe a later state.
@dataclasses.dataclass(frozen=True)
class TrainingRecord:
    """The training that led to the weights in a checkpoint-N or final/.

    Args:
        losses: validation losses at the step of the checkpoint, in nats per token. The keys are metrics such
            as `eval_loss`.
        sha256: hash of the manifest of the checkpoint. The hash identifies the checkpoint.
    """

    step: int = 0
    tokens: int = 0
    losses: Mapping[str, float] = dataclasses.field(default_factory=dict)
    environment: Environment = Environment()
    sha256: str = ""
