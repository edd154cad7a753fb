"""Whatever the training, the terminal or the network do, the run is kept and the pod is stopped."""

import contextlib
import os
import pty
import signal
import subprocess
import time

import pytest

from tests.runpod.conftest import ROOT, Pod, wait_for
from tests.runpod.test_stop_pod import STOP, TERMINATE


VOLUME = {"RUNPOD_VOLUME_ID": "volume"}
BUCKET = ("--sync", "hf://buckets/me/mine")
# Says that it has begun, and saves when it is told to end; each time that it is told it writes a line.
PATIENT = (
    'trap "echo told >>$TMPDIR/told; sleep 0.3; exit 0" TERM; touch "$TMPDIR/began"; while :; do sleep 0.05; done'
)


def python_also_compares(pod: Pod) -> None:
    """The comparison of a bucket, which is Python, finds no difference."""
    path = pod.stubs / "python"
    path.write_text(path.read_text().replace('case "$*" in', '[[ $1 == - ]] && { echo 0; exit; }\ncase "$*" in', 1))


def start_training(pod: Pod, *words: object, **variables: str) -> subprocess.Popen[str]:
    variables = {"TRAINING": PATIENT, "RUN": str(pod.workspace / "runs" / "mine")} | variables
    process = pod.start("run_and_stop.sh", *words, "--", "train.py", **variables)
    wait_for(lambda: (pod.folder / "began").exists() or process.poll() is not None)
    return process


def test_everything_comes_in_its_order(pod) -> None:
    python_also_compares(pod)
    run = pod.workspace / "runs" / "mine"
    code, log = pod.train("--hours", 1, *BUCKET, **VOLUME)
    assert code == 1 and "the training ended with exit code 0" in log, log  # no way to terminate works here
    assert pod.calls() == [
        "hf buckets info me/mine",
        "python -m gpt2_repro.supervise -- accelerate launch train.py",
        f"python -m gpt2_repro.evaluation {run}",
        f"python -m gpt2_repro.report {run}",
        f"hf sync {run} hf://buckets/me/mine/mine --exclude .lock --quiet",
        f"python - {run} me/mine/mine",
        *TERMINATE,
    ]
    assert "for somebody to look" not in log and "hours at the latest" in log
    assert "the training ended" in (run / "console.log").read_text()


@pytest.mark.parametrize(
    ("variables", "words", "evaluated"),
    [
        ({}, (), True),
        ({}, ("--no_evaluation",), False),
        ({"STATE": "stopped"}, (), False),
        ({"TRAINING": "exit 2"}, (), False),  # of a mistake, in the folder of a run that is complete
        ({"RUN": ""}, (), False),
    ],
)
def test_only_what_has_just_become_complete_is_evaluated(pod, variables, words, evaluated: bool) -> None:
    pod.train("--keep", *words, **variables)
    assert bool(pod.calls("python -m gpt2_repro.evaluation")) is evaluated


@pytest.mark.parametrize(
    ("variables", "code"),
    [({}, 0), ({"TRAINING": "exit 3"}, 3), ({"EVALUATION": "4"}, 4), ({"STUB_hf": "0"}, 0)],
)
def test_a_kept_machine_tells_the_exit_code(pod, variables: dict[str, str], code: int) -> None:
    ended, log = pod.train("--keep", **variables)
    assert ended == code and not pod.calls("runpodctl") and not pod.processes("deadline.sh"), log


def test_a_failed_copy_is_a_failure(pod) -> None:
    (pod.stubs / "hf").write_text('#!/bin/bash\necho "hf $*" >>"$CALLS"\n[[ $1 == buckets ]]\n')
    code, log = pod.train("--keep", *BUCKET)
    assert code == 1 and "THE COPY FAILED" in log and len(pod.calls("hf sync")) == 3


