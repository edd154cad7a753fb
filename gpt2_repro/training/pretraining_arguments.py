"""Define transformers' TrainingArguments with the fields of the section `training:`."""

import dataclasses

from transformers import TrainingArguments

from gpt2_repro.optim import MUON
from gpt2_repro.training.arguments import TrainingSection


@dataclasses.dataclass
class PretrainingArguments(TrainingSection, TrainingArguments):
    """The training arguments of one process. `settings.to_training_arguments` creates the instance."""

    def __post_init__(self) -> None:
        # model/build.py compiles the loss function. Trainer would compile the DDP or DeepSpeed wrapper.
        self.compile_loss, self.torch_compile = bool(self.torch_compile), False
        # transformers rejects optimizers and schedules that it does not have. The Trainer subclass builds them.
        optim, self.optim = self.optim, "adamw_torch_fused" if self.optim == MUON else self.optim
        schedule, self.lr_scheduler_type = self.lr_scheduler_type, "constant"
        self.fp16 = self.precision == "fp16"
        TrainingArguments.__post_init__(self)
        self.optim = optim if optim == MUON else self.optim
        self.lr_scheduler_type = schedule

    @property
    def last_step(self) -> int:
        """The last optimizer step: max_steps, or stop_at_step if set and earlier."""
        return min(self.stop_at_step or self.max_steps, self.max_steps)
