"""Progress lines, comparisons of losses and the compilation report are correct."""

import json
import shutil
from pathlib import Path

import pytest

from gpt2_repro import cli


def test_progress_in_a_file_is_written_as_lines(monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli, "LINE_SECONDS", 0)
    assert list(cli.Progress("abcd", desc="read")) == list("abcd")
    assert capsys.readouterr().err.splitlines() == ["read: 25%", "read: 50%", "read: 75%", "read: 100%"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile on a CPU needs a C++ compiler")
def test_compiled_run_under_zero1_matches_eager_run(
    train, events, type_command, tiny_recipe: Path, tmp_path: Path
) -> None:
    # 151 validation rows in batches of 4: the last batch is short and is not compiled again.
    options = ("--eval_tokens", 151 * 32, "--activation_checkpointing", "--max_steps", 4)
    eager = train(tmp_path / "eager", *options)
    words = ("train.py", tiny_recipe, *options, "--torch_compile", "--per_device_train_batch_size", 4)
    run = tmp_path / "compiled"
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = type_command("launch", 1, *words, "--output_dir", run, timeout=500, **cache)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"compiling the training step; compiled code is cached in {tmp_path}/cache" in done.stdout
    assert done.stdout.count("compiling the ") == 2  # one for training, one for validation
    engine = json.loads((run / "environment.json").read_text(encoding="utf-8"))["engine"]
    assert engine["compiled"] is True
    for ours, theirs in zip(events(run), events(eager), strict=True):
        for key in ("loss", "eval_loss"):
            assert ours.get(key) == pytest.approx(theirs.get(key), abs=1e-5), ours["step"]
