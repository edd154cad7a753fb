"""Run train.py on a CPU with settings that are the default on a GPU.

Environment variables:
    PRECISION: precision of matrix products, for example bf16, which is slow on many CPUs.
    SLOW_COPIES: if set, saves in the background wait for a second before they copy a tensor, and a validation of the
        average of the weights takes two seconds.
    TRITON_FAILS: if set, torch.compile is chosen as on a GPU, and then Triton does not work there.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from gpt2_repro import cli, hardware


def choose_precision(requested: str, **rules: Any) -> tuple[str, str]:
    return os.environ["PRECISION"], "for a test"


def slow_copies() -> None:
    from gpt2_repro.checkpoints.staged_saves import StagingMemory
    from gpt2_repro.training.validation import Validation

    begin = StagingMemory.begin
    measure = Validation.measure

    def begin_later(self: StagingMemory, then: Callable[[], None]) -> None:
        self._thread.submit(time.sleep, 1)  # the thread does one thing after the other
        begin(self, then)

    def measure_slowly(self: Validation, *args: Any, averaged: bool = False, **options: Any) -> dict[str, float]:
        if averaged:
            time.sleep(2)
        return measure(self, *args, averaged=averaged, **options)

    StagingMemory.begin = begin_later  # type: ignore[method-assign]
    Validation.measure = measure_slowly  # type: ignore[method-assign]


def let_triton_fail() -> None:
    from gpt2_repro.training import build

    check = build.check_triton

    class OnGpu:
        """Arguments of a run, whose device is a GPU."""

        def __init__(self, args: Any) -> None:
            object.__setattr__(self, "args", args)

        def __getattr__(self, name: str) -> Any:
            return type("Device", (), {"type": "cuda"}) if name == "device" else getattr(self.args, name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(self.args, name, value)

    hardware.choose_compile = lambda requested, **rules: requested is not False
    hardware.compiler_obstacle = lambda **_: None
    build.check_triton = lambda args, config, requested: check(OnGpu(args), config, requested=requested)
    build.launch_softmax_kernel = lambda *args: "Failed to find C compiler."


if __name__ == "__main__":
    if "PRECISION" in os.environ:
        hardware.choose_precision = choose_precision
    if "TRITON_FAILS" in os.environ:
        let_triton_fail()
    if "SLOW_COPIES" in os.environ:
        slow_copies()
    cli.run(train.main)
