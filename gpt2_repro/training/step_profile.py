"""Profile one optimizer step with torch.profiler."""

import logging
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from gpt2_repro.files import write_whole
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.layout import profile_path


logger = logging.getLogger(__name__)

ROWS = 40  # of the table


class StepProfile(TrainerCallback):
    """Writes a trace of one optimizer step on rank 0, and a table of its slowest operators and kernels.

    The trace begins after the rows of the step are read, and ends after the update.

    Args:
        step: the number of the step, from 1.
    """

    def __init__(self, run: RunRecord, step: int) -> None:
        self.trace = profile_path(run.path, step, "json.gz")
        self.table = profile_path(run.path, step, "txt")
        self.step = step
        self._profile: profile | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_missing = state.is_world_process_zero and not self.trace.exists()
        if is_missing and state.global_step >= self.step:
            text = "--profile_step %d writes no profile: the run resumes after step %d."
            logger.warning(text, self.step, state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 != self.step or not state.is_world_process_zero:
            return
        activities = [ProfilerActivity.CPU]
        if args.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()  # the trace has no kernels of the step before
        started = profile(activities=activities)
        started.start()
        self._profile = started

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._profile is None:
            return
        ended = self._profile
        self._profile = None
        order = "self_cpu_time_total"
        if args.device.type == "cuda":
            order = "self_cuda_time_total"
            torch.cuda.synchronize()
        ended.stop()
        partial = self.trace.with_name(f".{self.trace.name}")
        try:
            ended.export_chrome_trace(str(partial))
            partial.replace(self.trace)
        finally:
            partial.unlink(missing_ok=True)
        table = ended.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=100)
        write_whole(self.table, f"Step {self.step}, by {order}\n{table}\n")
        text = "profile of step %d: %s (open it at https://ui.perfetto.dev), table: %s"
        logger.info(text, self.step, self.trace, self.table.name)
