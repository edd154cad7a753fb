"""Wrong options end a script with exit code 2, before anything is rented."""

import shlex

import pytest


RENT = "create_pod.sh --yes --gpu A40 --hours 4"
RUN = "run_and_stop.sh --hours 1"


@pytest.mark.parametrize(
    "typed",
    [
        "create_pod.sh --yes --gpu A40 --volume v",  # no deadline
        "create_pod.sh --yes --gpu A40 --volume v --hours four",
        RENT,  # no volume
        "run_and_stop.sh -- train.py",
        "run_and_stop.sh --hours four -- train.py",
        "sync.sh no-such-run host:",
        "deadline.sh 0.0",
        "stop_pod.sh --nonsense",
    ],
)
def test_a_mistake_costs_nothing(pod, typed: str) -> None:
    code, said = pod.run(*shlex.split(typed))
    assert code == 2 and "error: " in said
    assert pod.calls() == [] and not pod.processes("deadline.sh")


@pytest.mark.parametrize("typed", [f"{RUN} -- train.py", "stop_pod.sh", "deadline.sh 1"])
def test_a_machine_that_is_no_pod_is_not_stopped(pod, typed: str) -> None:
    code, _ = pod.run(*shlex.split(typed), RUNPOD_POD_ID=None)
    assert code == 2 and pod.calls() == [] and not pod.processes("deadline.sh")
