"""The timer of deadline.sh stops the pod, even after deadline.sh has ended."""

import os
import shutil
import subprocess

import pytest

from tests.runpod.conftest import KEY, ROOT, wait_for
from tests.runpod.test_stop_pod import STOP, TERMINATE


def deadlines(pod, purpose: str = "") -> list[int]:
    return pod.processes(f"deadline.sh --armed {purpose}")


# A run that was not copied may lie outside the volume, so a stop is tried first.
@pytest.mark.parametrize(("variables", "calls"), [({}, STOP), ({"RUNPOD_VOLUME_ID": "volume"}, STOP + TERMINATE)])
def test_it_returns_at_once_and_stops_the_pod_later(pod, variables: dict[str, str], calls: list[str]) -> None:
    """deadline.sh returns at once, and its timer stops the pod later."""
    scripts = shutil.copytree(ROOT / "runpod", pod.folder / "gone")
    code, said = pod.run(scripts / "deadline.sh", 4, **variables)
    assert code == 0 and "4 hours" in said and pod.calls() == []
    (process,) = deadlines(pod, "start")
    assert os.getsid(process) == process  # a separate session, without a terminal
    # The timer also works without the repository.
    shutil.rmtree(scripts)
    pod.wake()
    wait_for(lambda: len(pod.calls()) == len(calls))
    # The first sleep ends five minutes before the deadline, when a training gets SIGTERM.
    assert pod.calls() == calls and pod.sleeps()[:2] == [4 * 3600 - 300, 300]
    assert "stopping the pod" in pod.log("deadline.log")


def test_that_of_the_start_is_kept_and_that_of_a_run_replaced(pod) -> None:
    # After a restart of the container /tmp may still contain the old process id, which now belongs to another process.
    (pod.folder / "deadline-start-pod1").write_text(str(os.getpid()), encoding="utf-8")
    pod.run("deadline.sh", 1)
    pod.run("deadline.sh", 2, os.getpid())
    start, run = deadlines(pod, "start"), deadlines(pod, "run")
    assert len(start) == len(run) == 1 and "/proc" not in pod.log("deadline.log")
    assert pod.run("deadline.sh", 3)[0] == 0 and deadlines(pod, "start") == start
    assert pod.run("deadline.sh", 4, os.getpid())[0] == 0
    wait_for(lambda: run[0] not in deadlines(pod, "run"))
    assert len(deadlines(pod, "run")) == 1 and deadlines(pod, "start") == start


def test_the_deadline_of_lambda_comes_first_and_tries_again(pod) -> None:
    page = (ROOT / "cloud" / "lambda.md").read_text(encoding="utf-8")
    deadline = page.split("```bash\n")[1].split("```")[0]
    assert "setsid" in deadline
    pod.stub(
        "curl",
        '#!/bin/bash\nread -r given\n[[ $given == "user = \\"$LAMBDA_API_KEY:\\"" ]] && echo "curl $*" >>"$CALLS"\nexit 22\n',
    )
    given = {"LAMBDA_API_KEY": KEY, "LAMBDA_INSTANCE_ID": "machine"}
    pod.wake()
    subprocess.run(["bash", "-c", deadline], env=pod.environment | given, check=True)
    wait_for(lambda: len(pod.calls("curl")) > 1)
    assert pod.sleeps()[:2] == ["4h", 60]
    (call, *_) = pod.calls()
    assert '{"instance_ids":["machine"]}' in call and call.endswith("/instance-operations/terminate")
