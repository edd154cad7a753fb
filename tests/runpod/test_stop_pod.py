"""A pod is stopped by whichever way works, and the bill is spoken of as long as it runs."""

import json
import os
import pty
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
# https://docs.runpod.io: podTerminate returns Void, of which nothing can be selected.
TERMINATE = [
    "runpodctl pod delete pod1",
    "runpodctl remove pod pod1",
    REQUEST + '{"action":"terminate"} https://api.runpod.io/v2/pods/pod1/action',
    REQUEST + '{"query":"mutation { podTerminate(input: {podId: \\"pod1\\"}) }"} https://api.runpod.io/graphql',
]
NOTHING_WORKS = {"STUB_runpodctl": "1", "STUB_curl": "22"}


def test_where_no_way_works_it_says_so_loudly(pod) -> None:
    code, said = pod.run("stop_pod.sh", **NOTHING_WORKS)
    assert code == 1 and "POD pod1 STILL RUNS AND IS PAID" in said and pod.calls() == STOP
    # The key goes through a pipe, and stands in no command line.
    assert (pod.folder / "calls.keys").read_text().count("curl has the key") == 2


@pytest.mark.parametrize(
    ("works", "stubs"),
    [
        (0, {}),
        (2, {"STUB_runpodctl": "1"}),
        (3, {"STUB_runpodctl": "1", "STUB_curl": "0", "OUT_curl": '{"data": {"podStop": {"id": "pod1"}}}'}),
    ],
)
def test_the_first_way_that_is_accepted_is_waited_for(pod, works: int, stubs: dict[str, str]) -> None:
    """The pod takes the script along when it stops; here nothing does, and it is ended while it waits."""
    if works == 3:
        (pod.stubs / "curl").write_text('#!/bin/bash\n[[ $* == *graphql* ]] || exit 22\necho "$OUT_curl"\n')
    process = pod.start("stop_pod.sh", STOP_WAIT="30", **stubs)
    said = process.stdout.readline()
    while "asked for" not in said:
        said = process.stdout.readline()
    assert "asked for, " + ["by_command", "", "by_rest", "by_graphql"][works] in said
    assert len(pod.calls()) == (2 if works == 3 else works + 1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("answer", ['{"errors": ["no"], "data": null}', "", "<html>"])
def test_an_answer_without_data_is_no_stop(pod, answer: str) -> None:
    """GraphQL's errors come with code 200, and a curl that has failed answers nothing."""
    code, said = pod.run("stop_pod.sh", OUT_curl=answer)
    assert code == 1 and pod.calls() == STOP and "by_graphql failed" in said
    # What was accepted and did nothing is not the end either.
    assert "stop asked for, by_command" in said and "pod1 still runs: the next way" in said


def test_a_pod_with_a_network_volume_is_terminated(pod) -> None:
    pod.run("stop_pod.sh", RUNPOD_VOLUME_ID="volume")
    assert pod.calls() == TERMINATE


def test_several_words_are_tried_one_after_the_other(pod) -> None:
    pod.run("stop_pod.sh", "stop", "terminate")
    assert pod.calls() == STOP + TERMINATE


def test_it_does_not_give_up(pod) -> None:
    process = pod.start("stop_pod.sh", STOP_ROUNDS="0", **NOTHING_WORKS)
    wait_for(lambda: len(pod.calls()) > 12 * len(STOP))
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    said, _ = process.communicate()
    assert [f"again in {60 * n} s" in said for n in (1, 2, 9, 10, 11)] == [True, True, True, True, False]


def test_a_way_that_hangs_is_ended(pod) -> None:
    (pod.stubs / "timeout").write_text('#!/bin/bash\nshift 3\necho "timed $*" >>"$CALLS"\nexit 124\n')
    (pod.stubs / "timeout").chmod(0o755)
    pod.run("stop_pod.sh")
    assert pod.calls("timed") == ["timed " + way for way in STOP[:2]] and "--max-time 60" in STOP[2]


def test_a_full_disk_and_a_dead_terminal_end_nothing(pod) -> None:
    command, environment = ["bash", str(ROOT / "runpod" / "stop_pod.sh")], pod.environment
    with open("/dev/full", "w") as full:  # noqa: PTH123
        subprocess.run(command, env=environment, stdout=full, stderr=full, timeout=30)
    assert pod.calls() == STOP
    keeper, terminal = pty.openpty()
    os.close(keeper)  # writing gives EIO
    subprocess.run(command, env=environment, stdout=terminal, stderr=terminal, timeout=30)
    os.close(terminal)
    assert pod.calls() == STOP + STOP
    reader, writer = os.pipe()
    os.close(reader)  # writing gives SIGPIPE
    subprocess.run(command, env=environment, stdout=writer, stderr=writer, timeout=30, restore_signals=True)
    os.close(writer)
    assert pod.calls() == STOP + STOP + STOP


def test_a_shell_without_the_pods_variables_takes_them_from_process_1(pod) -> None:
    """One of ssh; what they hold is not executed, and what the shell has itself is kept."""
    start = pod.folder / "environ"
    bad = f"$(touch {pod.folder}/executed)"
    settings = [
        "RUNPOD_POD_ID=pod9",
        "RUNPOD_VOLUME_ID=volume",
        "RUNPOD_API_KEY=another",
        f"RUNPOD_X={bad}",
        f"RUNPOD_Y[{bad}]=1",
        "PATH=/nowhere",
        bad,
    ]
    start.write_bytes("\0".join(settings).encode() + b"\0")
    given = {"INIT_ENVIRON": str(start), "RUNPOD_POD_ID": None}
    pod.run("stop_pod.sh", **given)
    assert pod.calls()[0] == "runpodctl pod delete pod9" and not (pod.folder / "executed").exists()
    assert (pod.folder / "calls.keys").exists()  # RUNPOD_API_KEY is the shell's
    before = len(pod.calls())
    pod.run("stop_pod.sh", INIT_ENVIRON=str(start))
    assert pod.calls()[before] == "runpodctl pod stop pod1"


@pytest.mark.parametrize(
    ("words", "variables"), [((), {"RUNPOD_POD_ID": ""}), (("halt",), {}), (("stop", "halt"), {})]
)
def test_mistakes_of_stopping(pod, words: tuple[str, ...], variables: dict[str, str]) -> None:
    code, said = pod.run("stop_pod.sh", *words, **variables)
    assert code == 2 and said.startswith("error: ") and pod.calls() == []


def test_what_is_sent_is_json(pod) -> None:
    for call in (STOP + TERMINATE)[2::4] + (STOP + TERMINATE)[3::4]:
        assert json.loads(call.removeprefix(REQUEST).rpartition(" ")[0])
    assert KEY not in "".join(STOP + TERMINATE)
