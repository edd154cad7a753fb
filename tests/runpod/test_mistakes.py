"""Wrong options end a script with exit code 2, before anything is rented."""

import shlex

import pytest


RENT = "create_pod.sh --yes --gpu A40 --hours 4"
RUN = "run_and_stop.sh --hours 1"
SCRIPTS = ("create_pod.sh", "deadline.sh", "on_start.sh", "run_and_stop.sh", "stop_pod.sh", "sync.sh")


@pytest.mark.parametrize(
    "typed",
    [
        "create_pod.sh --yes --gpu A40 --volume v",  # no deadline
        *(f"create_pod.sh --yes --gpu A40 --volume v --hours {hours}" for hours in (0, -1, "1e3", "four", 720.5)),
        RENT,  # no volume
        "create_pod.sh --yes --cpu --hours 4 --volume_gb 10",
        f"{RENT} --volume v --n 1.5",
        "run_and_stop.sh -- train.py",
        "run_and_stop.sh --hours four -- train.py",
        RUN,
        f"{RUN} --keep -- train.py",
        "sync.sh no-such-run host:",
        "sync.sh --check hf://me/mine",
        "stop_pod.sh stop halt",
        *(f"deadline.sh '{hours}'" for hours in ("four", "", "0.0", "-1", "4h")),
        *(f"{script} --nonsense" for script in (*SCRIPTS, "../cloud/hf_jobs.sh me/mine https://x")),
    ],
)
def test_a_mistake_costs_nothing(pod, typed: str) -> None:
    code, said = pod.run(*shlex.split(typed))
    assert code == 2 and "error: " in said
    assert pod.calls() == [] and not pod.processes("deadline.sh")


def test_help_does_nothing(pod) -> None:
    code, said = pod.run(*shlex.split(f"{RUN} --help -- train.py"))
    assert code == 0 and "bash " in said and "set -" not in said and not pod.workspace.exists()


@pytest.mark.parametrize("typed", [f"{RUN} -- train.py", "stop_pod.sh", "deadline.sh 1"])
def test_a_machine_that_is_no_pod_is_not_stopped(pod, typed: str) -> None:
    code, _ = pod.run(*shlex.split(typed), RUNPOD_POD_ID=None)
    assert code == 2 and pod.calls() == [] and not pod.processes("deadline.sh")
