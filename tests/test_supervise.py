"""The supervisor restarts a crashed command, up to a limited number of crashes."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gpt2_repro import supervise
from gpt2_repro.errors import RunFailed, UserError
from gpt2_repro.supervise import main


# Writes the same notes as train.py. The plan lists the event of each attempt: EVENT or EVENT:CHECKPOINT.
FAKE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from gpt2_repro.run_record import notes
from gpt2_repro.checkpoints.manifest import seal
run, plan = Path(sys.argv[1]), sys.argv[2].split(",")
run.mkdir(exist_ok=True)
attempt = len(list(run.glob("attempt-*")))
(run / f"attempt-{attempt}").write_text(str(notes.noted(notes.WENT_BACK)))
why = "SIGTERM" if "stopped" in plan else "why"
what, _, number = plan[min(attempt, len(plan) - 1)].partition(":")
status = lambda state: (run / "run_status.json").write_text(json.dumps({"state": state, "reason": why}))
if what == "mistake":
    notes.note(notes.MISTAKE, "there is no recipe")
    raise RuntimeError("as a launcher does")
if what == "nothing":
    sys.exit(0)  # like --dry_run, or the command of a complete run
notes.note(notes.RUN, str(run))
status("running")
if number:
    notes.note(notes.WENT_BACK, number)
    (run / f"checkpoint-{number}").mkdir()
    seal(run / f"checkpoint-{number}", {})
if what == "orphan":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    (run / "orphan").write_text(str(child.pid))
if what == "writer":  # writes for 2 seconds
    code = "import sys, time; [(open(sys.argv[1], 'ab').write(bytes(2 << 20)), time.sleep(0.1)) for _ in range(20)]"
    subprocess.Popen([sys.executable, "-c", code, str(run / "written")], start_new_session=True)
    # Another writer has written more and ends earlier.
    early = "import sys, time; open(sys.argv[1], 'ab').write(bytes(60 << 20)); time.sleep(1)"
    subprocess.Popen([sys.executable, "-c", early, str(run / "early")], start_new_session=True)
if what == "endless":
    code = "import sys, time\\nwhile True: open(sys.argv[1], 'ab').write(bytes(2 << 20)), time.sleep(0.05)"
    child = subprocess.Popen([sys.executable, "-c", code, "/dev/null"], start_new_session=True)
    (run / "orphan").write_text(str(child.pid))
if what in ("kill", "orphan", "writer", "endless"):
    os.kill(os.getpid(), signal.SIGKILL)
if what == "wait":
    signal.signal(signal.SIGTERM, lambda *_: (status("stopped"), sys.exit("a traceback")))
    (run / "waiting").touch()
    time.sleep(60)
status({"quiet": "failed", "uncopied": "complete"}.get(what, what))
sys.exit(0 if what in ("complete", "quiet") else 1)
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    (tmp_path / "fake.py").write_text(FAKE, encoding="utf-8")
    run = tmp_path / "run"

    def words(plan: str, *options: str) -> list[str]:
        return [*options, "--wait", "0.05", "--", sys.executable, str(tmp_path / "fake.py"), str(run), plan]

    words.run = run
    words.attempts = lambda: [path.read_text(encoding="utf-8") for path in sorted(run.glob("attempt-*"))]
    return words


@pytest.fixture(autouse=True)
def handlers():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("plan", "failure", "attempts"),
    [
        ("complete", None, 1),
        ("kill:1,kill:2,kill:3,kill:4,failed:5,complete", None, 6),  # unlimited, because each attempt makes progress
        ("stopped", None, 1),  # after a signal, a launcher fails
        ("uncopied,complete", None, 2),
        ("uncopied", "3 crashes", 3),
        ("nothing", None, 1),
        ("quiet:3,complete", None, 2),  # an exit code of 0 does not make a run complete
        ("kill:7,kill", "3 crashes .*-9", 3),
        ("diverged", "why", 1),
    ],
)
def test_what_would_happen_again_is_not_started_again(command, plan: str, failure: str | None, attempts: int) -> None:
    with pytest.raises(RunFailed, match=failure) if failure else contextlib.nullcontext():
        main(command(plan))
    notes = command.attempts()
    # Later attempts read the notes of earlier ones, so they do not resume from --resume_from again.
    assert len(notes) == attempts and (attempts < 6 or notes == ["None", "1", "2", "3", "4", "5"])


def test_a_mistake_of_the_user_ends_it_without_a_traceback(command, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="there is no recipe"):
        main(command("mistake"))
    assert len(command.attempts()) == 1 and not capfd.readouterr().err


@pytest.mark.parametrize("own", ["", "5"])
def test_torchrun_gives_workers_longer_to_save_than_their_watchdog(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    if own:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", own)
    code = f"import os, sys; sys.exit(os.environ.get('TORCH_ELASTIC_SHUTDOWN_TIMEOUT') != {own or '900'!r})"
    main(["--attempts", "1", "--", sys.executable, "-c", code])


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_the_next_attempt_starts_when_all_processes_of_the_last_one_have_ended(command) -> None:
    """A process that still writes files is waited for. Another one is killed after the grace."""
    main(command("orphan:1,writer:2,complete", "--grace", "0.6"))
    orphan = int((command.run / "orphan").read_text(encoding="utf-8"))
    assert len(command.attempts()) == 3 and not psutil.pid_exists(orphan)
    assert (command.run / "written").stat().st_size == 20 * (2 << 20)


def test_a_leftover_process_that_writes_without_end_is_killed(command, monkeypatch) -> None:
    monkeypatch.setattr(supervise, "LONGEST_SAVE", 1.5)
    main(command("endless:1,complete", "--grace", "0.4"))
    orphan = int((command.run / "orphan").read_text(encoding="utf-8"))
    assert len(command.attempts()) == 2 and not psutil.pid_exists(orphan)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_are_passed_on_and_end_the_loop(command, number) -> None:
    words = [sys.executable, "-m", "gpt2_repro.supervise", *command("wait")]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as supervisor:
        deadline = time.monotonic() + 60
        while not (command.run / "waiting").exists():
            assert time.monotonic() < deadline and supervisor.poll() is None
            time.sleep(0.01)
        supervisor.send_signal(number)
        assert supervisor.wait(60) == 0 and supervisor.stderr and not supervisor.stderr.read()
    assert len(command.attempts()) == 1
    assert json.loads((command.run / "run_status.json").read_text(encoding="utf-8"))["state"] == "stopped"
