"""Skip harmful optimizer updates, log them, and end the run if there are too many.

An update is harmful if its gradient norm is not finite, or if its loss or gradient norm is an outlier.
"""

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
RECENT = (20, 1000)  # the run ends after 20 updates that are not finite in 1000 steps
WINDOW = 128  # number of recent values that define an outlier
NEW_LEVEL = 3  # outliers in a row that count as a new level


class OutlierDetector:
    """Computes the z-score of each value relative to the 128 values before it.

    Args:
        limit: a value with a higher z-score is an outlier.
        values: the stored values, at most 128, oldest first.
        outliers: the number of outliers in a row so far.
    """

    def __init__(self, limit: float, values: Sequence[float] = (), outliers: int = 0) -> None:
        self.limit, self.outliers = limit, outliers
        self.values: collections.deque[float] = collections.deque(values, maxlen=WINDOW)

    def measure(self, value: float) -> float:
        """Return the z-score of `value` relative to the stored values, and store `value`.

        The first two outliers in a row are not stored. If more outliers follow directly, they are stored, because they
        count as a new level. A value that is not finite is never stored. Returns 0 if fewer than 128 values are
        stored, or if `value` is not finite.
        """
        # In llm.c (llmc/outlier_detector.h at 19c83f9 and before), a value that is not finite turns the detector
        # off for the rest of the run. There `value` itself is one of the 128 values, so no z-score exceeds 11.3.
        if not math.isfinite(value):
            return 0.0
        score = 0.0
        if len(self.values) == WINDOW:
            deviation = statistics.pstdev(self.values)
            score = (value - statistics.fmean(self.values)) / deviation if deviation else 0.0
        self.outliers = self.outliers + 1 if score > self.limit else 0
        if not 0 < self.outliers < NEW_LEVEL:  # a stored outlier makes the detector less sensitive
            self.values.append(value)
        return score


