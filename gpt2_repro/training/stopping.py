"""The last step of a run, whether the schedule or the user makes it so."""

from typing import Any

from transformers import TrainerCallback


class LastStep(TrainerCallback):
    """Logs the last step, and makes `stop_at_step` the last one: saved, the schedule of the whole run left as it is."""

    def __init__(self, stop_at_step: int) -> None:
        self.stop_at_step = stop_at_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stop_at_step and state.global_step >= self.stop_at_step:
            control.should_save = True
            control.should_training_stop = True
        if control.should_training_stop or state.global_step >= state.max_steps:
            control.should_log = True
