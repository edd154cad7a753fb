"""The environment of a run: versions, device, data, batch plan, engine. The training record of a checkpoint."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from gpt2_repro.batch_plan import BatchPlan
from gpt2_repro.hardware import Accelerator


@dataclasses.dataclass(frozen=True)
class Environment:
    """The content of environment.json. None, 0 or empty: not recorded, or damaged.

    Args:
        parameters: with the vocabulary before padding. `active_parameters` leaves out idle experts.
        attention: its name and, in parentheses, why it was chosen.
        data: the manifest of the prepared folder.
        deviations: the fields that differ from the default recipe and change the training, with the values of the run
            and of the recipe. Earlier versions did not record them.
        reference: the published runs whose loss curve the run should follow.
        run_identity: the settings that a resumed run must share.
        engine: wrapper, optimizer, dtypes and compilation.
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
    deviations: list[Mapping[str, str]] | None = None
    run_identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the document that environment.json holds."""
        document = dataclasses.asdict(self)
        document["plan"]["total_tokens"] = self.plan.total_tokens
        return document


@dataclasses.dataclass(frozen=True)
class TrainingRecord:
    """The record of the training up to a final/ or checkpoint-N.

    The run's other files may describe a later state, after --extend_to or --resume_from.

    Args:
        losses: of the validation at its step in nats per token, by name.
        sha256: identifies the record.
    """

    step: int = 0
    tokens: int = 0
    losses: Mapping[str, float] = dataclasses.field(default_factory=dict)
    environment: Environment = Environment()
    sha256: str = ""
