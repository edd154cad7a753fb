"""run_and_stop.sh keeps the run's files and stops the pod, even after a failure."""

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
TRAIN = ("--max_usd", "15", "--", "train.py", "--usd_per_hour", "0.34")
SCRIPT = ["bash", str(ROOT / "runpod" / "run_and_stop.sh"), "--hours", "1", "--grace", "0", *TRAIN]
# A training that creates the file `began` when it starts. At SIGTERM it writes a line to the file `told` and ends.
PATIENT = (
    'trap "echo told >>$TMPDIR/told; /bin/sleep 0.3; exit 0" TERM; touch "$TMPDIR/began"; '
    "while :; do /bin/sleep 0.05; done"
)


def start_training(pod: Pod, *words: object, **variables: str) -> subprocess.Popen[str]:
    variables = {"TRAINING": PATIENT, "RUN": str(pod.workspace / "runs" / "mine")} | variables
    process = pod.start("run_and_stop.sh", *words, *TRAIN, **variables)
    wait_for(lambda: (pod.folder / "began").exists() or process.poll() is not None)
    return process


def test_everything_comes_in_its_order(pod) -> None:
    run = pod.workspace / "runs" / "mine"
    code, log = pod.train("--hours", 1, *BUCKET, **VOLUME)
    assert code == 1, log  # no request to terminate the pod works in this test
    whose = ("hf buckets cp", "hf buckets ls")  # sync.sh reads whose copy is at the target
    assert [call for call in pod.calls() if not call.startswith(whose)] == [
        "hf buckets info me/mine",
        "python -m gpt2_repro.supervise -- accelerate launch train.py --usd_per_hour=1 --max_usd 20",
        f"python -m gpt2_repro.evaluation {run}",
        f"python -m gpt2_repro.report {run}",
        f"hf sync {run} hf://buckets/me/mine/mine --exclude .lock --quiet",
        f"python - {run} me/mine/mine",
        *TERMINATE,
    ]
    log = (run / "pod.log").read_text(encoding="utf-8")
    assert "the training ended with exit code 0" in log
    assert "time of the training: " in log and not (run / "console.log").exists()  # console.log belongs to train.py


@pytest.mark.parametrize(
    ("words", "variables", "code", "evaluated"),
    [
        ((), {}, 0, True),
        (("--no_evaluation",), {}, 0, False),
        ((), {"STATE": "stopped"}, 0, False),
        ((), {"TRAINING": "exit 2"}, 2, False),  # a user error, in the directory of a complete run
    ],
)
def test_a_kept_machine_tells_the_exit_code(pod, words, variables: dict[str, str], code: int, evaluated: bool) -> None:
    ended, log = pod.train("--keep", *words, **variables)
    assert ended == code and not pod.calls("runpodctl") and not pod.processes("deadline.sh"), log
    assert bool(pod.calls("python -m gpt2_repro.evaluation")) is evaluated


def test_a_kept_machine_needs_no_price_limit(pod) -> None:
    pod.run("run_and_stop.sh", "--keep", "--", "train.py")
    assert pod.calls("python -m gpt2_repro.supervise") == ["python -m gpt2_repro.supervise -- train.py"]


@pytest.mark.parametrize(
    ("words", "differs", "folder", "ways"),
    [
        (BUCKET, "0", "outside", TERMINATE),
        (BUCKET, "1", "outside", STOP),
        ((), "0", "work space/runs/mine", TERMINATE),
        ((), "0", "work space/../outside", STOP),
        (BUCKET, "0", "", STOP),  # the run directory is unknown
        (BUCKET, "no python", "outside", STOP),
    ],
)
def test_only_what_is_safe_is_terminated(pod, words, differs: str, folder: str, ways: list[str]) -> None:
    run = str(pod.folder / folder) if folder else ""
    if differs == "no python":
        pod.stub("python", "#!/bin/bash\nexit 127\n")
    pod.train("--hours", 1, "--grace", 0, *words, RUN=run, DIFFERS=differs, **VOLUME)
    assert pod.calls()[-4:] == ways and len(pod.calls("runpodctl")) == 2


@pytest.mark.parametrize("variables", [{"TRAINING": "exit 1"}, {"STATE": "stopped"}])
def test_after_an_early_end_there_is_time_to_look(pod, variables: dict[str, str]) -> None:
    words = ("--hours", 1, "--grace", 0.5, *TRAIN)
    pod.start("run_and_stop.sh", *words, RUN=str(pod.folder / "run"), **variables)
    wait_for(lambda: 30 in pod.sleeps())
    assert not pod.calls("runpodctl")
    assert len(pod.processes("deadline.sh --armed run")) == 1
    pod.wake()
    wait_for(lambda: set(STOP) <= set(pod.calls()))


@pytest.mark.parametrize("words", [("--hours", 1), ("--keep",)])
def test_before_the_deadline_the_training_is_told_to_end(pod, words: tuple[object, ...]) -> None:
    """The training gets SIGTERM before the deadline."""
    process = start_training(pod, *words, "--grace", 0)
    # With --keep, run_and_stop.sh sets no deadline, so the deadline is that of the start of the pod.
    if words == ("--keep",):
        pod.run("deadline.sh", 1)
    wait_for(lambda: 3300 in pod.sleeps())
    pod.wake()
    process.communicate(timeout=60)
    assert (pod.folder / "told").read_text(encoding="utf-8") == "told\n"
    wait_for(lambda: set(STOP) <= set(pod.calls()))


def test_a_second_one_is_refused(pod) -> None:
    start_training(pod, "--hours", 1)
    (deadline,) = pod.processes("deadline.sh --armed run")
    code, _ = pod.run("run_and_stop.sh", "--hours", 0.1, *TRAIN)
    assert code == 2 and pod.processes("deadline.sh --armed run") == [deadline] and len(pod.calls("python")) == 1


def test_a_terminal_may_close(pod) -> None:
    environment = pod.environment | {"TRAINING": PATIENT, "RUN": str(pod.workspace / "runs" / "mine")}
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup and the processes it starts ignore it
        os.execvpe("bash", SCRIPT, environment)
    wait_for((pod.folder / "began").exists)
    os.close(terminal)
    time.sleep(0.5)
    assert not (pod.folder / "told").exists()  # the training got no signal
    os.kill(process, signal.SIGTERM)
    os.waitpid(process, 0)
    assert (pod.folder / "told").read_text(encoding="utf-8") == "told\n" and pod.calls()[-4:] == STOP


def test_a_deadline_that_could_not_be_armed_lets_nothing_run(pod) -> None:
    pod.stub("setsid", "#!/bin/bash\nexit 1\n")
    code, log = pod.train("--hours", 1)
    assert code == 1 and "COULD NOT BE ARMED" in log and pod.calls() == []


def test_nothing_starts_if_the_copy_could_not_be_made(pod) -> None:
    assert pod.run("run_and_stop.sh", "--hours", 1, *BUCKET, *TRAIN, STUB_hf="1")[0] == 2
    assert pod.calls() == ["hf buckets info me/mine"] and not pod.processes("deadline.sh")
