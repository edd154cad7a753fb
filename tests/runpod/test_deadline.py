"""An armed deadline stops the pod, whatever has become of what armed it."""

import os
import shutil
import time

import pytest

from tests.runpod.conftest import ROOT, wait_for
from tests.runpod.test_stop_pod import STOP, TERMINATE


SOON = 1 / 3600  # hours


def deadlines(pod, purpose: str = "") -> list[int]:
    return pod.processes(f"deadline.sh --armed {purpose}")


def test_it_returns_at_once_and_stops_the_pod_later(pod) -> None:
    began = time.monotonic()
    code, said = pod.run("deadline.sh", 2 / 3600)
    assert code == 0 and time.monotonic() - began < 1.5 and "hours at the latest" in said and pod.calls() == []
    (process,) = deadlines(pod, "start")
    assert os.getsid(process) == process  # of no terminal
    wait_for(lambda: len(pod.calls()) == 4)
    assert pod.calls() == STOP and time.monotonic() - began > 1.5
    assert "the deadline: stopping the pod" in pod.log("deadline.log")


def test_with_a_network_volume_it_stops_first_and_then_terminates(pod) -> None:
    """A run that was not copied may lie outside the volume; but the bill ends."""
    pod.run("deadline.sh", SOON, os.getpid(), RUNPOD_VOLUME_ID="volume")  # no run: its SIGTERM would end pytest
    wait_for(lambda: len(pod.calls()) == 8)
    assert pod.calls() == STOP + TERMINATE


def test_it_needs_no_file_of_the_repository_any_more(pod) -> None:
    shutil.copytree(ROOT / "runpod", pod.folder / "gone")
    assert pod.run(str(pod.folder / "gone" / "deadline.sh"), SOON)[0] == 0
    shutil.rmtree(pod.folder / "gone")
    wait_for(lambda: len(pod.calls()) == 4)


def test_that_of_the_start_is_kept_and_that_of_a_run_replaced(pod) -> None:
    pod.run("deadline.sh", 1)
    pod.run("deadline.sh", 2, os.getpid())
    start, run = deadlines(pod, "start"), deadlines(pod, "run")
    assert len(start) == len(run) == 1
    assert "is armed already" in pod.run("deadline.sh", 3)[1] and deadlines(pod, "start") == start
    assert "is replaced" in pod.run("deadline.sh", 4, os.getpid())[1]
    wait_for(lambda: run[0] not in deadlines(pod, "run"))
    assert len(deadlines(pod, "run")) == 1 and deadlines(pod, "start") == start


def test_a_number_of_another_process_is_no_deadline(pod) -> None:
    """A container that was restarted may keep its /tmp, and its processes have the old ones' numbers."""
    (pod.folder / "deadline-start-pod1").write_text(str(os.getpid()))
    pod.run("deadline.sh", 1)
    assert len(deadlines(pod)) == 1 and "/proc" not in pod.log("deadline.log")


def test_it_is_not_early_where_commands_are_missing(pod) -> None:
    for missing in ("sleep", "awk"):
        (pod.stubs / missing).write_text("#!/bin/bash\nexit 127\n")
        (pod.stubs / missing).chmod(0o755)
    began = time.monotonic()
    assert pod.run("deadline.sh", 2 / 3600)[0] == 0
    wait_for(lambda: pod.calls())
    assert time.monotonic() - began > 0.9  # bash counts whole seconds


def test_a_volume_that_cannot_be_written_is_no_hindrance(pod) -> None:
    pod.workspace.write_text("a file")
    assert pod.run("deadline.sh", SOON)[0] == 0
    wait_for(lambda: len(pod.calls()) == 4)
    assert "stopping the pod" in (pod.folder / "deadline.log").read_text()


@pytest.mark.parametrize("hours", ["four", "", "0", "0.0", "-1", "1e3", "4h", "."])
def test_hours_that_are_no_number_arm_nothing(pod, hours: str) -> None:
    code, said = pod.run("deadline.sh", hours)
    assert code == 2 and f"'{hours}' is no number of hours" in said and not deadlines(pod)
    assert pod.run("deadline.sh", 1, RUNPOD_POD_ID=None)[0] == 2
