"""Skip optimizer updates that are not finite, log them, and end the run if there are too many."""

import collections
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from gpt2_repro.errors import Diverged
from gpt2_repro.training.engine import clip_without_waiting


logger = logging.getLogger(__name__)

# The run ends after so many updates in a row that are not finite, or after so many in recent steps.
MOST_IN_A_ROW = 5
MOST_RECENT = 20
RECENT_STEPS = 1000


NOT_FINITE = "gradient norm not finite"


class UpdateGuard(TrainerCallback):
    """Skips optimizer updates whose gradient norm is not finite.

    Args:
        report: a function that is called for each skipped update, with its step and the event for metrics.jsonl.
    """

    def __init__(self, report: Callable[[int, dict[str, Any]], None]) -> None:
        self.report = report
        self._zero: Any = None
        self.loss_scale: Callable[[], float] | None = None
        self.skipped: list[int] = []  # recent steps whose update was not finite
        self.total = 0  # number of skipped updates
        self._on_device = False
        self._bad: torch.Tensor | None = None  # for this step, on the device: 1 if the gradient norm is not finite
        self._unread: collections.deque[tuple[int, torch.Tensor, Any]] = collections.deque()
        self._norm = math.nan
        self._is_checked = False  # whether the norm of this step was checked on the host
        self._skip_reason = ""  # why the update of this step is skipped, or "" if it is not

    def attach(self, optimizer: Any, zero: Any = None, *, loss_scale: Callable[[], float] | None = None) -> None:
        """Check each update of `optimizer` from now on.

        Args:
            optimizer: torch's optimizer, without the wrappers of accelerate and DeepSpeed.
            zero: DeepSpeed's optimizer. None: the caller passes each norm to `see_norm`.
            loss_scale: a function that returns the current loss scale, in fp16. The engine lowers it and skips the
                update if a gradient is not finite, so this ends the run only at the smallest scale.
        """
        self._zero = zero
        self.loss_scale = loss_scale
        is_bf16 = type(zero).__name__ == "BF16_Optimizer"  # of ZeRO-1
        is_fused = all(group.get("fused") for group in optimizer.param_groups)
        self._on_device = is_fused and (zero is None or is_bf16)
        if is_bf16 and self._on_device:
            clip_without_waiting(zero)
        # Before the step of torch's optimizer, DDP, DeepSpeed and FSDP have reduced and clipped the gradients.
        optimizer.register_step_pre_hook(self._before_update)

    def see_norm(self, norm: Any) -> None:
        """Store the gradient norm of the current step, before clipping. DeepSpeed may pass -1 if it is not finite."""
        if self._on_device:
            is_valid = norm.isfinite() & (norm >= 0)
            self._bad = is_valid.logical_not().float()
        else:  # a host sync
            self._norm = float(norm) if norm >= 0 else math.nan

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._is_checked and self._zero is not None:  # DeepSpeed has computed the norm
            self.see_norm(self._zero._global_grad_norm)
        if self._on_device:
            # Torch's fused kernels read `found_inf`, which torch provides for loss scaling, on the device. The host
            # reads the flag one step later, so that it never waits for the device.
            optimizer.found_inf = self._bad
            return
        if not self._is_checked:  # ZeRO calls this hook once per parameter group
            self._is_checked = True
            if not math.isfinite(self._norm):
                self._skip_reason = f"gradient norm {self._norm}"
        # The optimizer ignores parameters without a gradient: no change of weights and moments, and no weight decay.
        if self._skip_reason:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

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
            flag = self._bad.to("cpu", non_blocking=True)
            arrived = None
            if self._bad.is_cuda:
                arrived = torch.cuda.Event()
                arrived.record()
            self._unread.append((step, flag, arrived))
            self.settle(but=1)
            return
        reason = self._skip_reason
        if passed_over:
            reason = NOT_FINITE
        self._is_checked = False
        self._skip_reason = ""
        self._norm = 0.0
        if reason:
            self._count(step, reason)

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
                self._count(step, NOT_FINITE)

    def _count(self, step: int, reason: str) -> None:
        self.total += 1
        scale = None
        if self.loss_scale is not None:
            scale = self.loss_scale()
            reason = f"fp16 overflow, loss scale {scale:g}"
        logger.warning("The update of step %d was skipped (%s).", step, reason)
        self.report(step, {"update_skipped": reason})
        if scale is not None and scale > 1:
            return  # the engine lowers the scale and tries again
        self.skipped = [old for old in self.skipped if old > step - RECENT_STEPS]
        self.skipped.append(step)
        last_steps = list(range(step - MOST_IN_A_ROW + 1, step + 1))
        if scale is not None:
            times = "at the smallest loss scale"
        elif self.skipped[-MOST_IN_A_ROW:] == last_steps:
            times = f"{MOST_IN_A_ROW} times in a row"
        elif len(self.skipped) >= MOST_RECENT:
            times = f"{MOST_RECENT} times in {RECENT_STEPS} steps"
        else:
            return
        problem = f"Gradients were not finite {times}, last in step {step}. These updates were skipped."
        fix = "Pass a smaller --learning_rate or more --warmup_steps, and another --output_dir."
        raise Diverged(f"{problem} {fix}")

    def state(self) -> dict[str, Any]:
        """Return the state of the guard for a checkpoint, as JSON values.

        Raises Diverged if too many updates were not finite.
        """
        self.settle()
        return {"skipped": self.skipped, "total": self.total}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state of the guard from a checkpoint.

        Args:
            state: a result of the method `state`.
        """
        self.skipped = state["skipped"]
        self.total = state["total"]
