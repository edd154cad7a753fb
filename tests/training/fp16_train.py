"""Run train.py in fp16 on a CPU, which accelerate and DeepSpeed refuse or ignore.

Autocast, torch's gradient scaler and DeepSpeed's loss scaling work on a CPU, only slowly.

Environment variables:
    SLOW_COPIES: if set, saves in the background wait for a second before they copy a tensor.
    OVERFLOW_AT: step at which the first gradient of rank 1 (or of the only process) becomes infinite.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from gpt2_repro import cli, hardware
from tests.training.gpu_train import slow_copies


def choose(asked: str, **rules: Any) -> tuple[str, str]:
    return asked, f"{asked} on a CPU, for a test"


def turn_on() -> None:
    import accelerate
    import deepspeed.accelerator
    from accelerate import accelerator

    original = accelerator.Accelerator.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.mixed_precision == "fp16" and self.distributed_type != accelerate.DistributedType.DEEPSPEED:
            self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu")

    accelerator.Accelerator.__init__ = init
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    from gpt2_repro.model import attention
    from gpt2_repro.training import trainer

    choose_attention = attention.choose_attention

    def choose_for_fp16(requested: str, machine: attention.Machine, *args: Any, **kwargs: Any) -> attention.Choice:
        assert machine.fp16 and not machine.bf16
        return choose_attention(requested, machine, *args, **kwargs)

    attention.choose_attention = choose_for_fp16
    step, last = os.environ.get("OVERFLOW_AT"), os.environ.get("WORLD_SIZE", "1")
    if step and os.environ.get("RANK", "0") == str(int(last) - 1):
        compute = trainer.PretrainingTrainer.compute_loss

        def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
            loss = compute(self, *args, **kwargs)
            return loss * 1e30 if self.state.global_step == int(step) - 1 else loss

        trainer.PretrainingTrainer.compute_loss = compute_loss


if __name__ == "__main__":
    hardware.choose_precision = choose
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    turn_on()
    if "SLOW_COPIES" in os.environ:
        slow_copies()
    cli.run(train.main)
