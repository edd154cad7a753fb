"""The benchmark of training steps measures this project's own Trainer."""

import pytest

from benchmarks.stopwatch import Stopwatch
from benchmarks.train_step import CONTENDERS, Setup


@pytest.mark.parametrize("name", ["trainer", "masked", "bare"])
def test_the_windows_of_a_contender_are_timed(name: str) -> None:
    setup = Setup(
        "shakespeare", micro_batch=2, accumulation=1, warmup=1, steps=1, windows=2, compile=False, bf16=False
    )
    watch = Stopwatch(setup)
    CONTENDERS[name](setup, watch)
    assert len(watch.seconds) == setup.windows
    assert all(seconds > 0 for seconds in watch.seconds)
