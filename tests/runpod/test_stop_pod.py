"""stop_pod.sh tries several interfaces of RunPod until one stops the pod."""

import json
import os
import pty
import signal
import subprocess

import pytest

from tests.runpod.conftest import ROOT, wait_for


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
    code, said = pod.run("stop_pod.sh", *words, **variables)
    assert code == 1 and "https://console.runpod.io/pods" in said and pod.calls() == calls
    assert all(json.loads(call.removeprefix(REQUEST).rpartition(" ")[0]) for call in pod.calls("curl"))
    # The API key is passed through a pipe and is not part of a command line.
    assert (pod.folder / "calls.keys").read_text(encoding="utf-8").count("curl has the key") == len(calls) / 2


@pytest.mark.parametrize(
    ("works", "variables"),
    [
        (1, {}),
        (3, {"STUB_runpodctl": "1"}),
    ],
)
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
