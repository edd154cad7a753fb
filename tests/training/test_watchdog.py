"""A process that shows no sign of life ends with its stacks."""

import subprocess
import sys
import time

from transformers import TrainerCallback

from gpt2_repro.training.watchdog import Watchdog


CODE = """
import sys, time
from gpt2_repro.training.watchdog import Watchdog
watchdog = Watchdog(float(sys.argv[1]))
watchdog.arm()
for _ in range(5):
    time.sleep(0.3)
    watchdog.on_substep_end(None, None, None)
print("alive", flush=True)
if sys.argv[2] == "done":
    watchdog.disarm()
def the_line_that_is_stuck():
    time.sleep(2 if sys.argv[2] == "done" else 60)
the_line_that_is_stuck()
"""


def watch(seconds: float, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CODE, str(seconds), what], capture_output=True, text=True)


def test_a_hang_becomes_an_exit_and_life_does_not() -> None:
    began = time.monotonic()
    done = watch(1, "hang")
    assert done.stdout == "alive\n" and done.returncode == 1 and time.monotonic() - began < 50
    assert "Timeout" in done.stderr and "the_line_that_is_stuck" in done.stderr
    assert watch(1, "done").returncode == 0


def test_signs_of_life_are_events_of_the_trainer() -> None:
    signs = [name for name in vars(Watchdog) if name.startswith("on_")]
    assert set(signs) >= {"on_substep_end", "on_step_end", "on_prediction_step", "on_save", "on_evaluate"}
    assert all(hasattr(TrainerCallback, name) for name in signs)
