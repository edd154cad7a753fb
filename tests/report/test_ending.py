"""One sentence says why a run ended, or how good it is, on the page, in the terminal and in --check."""

import datetime
import platform
import signal
import time
from pathlib import Path

import pytest

from gpt2_repro.checkpoints.manifest import seal
from gpt2_repro.report.__main__ import main
from gpt2_repro.report.check import headline
from gpt2_repro.report.ending import SIGNALS
from gpt2_repro.report.read import Run
from gpt2_repro.run_record import HOLDER, RunRecord
from gpt2_repro.text import now
from tests.faults.runs import Started
from tests.report.conftest import add, change


def sentence(folder: Path) -> str:
    return str(headline(Run(folder)))


def minutes_ago(minutes: float) -> str:
    time_then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=minutes)
    return time_then.isoformat(timespec="seconds")


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        ("stopped", "SIGTERM", "! run Stopped at step 40 by SIGTERM"),
        ("stopped", "SIGINT", "! run Stopped at step 40 by Ctrl-C (SIGINT)."),
        ("stopped", "SIGUSR1", "! run Stopped at step 40 by SIGUSR1. Run the same command again."),
        ("stopped", "--max_usd 20", "! run Stopped at step 40, the limit --max_usd 20. Raise the limit to continue."),
        ("stopped", "--max_hours 2", "the limit --max_hours 2"),
        ("stopped", "--stop_at_step 40", "Stopped at step 40, as requested by --stop_at_step 40. Pass a later step"),
        ("failed", "MemoryError in a/b.py:3: ", "✗ run Out of memory since 2026-01-02 "),
        ("failed", "OutOfMemoryError in a/b.py:3: CUDA out of memory.", "Out of GPU memory since"),
        (
            "failed",
            "RuntimeError in a/b.py:3: DefaultCPUAllocator: can't allocate memory",
            "✗ run Out of memory since",
        ),
        (
            "failed",
            "ValueError in a/b.py:3: no rows.",
            ": ValueError in a/b.py:3: no rows. Run the same command again.",
        ),
        ("failed", "the launcher died", "the launcher died. Run"),
        ("diverged", "the norm is not finite", "✗ run Diverged: the norm is not finite. Lower --learning_rate"),
    ],
)
def test_each_recorded_end(run_folder: Path, state: str, reason: str, words: str) -> None:
    change(run_folder / "run_status.json", state=state, reason=reason)
    assert words in " ".join(sentence(run_folder).split())


def test_each_stop_signal_has_a_name() -> None:
    assert all(name in signal.Signals.__members__ for name in SIGNALS)


