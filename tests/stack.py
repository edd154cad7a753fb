"""Import the libraries of train.py, so that tests/warm.py can fork this process."""

import accelerate.commands.launch
import torch.distributed.run

from gpt2_repro import hardware
from gpt2_repro.training.engine import prepare_deepspeed


prepare_deepspeed(use_cpu=True)
# Tests of bf16 must not fall back to fp32 on a CPU without bf16 instructions.
hardware.cpu_multiplies_bf16 = lambda: True

import datasets  # noqa: E402
import deepspeed  # noqa: E402

import gpt2_repro.model.build  # noqa: E402
import gpt2_repro.training.trainer  # noqa: E402, F401


__all__ = ["accelerate", "datasets", "deepspeed", "gpt2_repro", "torch"]
