"""All ranks wait for the slowest one: which it is, and why, where it stays so."""

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback

from gpt2_repro.training.meter import TRAINING, Meter
from gpt2_repro.training.ranks import Ranks


logger = logging.getLogger(__name__)

WINDOW = 100  # steps
FACTOR = 1.2  # times as long
IN_A_ROW = 3  # windows, after which it is no accident
SLOW = {
    "passes": "its forward passes take {:.1f} times as long as the others'",
    "rows": "its waiting for rows makes a step take {:.1f} times as long",
}
MEND = {
    "passes": "look at its clock, power and heat (nvidia-smi -q -d PERFORMANCE) and at what else runs on it",
    "rows": "its disk is slow: raise --dataloader_num_workers or keep the data on a local disk",
}


class Stragglers(TrainerCallback):
    """Compares the ranks every WINDOW steps by what each does alone: forward passes, and waiting for rows.

    The time of a whole step says nothing: it is the slowest rank's on all of them. One pass of a step is timed, on a
    GPU by its own clock, which is read when the window ends.

    Args:
        meter: knows how long this rank has trained, and waited for rows.
        report: takes the step and what is slow.
    """

    def __init__(self, ranks: Ranks, meter: Meter, report: Callable[[int, dict[str, Any]], None]) -> None:
        self.ranks, self.meter, self.report = ranks, meter, report
        self._passes: list[tuple[Any, Any]] = []
        self._timed = False
        self._since = (0.0, 0.0)
        self._streak: tuple[tuple[int, str] | None, int] = (None, 0)

    @contextmanager
    def time_pass(self, device: torch.device) -> Iterator[None]:
        """Around each forward pass of training; the first one of a step is timed."""
        if self._timed or self.ranks.number == 1:
            yield
            return
        began = _now(device)
        yield
        self._passes.append((began, _now(device)))
        self._timed = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._restart()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._timed = False
        if len(self._passes) < WINDOW:
            return
        passes = sum(_seconds(*times) for times in self._passes)
        began, waited = self._since
        mine = [passes, self.meter.seconds("data_wait") - waited, self.meter.seconds(*TRAINING) - began]
        self._restart()
        slow = slowest(self.ranks.table(torch.tensor(mine)).tolist())
        if (line := self._judge(slow)) is not None and state.is_world_process_zero:
            logger.warning("step %d: %s", state.global_step, line)
            self.report(state.global_step, {"straggler": line})

    def _restart(self) -> None:
        self._passes, self._since = [], (self.meter.seconds(*TRAINING), self.meter.seconds("data_wait"))

    def _judge(self, slow: tuple[int, str, float] | None) -> str | None:
        culprit = slow and slow[:2]
        before, times = self._streak
        self._streak = (culprit, times + 1 if culprit == before else 1)
        if slow is None or self._streak[1] != IN_A_ROW:
            return None
        rank, what, factor = slow
        return f"all ranks wait for rank {rank}, for {IN_A_ROW * WINDOW} steps now: {SLOW[what].format(factor)}; {MEND[what]}"


def slowest(table: Sequence[Sequence[float]]) -> tuple[int, str, float] | None:
    """The rank that the others wait for, by what, and how many times as long that takes; None where none stands out.

    Args:
        table: of each rank the seconds in passes, waiting for rows, and of training in all.
    """
    passes, waits, elapsed = zip(*table, strict=True)
    wasted = max(waits) - statistics.median_low(waits)
    factors = {
        "passes": (passes, max(passes) / statistics.median_low(passes)),
        "rows": (waits, max(elapsed) / max(max(elapsed) - wasted, 1e-9)),
    }
    what = max(factors, key=lambda name: factors[name][1])
    seconds, factor = factors[what]
    return (seconds.index(max(seconds)), what, factor) if factor > FACTOR else None


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(began: Any, ended: Any) -> float:
    if isinstance(began, float):
        return ended - began
    ended.synchronize()
    return began.elapsed_time(ended) / 1000