@pytest.mark.parametrize(
    ("copies", "words", "folder", "ways"),
    [
        (True, BUCKET, "outside", TERMINATE),
        (False, BUCKET, "outside", STOP),
        (False, BUCKET, "work space/runs/mine", TERMINATE),
        (True, (), "work space/runs/mine", TERMINATE),
        (True, (), "outside", STOP),
        (True, (), "work space/../outside", STOP),
        (True, BUCKET, "", STOP),  # nobody knows where the run is
    ],
)
def test_only_what_is_safe_is_terminated(pod, copies: bool, words, folder: str, ways: list[str]) -> None:
    if copies:
        python_also_compares(pod)
    else:
        (pod.stubs / "hf").write_text("#!/bin/bash\n[[ $1 == buckets ]]\n")
    run = str(pod.folder / folder) if folder else ""
    pod.train("--hours", 1, "--grace", 0, *words, RUN=run, **VOLUME)
    assert pod.calls()[-4:] == ways and len(pod.calls("runpodctl")) == 2


def test_nobody_is_asked_for_a_password(pod) -> None:
    (pod.stubs / "rsync").write_text("#!/bin/bash\n[[ $RSYNC_RSH == *BatchMode=yes* ]]\n")
    assert pod.train("--keep", "--sync", "me@host:")[0] == 0


def test_without_a_run_folder_the_logs_are_copied(pod) -> None:
    python_also_compares(pod)
    code, log = pod.train("--keep", *BUCKET, RUN="", TRAINING="echo there is no recipe; exit 2")
    (copy,) = pod.calls("hf sync")
    folder = copy.split(" hf://")[0].removeprefix("hf sync ")
    assert code == 2 and "it has named no run folder" in log and not pod.calls("python -m gpt2_repro.report")
    (copied,) = [path for path in (pod.workspace / "logs").glob("run-*/run-*.log") if str(path).startswith(folder)]
    assert "there is no recipe" in copied.read_text()


@pytest.mark.parametrize(
    ("variables", "grace"),
    [
        ({}, False),
        ({"TRAINING": "exit 1"}, True),
        ({"STATE": "stopped"}, True),  # as after a SIGTERM
    ],
)
def test_after_an_early_end_there_is_time_to_look(pod, variables: dict[str, str], grace: bool) -> None:
    began = time.monotonic()
    _, log = pod.train("--hours", 1, "--grace", 0.02, **variables)  # 1.2 s, rounded
    assert ("for somebody to look" in log) is grace and time.monotonic() - began > grace
    assert pod.calls()[-4:] == STOP


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_training_once_and_the_rest_goes_on(pod, number: int) -> None:
    process = start_training(pod, "--hours", 1, "--grace", 0, STATE="stopped")
    for _ in range(3):
        process.send_signal(number)
        time.sleep(0.05)
    process.communicate(timeout=60)
    assert (pod.folder / "told").read_text() == "told\n" and pod.calls()[-4:] == STOP
    assert "the training ended with exit code 0" in pod.log("run-*.log")


def test_before_the_deadline_the_training_is_told_to_end(pod) -> None:
    process = start_training(pod, "--hours", 2 / 3600, "--grace", 0)
    process.communicate(timeout=60)
    assert (pod.folder / "told").read_text() == "told\n" and set(STOP) <= set(pod.calls())
    assert "the training is told to end" in pod.log("deadline.log")


def test_the_deadline_stops_whatever_runs(pod) -> None:
    deaf = start_training(pod, "--hours", 2 / 3600, TRAINING="trap '' TERM; touch $TMPDIR/began; sleep 60")
    wait_for(lambda: pod.calls("runpodctl"))
    assert deaf.poll() is None and "stopping the pod" in pod.log("deadline.log")


def test_the_deadline_of_the_start_tells_it_too(pod) -> None:
    process = start_training(pod, "--hours", 1, "--grace", 0)
    pod.run("deadline.sh", 1 / 3600)
    process.communicate(timeout=60)
    assert (pod.folder / "told").read_text() == "told\n"


def test_a_second_one_is_refused(pod) -> None:
    start_training(pod, "--hours", 1)
    (deadline,) = pod.processes("deadline.sh --armed run")
    code, said = pod.run("run_and_stop.sh", "--hours", 0.1, "--", "train.py")
    assert code == 2 and "another run_and_stop.sh runs on this pod" in said
    assert pod.processes("deadline.sh --armed run") == [deadline] and len(pod.calls("python")) == 1


