"""Progress lines, comparisons of losses and the compilation report are correct."""

import json
import shutil
import types
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState

from gpt2_repro import cli
from gpt2_repro.training.callbacks import ProgressBar, format_event


@pytest.mark.parametrize(("reference", "bands"), [("llm.c", ["", "✗ above", "✗ above", "✓"]), (None, [""] * 4)])
def test_reference_range_is_shown_and_causes_are_explained_once(reference, bands: list, capsys) -> None:
    bar = ProgressBar(lambda step: 1, reference)
    args, state = types.SimpleNamespace(disable_tqdm=True, last_step=18_865), TrainerState(max_steps=18_865)
    state.is_world_process_zero = True
    bar.on_train_begin(args, state, TrainerControl())
    for state.global_step, loss in ((0, 11.0), (500, 5.6), (750, 4.9), (1000, 4.331)):
        bar.on_log(args, state, TrainerControl(), logs={"eval_loss": loss, "eval_tokens": 10_485_760})
    lines = capsys.readouterr().out.splitlines()
    validations = [line for line in lines if line.startswith("step")]
    for line, loss, band in zip(validations, ("11.0000", "5.6000", "4.9000", "4.3310"), bands, strict=True):
        assert loss in line and "10,485,760" in line and line.endswith(band) and ("llm.c" in line) == bool(band)
    assert len(lines) - len(validations) == (reference is not None)


def test_progress_in_a_file_is_written_as_lines(monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli, "LINE_SECONDS", 0)
    assert list(cli.Progress("abcd", desc="read")) == list("abcd")
    assert capsys.readouterr().err.splitlines() == ["read: 25%", "read: 50%", "read: 75%", "read: 100%"]


def test_training_line_shows_all_values() -> None:
    event = {"step": 1000, "tokens": 524_288_000, "loss": 4.317, "learning_rate": 6e-4, "tokens_per_second": 1_590_000}
    extra = {"grad_norm": 0.4211, "mfu": 0.545, "data_wait": 0.003, "usd": 1.3}
    line = format_event(event | extra, steps_left=17_865)
    for told in ("524,288,000", "4.3170", "6.00e-04", "0.421", "1,590,000", "54.5%", "0.3%", "$1.30", "1 h 38 min"):
        assert told in line
    assert format_event({"samples": 3}) == "" and "left" not in format_event(event)


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
