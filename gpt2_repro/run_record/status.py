"""Define the status of a run, and measure the time of each attempt.

The first start of a run and each resume are attempts.
"""

import contextlib
import dataclasses
import datetime
import math
import time
from collections.abc import Mapping

import gpt2_repro
from gpt2_repro.run_record.notes import ENDED, SINCE, noted
from gpt2_repro.run_record.time_breakdown import PARTS


ENDED_STATES = ("complete", "stopped", "failed", "diverged")


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """The content of run_status.json. A value is None if it was not recorded."""

    state: str | None = None  # running, or one of ENDED_STATES
    reason: str | None = None
    step: int | None = None
    max_steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None  # of all attempts
    time_breakdown: Mapping[str, float] = dataclasses.field(default_factory=dict)  # seconds of each part of PARTS
    updated: str | None = None  # UTC time of the last write
    losses: Mapping[str, float] = dataclasses.field(default_factory=dict)  # the last ones, in nats per token
    is_supervised: bool = False  # whether `supervise` restarts the run after a crash

    def age(self) -> float:
        """Return the seconds since the last write, or infinity if unknown."""
        try:
            updated = datetime.datetime.fromisoformat(self.updated or "")
        except ValueError:
            return math.inf
        return time.time() - updated.timestamp()


def time_of_earlier_attempts(status: RunStatus) -> dict[str, float]:
    """Return the seconds of each part of PARTS, summed over all earlier attempts."""
    parts = {name: status.time_breakdown.get(name, 0.0) for name in PARTS}
    parts["redone"] += max(0.0, round((status.seconds or 0.0) - sum(parts.values()), 2))
    since = noted(SINCE)
    last = -math.inf
    with contextlib.suppress(ValueError):
        last = datetime.datetime.fromisoformat(status.updated or "").timestamp()
    if since is not None and last >= float(since):
        # The supervisor ran at the last status update. Steps after that update are lost.
        ended = max(last, float(noted(ENDED) or last))
        parts["redone"] += ended - last
        parts["idle"] += max(0.0, time.time() - process_seconds() - ended)
    return parts


def process_seconds() -> float:
    """Return the seconds since this process started to run the project."""
    return time.monotonic() - gpt2_repro.STARTED
