"""Skip harmful updates, log them, and end the run if there are too many."""

import collections
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import reduce
from transformers import TrainerCallback

from gpt2_repro.errors import Diverged


logger = logging.getLogger(__name__)

IN_A_ROW = 5
RECENT = (20, 1000)  # updates that were not finite, in so many steps
WINDOW = 128  # values that an outlier is measured by
NEW_LEVEL = 3  # outliers in a row that are a new level


class OutlierDetector:
    """Measures how many standard deviations a value is above the last ones.

    After llm.c's (llmc/outlier_detector.h at 19c83f9 and before, where the window is 128), with two differences: a value is
    measured by the ones before it, without itself (with itself none can lie more than 11.3 deviations above 128), and one
    that is not finite is left out (there it turns the detector off for good).

    Args:
        limit: a value further above does not join the others, which would get less picky by it, unless it is the third in
            a row: then it is no outlier but a new level.
    """

    def __init__(self, limit: float, values: Sequence[float] = (), outliers: int = 0) -> None:
        self.limit, self.outliers = limit, outliers
        self.values: collections.deque[float] = collections.deque(values, maxlen=WINDOW)

    def measure(self, value: float) -> float:
        """Return the z-score of `value`, 0 until the window is full."""
        if not math.isfinite(value):
            return 0.0
        score = 0.0
        if len(self.values) == WINDOW:
            deviation = statistics.pstdev(self.values)
            score = (value - statistics.fmean(self.values)) / deviation if deviation else 0.0
        self.outliers = self.outliers + 1 if score > self.limit else 0
        if self.outliers in (0, NEW_LEVEL):
            self.values.append(value)
        return score