class UpdateGuard(TrainerCallback):
    """Skips optimizer updates whose gradient norm is not finite.

    Args:
        skip_loss_z: also skip an update if the z-score of its loss is above this limit. 0: never.
        skip_grad_z: also skip an update if the z-score of its gradient norm is above this limit. 0: never.
        report: a function that is called for each skipped update, with its step and the event for metrics.jsonl.
    """

    def __init__(self, skip_loss_z: float, skip_grad_z: float, report: Callable[[int, dict[str, Any]], None]) -> None:
        self.detectors = {"loss": OutlierDetector(skip_loss_z), "gradient norm": OutlierDetector(skip_grad_z)}
        self.report = report
        self._zero: Any = None
        self.loss_scale: Callable[[], float] | None = None
        self.skipped: list[int] = []  # recent steps whose update was not finite
        self.total = 0  # number of skipped updates, for any reason
        self._on_device = self._needs_norm = False
        self._bad: torch.Tensor | None = None  # for this step, on the device: 1 if the gradient norm is not finite
        self._unread: collections.deque[tuple[int, torch.Tensor, Any]] = collections.deque()
        self._losses: list[torch.Tensor] = []
        self._norm = math.nan
        self._verdict: str | None = None  # why the update is skipped. "": it is not. None: not decided yet

    def attach(self, optimizer: Any, zero: Any = None, *, loss_scale: Callable[[], float] | None = None) -> None:
        """Check each update of `optimizer` from now on.

        Args:
            optimizer: torch's optimizer, without the wrappers of accelerate and DeepSpeed.
            zero: DeepSpeed's optimizer. None: the caller passes each norm to `see_norm`.
            loss_scale: a function that returns the current loss scale, in fp16. The engine lowers it and skips the
                update if a gradient is not finite, so this ends the run only at the smallest scale.
        """
        self._zero, self.loss_scale = zero, loss_scale
        limits = any(each.limit for each in self.detectors.values())
        # In DeepSpeed 0.19.8, only this optimizer (ZeRO-1 with bf16) itself skips all updates that are not finite.
        self._needs_norm = limits or type(zero).__name__ != "BF16_Optimizer"
        self._norm = math.nan if self._needs_norm else 0.0
        fused = all(group.get("fused") for group in optimizer.param_groups)
        self._on_device = fused and zero is None and not limits
        # Before the step of torch's optimizer, DDP, DeepSpeed and FSDP have reduced and clipped the gradients.
        optimizer.register_step_pre_hook(self._before_update)

    def see_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of one micro-batch to the loss of the current step on this rank."""
        if self.detectors["loss"].limit:
            self._losses.append(loss.detach())

    def see_norm(self, norm: Any) -> None:
        """Store the gradient norm of the current step, before clipping."""
        if self._on_device:
            self._bad = torch.isfinite(norm).logical_not().float()
        elif self._needs_norm:  # a host sync
            self._norm = float(norm) if norm >= 0 else math.nan  # DeepSpeed may pass -1 if not finite

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._on_device:
            # Torch's fused kernels read `found_inf`, which torch provides for loss scaling, on the device. The host
            # reads the flag one step later, so that it never waits for the device.
            optimizer.found_inf = self._bad
            return
        if self._verdict is None:  # ZeRO calls this hook once per parameter group
            if self._zero is not None:  # DeepSpeed computes the norm before it calls torch's optimizer
                self.see_norm(self._zero._global_grad_norm)
            self._verdict = self._judge()
        # The optimizer ignores parameters without a gradient: no change of weights and moments, and no weight decay.
        if self._verdict:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _judge(self) -> str:
        if not math.isfinite(self._norm):
            return f"gradient norm {self._norm}"
        values = {"gradient norm": self._norm}
        if self._losses:
            values["loss"] = float(reduce(torch.stack(self._losses).sum(), reduction="mean"))
        for name, value in values.items():
            detector = self.detectors[name]
            if detector.limit > 0 and (score := detector.measure(value)) > detector.limit:
                return f"{name} {value:.4g} is {score:.1f} standard deviations above the last {WINDOW} values"
        return ""

    def on_step_end(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, lr_scheduler: Any = None, **kwargs: Any
    ) -> None:
        # If the engine skipped the update, Trainer does not advance the schedule.
        self.after_step(state.global_step, passed_over=optimizer.step_was_skipped)
        while lr_scheduler.last_epoch < state.global_step:
            lr_scheduler.step()

    def after_step(self, step: int, *, passed_over: bool) -> None:
        """Count and report the update of this step if it was skipped.

        Args:
            passed_over: whether the engine (such as DeepSpeed) skipped the update because it is not finite.

        Raises Diverged if too many updates were not finite.
        """
        if self._bad is not None:
            arrived = torch.cuda.Event() if self._bad.is_cuda else None
            self._unread.append((step, self._bad.to("cpu", non_blocking=True), arrived))
            if arrived is not None:
                arrived.record()
            self.settle(but=1)
            return
        reason = "gradient norm not finite" if passed_over else self._verdict
        not_finite = passed_over or not math.isfinite(self._norm)
        self._losses, self._verdict, self._norm = [], None, 0.0
        if reason:
            self._count(step, reason, not_finite=not_finite)

    def settle(self, *, but: int = 0) -> None:
        """Read the flags of past updates, and count the skipped updates.

        The flag of an update is 1 if the device skipped the update.

        Args:
            but: leave the flags of this many newest updates for a later call.

        Raises Diverged if too many updates were not finite.
        """
        while len(self._unread) > but:
            step, bad, arrived = self._unread.popleft()
            if arrived is not None:
                arrived.synchronize()
            if bad.numpy().item():
                self._count(step, "gradient norm not finite", not_finite=True)

    def _count(self, step: int, reason: str, *, not_finite: bool) -> None:
        self.total += 1
        scale = self.loss_scale() if self.loss_scale and not_finite else None
        if scale is not None:
            reason, not_finite = f"fp16 overflow, loss scale {scale:g}", scale <= 1
        logger.warning("The update of step %d was skipped (%s).", step, reason)
        self.report(step, {"update_skipped": reason})
        if not_finite:
            few, steps = RECENT
            self.skipped = [*(old for old in self.skipped if old > step - steps), step]
            in_a_row = self.skipped[-IN_A_ROW:] == list(range(step - IN_A_ROW + 1, step + 1))
            if scale is not None or in_a_row or len(self.skipped) >= few:
                times = f"{IN_A_ROW} times in a row" if in_a_row else f"{few} times in {steps} steps"
                times = times if scale is None else "at the smallest loss scale"
                fix = "Pass a smaller --learning_rate or more --warmup_steps, and another --output_dir."
                problem = f"Gradients were not finite {times}, last in step {step}. These updates were skipped."
                raise Diverged(f"{problem} {fix}")

    def state(self) -> dict[str, Any]:
        """Return the state of the guard for a checkpoint, as JSON values.

        Raises Diverged if too many updates were not finite.
        """
        self.settle()
        windows = {name: [list(seen.values), seen.outliers] for name, seen in self.detectors.items()}
        return {"skipped": self.skipped, "total": self.total, "windows": windows}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state of the guard from a checkpoint.

        Args:
            state: a result of the method `state`.
        """
        self.skipped, self.total = state["skipped"], state["total"]
        limits = {name: detector.limit for name, detector in self.detectors.items()}
        self.detectors = {name: OutlierDetector(limits[name], *seen) for name, seen in state["windows"].items()}
