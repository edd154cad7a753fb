"""The ladder of settings, and the probe in a fresh process."""

import sys

import pytest

from gpt2_repro.preflight.memory import Outcome, Rung, attempt_command, ladder, largest_that_fits


def test_the_ladder_goes_down_by_checkpointing_and_by_halves() -> None:
    rungs = list(ladder(8, lambda rows: 512 % rows == 0))
    assert [(rung.micro_batch, rung.checkpointing) for rung in rungs] == [
        *((8, False), (8, True), (4, False), (4, True), (2, False), (2, True), (1, False), (1, True))
    ]
    assert [rung.micro_batch for rung in ladder(12, lambda rows: 512 % rows == 0)] == [1, 1]
    assert rungs[0].options == ["--per_device_train_batch_size", "8"]
    assert rungs[1].options == ["--per_device_train_batch_size", "8", "--activation_checkpointing"]


# A command that has room for so many rows, twice as many with activation checkpointing.
FAKE = """
import sys
rows, room = int(sys.argv[sys.argv.index("--per_device_train_batch_size") + 1]), {room}
if rows > room * (2 if "--activation_checkpointing" in sys.argv else 1):
    {fail}
"""
RAISES = "raise RuntimeError('CUDA out of memory. Tried to allocate 20.00 GiB')"
KILLED = "import os; os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("room", "fail", "fits"), [(64, RAISES, Rung(64)), (40, RAISES, Rung(64, True)), (9, KILLED, Rung(16, True))]
)
def test_the_first_that_fits_is_taken(room: int, fail: str, fits: Rung) -> None:
    command = [sys.executable, "-c", FAKE.format(room=room, fail=fail)]
    outcomes = largest_that_fits(
        ladder(64, lambda rows: True), lambda rung: attempt_command(command, rung, seconds=30)
    )
    assert outcomes[-1] == Outcome(fits, "fits")
    assert all(outcome.result == "out of memory" for outcome in outcomes[:-1])


def test_nothing_fits() -> None:
    command = [sys.executable, "-c", FAKE.format(room=0, fail=RAISES)]
    outcomes = largest_that_fits(ladder(2, lambda rows: True), lambda rung: attempt_command(command, rung, seconds=30))
    assert [outcome.result for outcome in outcomes] == ["out of memory"] * 4


def test_another_failure_ends_the_search_with_its_words() -> None:
    command = [sys.executable, "-c", "raise ValueError('no such data')"]
    (outcome,) = largest_that_fits(
        ladder(8, lambda rows: True), lambda rung: attempt_command(command, rung, seconds=30)
    )
    assert outcome.result == "failed" and "no such data" in outcome.said
    slow = attempt_command([sys.executable, "-c", "import time; time.sleep(60)"], Rung(1), seconds=0.5)
    assert slow.result == "failed" and "not done in" in slow.said