def test_a_process_that_ended_without_a_record(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(run_folder / "run_status.json", state="running", updated=now())
    (run_folder / ".lock").write_text(HOLDER.format(1, platform.node()), encoding="utf-8")
    today = datetime.datetime.now().astimezone()
    monkeypatch.setattr("psutil.boot_time", lambda: time.time() - 3600)
    assert f"✗ run Dead since {today:%H}:" in " ".join(sentence(run_folder).split())
    assert "SIGKILL (out of memory?). Run the same command again." in sentence(run_folder)
    monkeypatch.setattr("psutil.boot_time", lambda: time.time() + 60)
    assert "the machine was restarted" in sentence(run_folder)
    console = "=== start\nTimeout (0:15:00)!\nThread 0x1\n"
    (run_folder / "console.log").write_text(console, encoding="utf-8")
    assert "no progress for 0:15:00 hours" in sentence(run_folder)
    (run_folder / "console.log").write_text(f"{console}=== start\nstep 41\n", encoding="utf-8")
    assert "the machine was restarted" in sentence(run_folder), "the timeout is that of an earlier attempt"


def test_a_run_without_a_complete_checkpoint_begins_again(run_folder: Path) -> None:
    change(run_folder / "run_status.json", state="failed", reason="ValueError: no rows.")
    assert sentence(run_folder).endswith("It begins at step 0, because this folder has no complete checkpoint.")
    checkpoint = run_folder / "checkpoint-20"
    checkpoint.mkdir()
    seal(checkpoint, {}, step=20)
    assert sentence(run_folder).endswith("Run the same command again.")


def test_a_running_run_without_updates_hangs_or_its_machine_is_gone(run_folder: Path) -> None:
    record = RunRecord(run_folder)
    record.claim(record.recipe_text())
    change(run_folder / "run_status.json", updated=minutes_ago(14))
    assert sentence(run_folder).startswith("✓")
    change(run_folder / "run_status.json", updated=minutes_ago(16))
    assert f"Hangs since {(datetime.datetime.now() - datetime.timedelta(minutes=16)):%H}:" in sentence(run_folder)
    record.unlock()
    assert "Dead since" in sentence(run_folder)
    (run_folder / ".lock").write_text("process 7 on another-machine", encoding="utf-8")
    text = sentence(run_folder)
    assert "No sign of life since" in text and "process 7 on another-machine: the machine is gone" in text


def test_a_healthy_run_says_how_good_it_is(run_folder: Path) -> None:
    assert sentence(run_folder).endswith("Beats the bigram model by 0.48 at step 40.")
    change(run_folder / "environment.json", data={"reference_losses": {"unigram": 4.0, "bigram": 3.0}})
    assert " ".join(sentence(run_folder).split()) == "! run Still 0.12 above the unigram model at step 40."
    change(run_folder / "environment.json", data={})
    assert sentence(run_folder).endswith("The validation loss is 4.123 at step 40.")
    (run_folder / "metrics.jsonl").unlink()
    add(run_folder, step=1000, tokens=524_288_000, eval_loss=4.331)
    change(run_folder / "environment.json", reference="llm.c")
    assert "Inside llm.c's band at step 1,000" in sentence(run_folder)
    add(run_folder, step=1000, eval_loss=4.5)
    assert sentence(run_folder).startswith("✗") and "4.315–4.345 ✗ above" in sentence(run_folder)
    (run_folder / "metrics.jsonl").unlink()
    change(run_folder / "run_status.json", state="running", updated=now())
    assert "no validation loss" in sentence(run_folder)


def test_the_first_thing_that_is_wrong_comes_first(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(run_folder, step=41, loss=None)
    words = "Steps with a non-finite training loss: 1, last step 41."
    assert words in sentence(run_folder)
    change(run_folder / "run_status.json", state="failed", reason="ValueError: 1")
    assert "Failed at" in sentence(run_folder)
    change(run_folder / "run_status.json", state="complete", reason=None)
    main([str(run_folder)])
    assert words in capsys.readouterr().out.splitlines()[1]
    page = (run_folder / "report.html").read_text(encoding="utf-8")
    assert f'<p class="headline worse">{words}</p>' in page


def test_a_page_refreshes_itself_while_its_run_trains(run_folder: Path) -> None:
    def refreshes() -> bool:
        main([str(run_folder)])
        return '<meta http-equiv="refresh"' in (run_folder / "report.html").read_text(encoding="utf-8")

    assert not refreshes()
    record = RunRecord(run_folder)
    record.claim(record.recipe_text())
    assert refreshes()
    record.unlock()
    assert not refreshes(), "the process is dead"


def started(recipe: Path, folder: Path, *options: object) -> Started:
    """Start a small training run, and wait for its fifth step."""
    words = ("python", "train.py", recipe, "--output_dir", folder, "--disable_tqdm", "true", "--max_steps", 3000)
    command = Started((*words, *options), folder, "run.log", {}, warm=True, mark=folder)
    command.wait_until(lambda: command.step() >= 5)
    return command


def test_a_killed_training_process_is_dead_at_once(tiny_recipe: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    command = started(tiny_recipe, folder)
    assert Run(folder).is_live and "above the unigram model" in sentence(folder)
    command.process.kill()
    command.end()
    assert "killed without a record, as by SIGKILL (out of memory?)" in sentence(folder)
    with pytest.raises(SystemExit) as ended:
        main([str(folder), "--check"])
    assert ended.value.code == 1 and "Dead since" in capsys.readouterr().out


@pytest.mark.faults
def test_an_exception_has_its_line(tiny_recipe: Path, tmp_path: Path) -> None:
    fault = {"FAULT": "small_device", "FAULT_AT": "0", "FAULT_RANK": "0", "FAULT_MARK": str(tmp_path / "mark")}
    words = ("python", "tests/faults/faulty_train.py", tiny_recipe, "--output_dir", tmp_path / "run")
    command = Started(words, tmp_path / "run", "run.log", fault, warm=True, mark=tmp_path / "mark")
    assert command.end() == 1
    text = sentence(tmp_path / "run")
    assert "Out of GPU memory since" in text and ".py:" in text, command.text()


def test_a_stopped_training_process_names_its_signal(tiny_recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = started(tiny_recipe, folder)
    command.process.send_signal(signal.SIGTERM)
    assert command.end() == 0
    assert "by SIGTERM" in sentence(folder) and not Run(folder).is_live
