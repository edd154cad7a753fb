"""A hang becomes an exit: where nothing has moved for a while, each rank prints its stacks and ends."""

import faulthandler
from typing import Any

from transformers import TrainerCallback


class Watchdog(TrainerCallback):
    """Ends this process, with the stacks of all its threads on stderr, when `seconds` go by without a sign of life.

    A sign is a pass, a step, a validation batch, a validation, a checkpoint. The clock runs in a thread of C, which a
    process that is stuck in a collective, a disk or the interpreter's lock cannot hold up; every rank has its own.

    Args:
        seconds: more than anything that is no hang takes: compiling, saving. 0: never.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def arm(self, *args: Any, **kwargs: Any) -> None:
        """A sign of life."""
        if self.seconds:
            faulthandler.dump_traceback_later(self.seconds, exit=True)

    on_train_begin = on_substep_end = on_step_end = on_prediction_step = on_evaluate = on_save = arm

    def disarm(self) -> None:
        """The end of a run may take its time."""
        faulthandler.cancel_dump_traceback_later()
