"""End a run early on purpose."""

from typing import Any

from transformers import TrainerCallback


class StopAtStep(TrainerCallback):
    """Save and stop after a step, the schedule of the whole run left as it is."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.step and state.global_step >= self.step:
            control.should_save = True
            control.should_training_stop = True
