"""console.log in the run directory has what all ranks of all attempts printed."""

from pathlib import Path

import pytest

from gpt2_repro.console import EARLY_BYTES, Console


def test_attempts_are_appended(type_warm, tiny_recipe: Path, tmp_path: Path) -> None:
    """It has the lines of the terminal, from the first one on, and a traceback. A refused start adds nothing."""
    run = tmp_path / "run"
    words = ("python", "train.py", tiny_recipe, "--output_dir", run)
    stopped = type_warm(*words, "--stop_at_step", 2)
    assert stopped.returncode == 0
    first = (run / "console.log").read_text(encoding="utf-8")
    header, *lines = first.splitlines()
    assert header.startswith("===")
    assert sorted(lines) == sorted([*stopped.stdout.splitlines(), *stopped.stderr.splitlines()])

    refused = type_warm(*words, "--learning_rate", 5)
    assert refused.returncode == 2
    assert (run / "console.log").read_text(encoding="utf-8") == first

    finished = type_warm(*words)
    assert finished.returncode == 0
    second = (run / "console.log").read_text(encoding="utf-8")
    assert second.startswith(first)
    assert second.count("===") == 2 * first.count("===")
    assert set(finished.stdout.splitlines()) <= set(second.splitlines())


def test_an_error_of_another_rank(type_warm, tiny_recipe: Path, tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    root = Path(__file__).parents[2]
    script.write_text(
        f"""
import os, sys
sys.path.insert(0, {str(root)!r})
from gpt2_repro import cli, train
from gpt2_repro.training import run

save_final = run.save_final

def fail(trainer):
    if os.environ["RANK"] == "1":
        raise ValueError("the reason")
    save_final(trainer)

run.save_final = fail
cli.run(train.main, prints_results=False)
""",
        encoding="utf-8",
    )
    run = tmp_path / "run"
    options = ("--per_device_train_batch_size", 4)
    done = type_warm("ddp", 2, script, tiny_recipe, "--output_dir", run, *options)
    assert done.returncode != 0
    text = (run / "console.log").read_text(encoding="utf-8")
    assert "[rank 1] ValueError: the reason\n" in text
    assert "[rank 1] Traceback" in text


def test_text_that_cannot_be_kept_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console()
    console.write(b"a" * EARLY_BYTES)
    console.write(b"b")
    console.open(tmp_path / "missing" / "console.log")  # no error
    console.write(b"c\n")
    monkeypatch.setenv("RANK", "3")
    console.open(tmp_path / "console.log")
    console.write(b"d\ne\n")
    assert (tmp_path / "console.log").read_bytes() == b"[rank 3] c\n[rank 3] d\n[rank 3] e\n"
    console.close()