def test_after_one_has_ended_the_next_may_run(pod) -> None:
    """Neither its deadline nor the pause for somebody to look holds the lock."""
    for _ in range(2):
        code, log = pod.train("--hours", 1, "--grace", 0, TRAINING="exit 1")
        assert code == 1 and "another" not in log
    assert len(pod.calls("python -m gpt2_repro.supervise")) == 2 and len(pod.processes("--armed run")) == 1


@pytest.mark.parametrize("what", ["close", "interrupt"])
def test_a_terminal_may_close_and_ctrl_c_ends_the_training_only(pod, what: str) -> None:
    environment = pod.environment | {"TRAINING": PATIENT, "RUN": str(pod.workspace / "runs" / "mine")}
    command = ["bash", str(ROOT / "runpod" / "run_and_stop.sh"), "--hours", "1", "--grace", "0", "--", "train.py"]
    process, terminal = pty.fork()
    if process == 0:
        os.execvpe("bash", command, environment)
    shown = b""
    while b"hours at the latest" not in shown:  # the terminal follows the log
        shown += os.read(terminal, 4096)
    wait_for((pod.folder / "began").exists)
    if what == "close":
        os.close(terminal)
        time.sleep(0.5)
        assert not (pod.folder / "told").exists()  # the training has not noticed
        os.kill(process, signal.SIGTERM)
    else:
        os.write(terminal, b"\x03\x03")
        with contextlib.suppress(OSError):
            while os.read(terminal, 4096):
                pass
        os.close(terminal)
    os.waitpid(process, 0)
    assert (pod.folder / "told").read_text() == "told\n" and pod.calls()[-4:] == STOP


def test_nothing_that_cannot_be_written_keeps_it_from_training(pod) -> None:
    pod.workspace.write_text("a file")
    command = ["bash", str(ROOT / "runpod" / "run_and_stop.sh"), "--hours", "1", "--grace", "0", "--", "train.py"]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        subprocess.run(command, env=pod.environment, stdout=full, stderr=full, timeout=30)
    assert pod.calls() == ["python -m gpt2_repro.supervise -- train.py", *STOP]
    (log,) = pod.folder.glob("run-*.log")
    assert "hours at the latest" in log.read_text()


def test_a_place_that_cannot_be_reached_is_told_before_the_training(pod) -> None:
    code, said = pod.run("run_and_stop.sh", "--hours", 1, *BUCKET, "--", "train.py", STUB_hf="1")
    assert code == 2 and "would fail after the training" in said
    assert pod.calls() == ["hf buckets info me/mine"] and not pod.processes("deadline.sh")


def test_a_deadline_that_could_not_be_armed_lets_nothing_run(pod) -> None:
    (pod.stubs / "setsid").write_text("#!/bin/bash\nexit 1\n")
    (pod.stubs / "setsid").chmod(0o755)
    code, log = pod.train("--hours", 1)
    assert code == 1 and "COULD NOT BE ARMED" in log and "at the latest" not in log and pod.calls() == []


TRAIN = ("--", "train.py")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (TRAIN, "--hours H is needed"),
        (("--hours", "four", *TRAIN), "--hours H is needed"),
        (("--hours", "0", *TRAIN), "--hours H is needed"),
        (("--hours", 1, "--grace", "long", *TRAIN), "--grace wants minutes"),
        (("--hours", 1), "there is no command"),
        (("--hour", 1, *TRAIN), "there is no option --hour"),
        (("--hours",), "an option needs its value"),
        (("--keep", "--hours", 1, *TRAIN), "leave --hours away"),
    ],
)
def test_mistakes_of_running_cost_nothing(pod, words: tuple[object, ...], message: str) -> None:
    code, said = pod.run("run_and_stop.sh", *words)
    assert code == 2 and message in said and pod.calls() == []


def test_what_is_no_pod_is_kept(pod) -> None:
    code, said = pod.run("run_and_stop.sh", "--hours", 1, *TRAIN, RUNPOD_POD_ID=None)
    assert code == 2 and "type --keep" in said and pod.calls() == []
