"""The ladder of settings, and the probe in a fresh process."""

import sys

import pytest

from gpt2_repro.preflight.memory import Outcome, Rung, attempt_command, best, find_largest


def look(start: int, most: int, *, plain: int, checkpointed: int, rows: int = 512) -> list[Rung]:
    """What is attempted, in order, where so many rows fit; the best of it comes last."""

    def attempt(rung: Rung) -> Outcome:
        room = checkpointed if rung.checkpointing else plain
        return Outcome(rung, "fits" if rung.micro_batch <= room else "out of memory")

    outcomes = find_largest(start, most, rows, attempt)
    found = best(outcomes)
    return [outcome.rung for outcome in outcomes] + ([found] if found else [])


def test_the_ladder_goes_up_from_what_fits_and_down_from_what_does_not() -> None:
    assert look(16, 64, plain=64, checkpointed=64) == [Rung(16), Rung(32), Rung(64), Rung(64)]
    assert look(16, 64, plain=32, checkpointed=64) == [Rung(16), Rung(32), Rung(64), Rung(32)]
    # What fits with checkpointing is slower: half of it without is tried again, and wins.
    assert look(16, 64, plain=4, checkpointed=64) == [Rung(16), Rung(16, True), Rung(8), Rung(4), Rung(4)]
    assert look(4, 64, plain=0, checkpointed=2) == [
        *(Rung(4), Rung(4, True), Rung(2), Rung(2, True), Rung(1), Rung(2, True))
    ]
    assert look(2, 64, plain=0, checkpointed=0) == [Rung(2), Rung(2, True), Rung(1), Rung(1, True)]
    # Only what divides the rows of a step: 480 are nanoGPT's, and nobody's 48 divides 512.
    assert look(12, 12, plain=12, checkpointed=12, rows=480) == [Rung(12), Rung(12)]
    assert look(12, 12, plain=4, checkpointed=6, rows=480) == [
        Rung(12),
        Rung(12, True),
        Rung(6),
        Rung(6, True),
        Rung(3),
        Rung(3),
    ]
    assert look(48, 48, plain=64, checkpointed=64) == [Rung(32), Rung(32)]
    assert look(16, 100, plain=64, checkpointed=64) == [Rung(16), Rung(32), Rung(64), Rung(64)]
    assert look(1, 10, plain=10, checkpointed=10, rows=30) == [Rung(1), Rung(2), Rung(5), Rung(10), Rung(10)]
    assert Rung(8).options == ["--per_device_train_batch_size", "8"]
    assert Rung(8, True).options == ["--per_device_train_batch_size", "8", "--activation_checkpointing"]


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
    ("room", "fail", "fits"), [(64, RAISES, Rung(64)), (40, RAISES, Rung(32)), (9, KILLED, Rung(8))]
)
def test_a_command_that_runs_out_of_memory_is_told_from_one_that_fails(room: int, fail: str, fits: Rung) -> None:
    command = [sys.executable, "-c", FAKE.format(room=room, fail=fail)]
    outcomes = find_largest(64, 64, 64, lambda rung: attempt_command(command, rung, seconds=30))
    assert best(outcomes) == fits
    assert {outcome.result for outcome in outcomes} <= {"fits", "out of memory"}


def test_another_failure_ends_the_search_with_its_words() -> None:
    command = [sys.executable, "-c", "raise ValueError('no such data')"]
    (outcome,) = find_largest(8, 8, 8, lambda rung: attempt_command(command, rung, seconds=30))
    assert outcome.result == "failed" and "no such data" in outcome.said and best([outcome]) is None
    words = "import sys; sys.exit('error: no such recipe\\nTraceback\\n=====')"
    assert attempt_command([sys.executable, "-c", words], Rung(1), seconds=30).said == "error: no such recipe"
    # What a launcher writes of a worker, with a prefix, and of CUDA's libraries.
    for words in (
        "[rank0]: torch.OutOfMemoryError: CUDA",
        "CUDA error: out of memory\nCompile with",
        "CUBLAS_STATUS_ALLOC_FAILED",
    ):
        assert (
            attempt_command([sys.executable, "-c", f"raise SystemExit({words!r})"], Rung(1), seconds=30).result
            == "out of memory"
        )
    slow = attempt_command([sys.executable, "-c", "import time; time.sleep(60)"], Rung(1), seconds=0.5)
    assert slow.result == "failed" and slow.said