class UpdateGuard(TrainerCallback):
    """Judges each update before the optimizer applies it.

    It sits in front of the innermost optimizer's step, where every engine has reduced and clipped the gradients; an
    optimizer passes over parameters without one, so taking the gradients away leaves weights, moments and decay as they
    are. DeepSpeed passes over an update that is not finite by itself: that is counted here too. Torch's fused kernels take the
    verdict on the device (`found_inf`, made for loss scaling): then the host waits for nothing and reads it a step later.

    Args:
        skip_loss_z: skip an update whose loss lies more deviations above the last ones than this; 0: none.
        skip_grad_z: the same of the gradient norm.
        report: takes the step and what is to be written of an update that was skipped.
    """

    def __init__(self, skip_loss_z: float, skip_grad_z: float, report: Callable[[int, dict[str, Any]], None]) -> None:
        self.detectors = {"loss": OutlierDetector(skip_loss_z), "gradient norm": OutlierDetector(skip_grad_z)}
        self.report = report
        self._ask: Callable[[], Any] | None = None
        self.skipped: list[int] = []  # steps whose update was not finite, the recent ones
        self.total = 0  # updates that were skipped, for whatever reason
        self._on_device = False
        self._bad: torch.Tensor | None = None  # of this step, on the device: 1 where it is not finite
        self._unread: collections.deque[tuple[int, torch.Tensor, Any]] = collections.deque()
        self._losses: list[torch.Tensor] = []
        self._norm = math.nan
        self._verdict: str | None = None
        self._decided = False

    def attach(self, optimizer: Any, norm: Callable[[], Any] | None = None) -> None:
        """Judge each `optimizer.step`. `norm` returns the engine's gradient norm if `see_norm` is not called."""
        self._ask = norm
        fused = all(group.get("fused") for group in optimizer.param_groups)
        self._on_device = fused and norm is None and not any(each.limit for each in self.detectors.values())
        optimizer.register_step_pre_hook(self._before_update)

    def see_loss(self, loss: torch.Tensor) -> None:
        """Take the share of a pass in the loss of this rank."""
        if self.detectors["loss"].limit:
            self._losses.append(loss.detach())

    def see_norm(self, norm: Any) -> None:
        """Take the gradient norm of all parameters, before clipping. DeepSpeed may give -1 if it is not finite."""
        if self._on_device:
            self._bad = torch.isfinite(norm).logical_not().float()
        else:
            self._norm = float(norm) if norm >= 0 else math.nan

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._on_device:
            optimizer.found_inf = self._bad
            return
        if not self._decided:  # ZeRO calls it once for each group of parameters
            if self._ask is not None:
                self.see_norm(self._ask())
            self._verdict, self._decided = self._judge(), True
        if self._verdict is not None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _judge(self) -> str | None:
        if not math.isfinite(self._norm):
            return f"gradient norm {self._norm}"
        values = {"gradient norm": self._norm}
        if self._losses:
            values["loss"] = float(reduce(torch.stack(self._losses).sum(), reduction="mean"))
        for name, value in values.items():
            detector = self.detectors[name]
            if detector.limit > 0 and (score := detector.measure(value)) > detector.limit:
                return f"{name} {value:.4g} is {score:.1f} deviations above the last {WINDOW}"
        return None

    def on_step_end(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, lr_scheduler: Any = None, **kwargs: Any
    ) -> None:
        # If the engine skipped the update, Trainer does not advance the schedule.
        self.after_step(state.global_step, passed_over=optimizer.step_was_skipped)
        while lr_scheduler.last_epoch < state.global_step:
            lr_scheduler.step()

    def after_step(self, step: int, *, passed_over: bool) -> None:
        """Count the update of this step. `passed_over`: the engine did not apply it, because it is not finite.

        Raises Diverged if too many were not finite.
        """
        if self._bad is not None:
            self._unread.append((step, *_to_host(self._bad)))
            self.settle(but=1)
            return
        reason = "gradient norm not finite" if passed_over else self._verdict
        not_finite = passed_over or not math.isfinite(self._norm)
        self._losses, self._verdict, self._decided, self._norm = [], None, False, 0.0
        if reason is not None:
            self._count(step, reason, not_finite=not_finite)

    def settle(self, *, but: int = 0) -> None:
        """Read the pending verdicts `but` the last ones. Raises Diverged as `after_step` does."""
        while len(self._unread) > but:
            step, bad, arrived = self._unread.popleft()
            if arrived is not None:
                arrived.synchronize()
            if bad.numpy().item():
                self._count(step, "gradient norm not finite", not_finite=True)

    def _count(self, step: int, reason: str, *, not_finite: bool) -> None:
        self.total += 1
        logger.warning("step %d: update skipped, %s", step, reason)
        self.report(step, {"update_skipped": reason})
        if not_finite:
            few, steps = RECENT
            self.skipped = [*(old for old in self.skipped if old > step - steps), step]
            in_a_row = self.skipped[-IN_A_ROW:] == list(range(step - IN_A_ROW + 1, step + 1))
            if in_a_row or len(self.skipped) >= few:
                times = f"{IN_A_ROW} times in a row" if in_a_row else f"{few} times in {steps} steps"
                fix = "Pass a smaller --learning_rate or more --warmup_steps, and another --output_dir."
                raise Diverged(f"The gradients were not finite {times} up to step {step}; none was applied. {fix}")

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, for JSON. Raises Diverged as `after_step` does."""
        self.settle()
        windows = {name: [list(seen.values), seen.outliers] for name, seen in self.detectors.items()}
        return {"skipped": self.skipped, "total": self.total, "windows": windows}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state`."""
        self.skipped, self.total = state["skipped"], state["total"]
        limits = {name: detector.limit for name, detector in self.detectors.items()}
        self.detectors = {name: OutlierDetector(limits[name], *seen) for name, seen in state["windows"].items()}


def _to_host(flag: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Copy to the CPU without waiting. Returns the copy, and the event after which it is complete or None."""
    if flag.device.type != "cuda":
        return flag.cpu(), None
    host = torch.empty_like(flag, device="cpu", pin_memory=True)
    host.copy_(flag, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return host, arrived
