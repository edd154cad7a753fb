"""stop_pod.sh tries all interfaces of RunPod, and deadline.sh calls it later."""

import json
import os
import pty
import shutil
import signal
import subprocess

import pytest

from tests.runpod.conftest import KEY, ROOT, wait_for


REQUEST = "curl --config - --fail --silent --show-error --max-time 60 --request POST --header Content-Type: application/json --data "
STOP = [
    "runpodctl pod stop pod1",
    "runpodctl stop pod pod1",
    REQUEST + '{"action":"stop"} https://api.runpod.io/v2/pods/pod1/action',
    REQUEST + '{"query":"mutation { podStop(input: {podId: \\"pod1\\"}) { id } }"} https://api.runpod.io/graphql',
]
# https://docs.runpod.io: podTerminate returns Void, so the mutation selects no fields.
TERMINATE = [
    "runpodctl pod delete pod1",
    "runpodctl remove pod pod1",
    REQUEST + '{"action":"terminate"} https://api.runpod.io/v2/pods/pod1/action',
    REQUEST + '{"query":"mutation { podTerminate(input: {podId: \\"pod1\\"}) }"} https://api.runpod.io/graphql',
]
NOTHING_WORKS = {"STUB_runpodctl": "1", "STUB_curl": "22"}


@pytest.mark.parametrize(
    ("words", "variables", "calls"),
    [
        ((), {}, STOP),
        ((), {"RUNPOD_VOLUME_ID": "volume"}, TERMINATE),
        (("stop", "terminate"), NOTHING_WORKS, STOP + TERMINATE),
        # GraphQL returns errors with HTTP status 200. A failed curl prints nothing.
        *(((), {"OUT_curl": answer}, STOP) for answer in ('{"errors": ["no"], "data": null}', "", "<html>")),
    ],
)
def test_every_way_is_tried_until_the_pod_is_gone(pod, words, variables: dict[str, str], calls: list[str]) -> None:
    code, output = pod.run("stop_pod.sh", *words, **variables)
    assert code == 1 and "https://console.runpod.io/pods" in output and pod.calls() == calls
    assert all(json.loads(call.removeprefix(REQUEST).rpartition(" ")[0]) for call in pod.calls("curl"))
    # The API key is passed through a pipe and is not part of a command line.
    assert (pod.folder / "calls.keys").read_text(encoding="utf-8").count("curl has the key") == len(calls) / 2


@pytest.mark.parametrize(("works", "variables"), [(1, {}), (3, {"STUB_runpodctl": "1"})])
def test_the_first_way_that_is_accepted_is_waited_for(pod, works: int, variables: dict[str, str]) -> None:
    pod.start("stop_pod.sh", STOP_WAIT="30", **variables)
    wait_for(lambda: pod.sleeps() == [30])
    assert pod.calls() == STOP[:works]


def test_it_does_not_give_up(pod) -> None:
    pod.wake()
    process = pod.start("stop_pod.sh", STOP_ROUNDS="0", STOP_WAIT="120", **NOTHING_WORKS)
    wait_for(lambda: len(pod.sleeps()) > 11)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert pod.sleeps()[:11] == [60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 600]


def test_a_dead_terminal_ends_nothing(pod) -> None:
    other, out = pty.openpty()
    os.close(other)  # writing gives EIO
    command = ["bash", str(ROOT / "runpod" / "stop_pod.sh")]
    subprocess.run(command, env=pod.environment, stdout=out, stderr=out, timeout=60)
    assert pod.calls() == STOP


def test_a_shell_without_the_pods_variables_takes_them_from_process_1(pod) -> None:
    """In an ssh session, the scripts read the pod's environment from process 1."""
    # A shell opened by ssh lacks the environment variables of the pod.
    start = pod.folder / "environ"
    bad = f"$(touch {pod.folder}/executed)"
    settings = ["RUNPOD_POD_ID=pod9", "RUNPOD_VOLUME_ID=volume", "RUNPOD_API_KEY=another"]
    settings += [f"RUNPOD_X={bad}", f"RUNPOD_Y[{bad}]=1", "PATH=/nowhere", bad]
    start.write_bytes("\0".join(settings).encode() + b"\0")
    pod.run("stop_pod.sh", INIT_ENVIRON=str(start), RUNPOD_POD_ID=None)
    assert pod.calls()[0] == "runpodctl pod delete pod9" and not (pod.folder / "executed").exists()
    assert (pod.folder / "calls.keys").exists()  # RUNPOD_API_KEY is the shell's


def deadlines(pod, purpose: str = "") -> list[int]:
    return pod.processes(f"deadline.sh --armed {purpose}", leads=True)


# A run that was not copied may lie outside the volume, so a stop is tried first.
@pytest.mark.parametrize(("variables", "calls"), [({}, STOP), ({"RUNPOD_VOLUME_ID": "volume"}, STOP + TERMINATE)])
def test_it_returns_at_once_and_stops_the_pod_later(pod, variables: dict[str, str], calls: list[str]) -> None:
    """deadline.sh returns at once, and its timer stops the pod later."""
    scripts = shutil.copytree(ROOT / "runpod", pod.folder / "gone")
    code, output = pod.run(scripts / "deadline.sh", 4, **variables)
    assert code == 0 and "4 hours" in output and pod.calls() == []
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
