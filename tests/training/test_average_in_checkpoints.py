"""A checkpoint of a run with --ema_steps has the average of the weights, which other commands use as they use final/."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gpt2_repro import export, generate
from gpt2_repro.checkpoints.manifest import training_record
from gpt2_repro.evaluation import follow
from gpt2_repro.evaluation.__main__ import main as evaluate
from gpt2_repro.evaluation.models import open_model
from gpt2_repro.model.checkpoint import resolve_checkpoint
from gpt2_repro.model.load import load_model
from tests.optim.simulation import average_of
from tests.training.by_hand import mean_nll, rows_of


AVERAGE = "model.average.safetensors"
OPTIONS = ("--ema_steps", 3, "--save_steps", 1, "--keep_checkpoints", 0, "--accept_any_hardware", "true")


def average_by_hand(run: Path, step: int) -> dict[str, Tensor]:
    """Return the average of the weights at a step, computed from the checkpoints of all steps until then."""
    saved = [load_file(run / f"checkpoint-{number}" / "model.safetensors") for number in range(1, step + 1)]
    return {name: average_of([weights[name].float() for weights in saved], 3) for name in saved[0]}


SLOW = pytest.mark.slow
LAYOUTS = [
    (("python",), "false"),
    (("launch", 2), "false"),  # ZeRO-1
    pytest.param(("torchrun", 2), "false", marks=SLOW),  # DDP
    pytest.param(("launch", 1), "true", marks=SLOW),
    pytest.param(("launch", 2), "true", marks=SLOW),
    pytest.param(("zero2", 2), "false", marks=SLOW),
]


@pytest.mark.parametrize(("layout", "bf16"), LAYOUTS, ids=str)
def test_each_checkpoint_has_the_average_by_hand(layout: tuple[object, ...], bf16: str, train, tmp_path: Path) -> None:
    options = (*OPTIONS, "--bf16", bf16, "--per_device_train_batch_size", 4)
    run = train(tmp_path / "run", *options, launcher=layout)
    # DeepSpeed saves weights that are rounded to bf16. The average is that of the fp32 master weights.
    tolerance = {"rtol": 2**-8, "atol": 1e-4} if bf16 == "true" else {"rtol": 0, "atol": 1e-6}
    for step in (1, 4, 8):
        found = load_file(run / f"checkpoint-{step}" / AVERAGE)
        expected = average_by_hand(run, step)
        assert found.keys() == expected.keys()
        for name, weight in found.items():
            assert weight.dtype == torch.float32
            torch.testing.assert_close(weight, expected[name], **tolerance)
    trained = load_file(run / "checkpoint-8" / "model.safetensors")
    assert not any(torch.equal(weight, trained[name].float()) for name, weight in found.items())
    final = load_file(run / "final" / "model.safetensors")
    assert all(torch.equal(weight, found[name][: len(weight)]) for name, weight in final.items())


@pytest.fixture(scope="module")
def averaged(train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run of 8 steps with a validation and a checkpoint at step 4. Tests must not modify it."""
    return train(tmp_path_factory.mktemp("averaged") / "run", "--ema_steps", 3)


@pytest.fixture
def plain(averaged: Path, tmp_path: Path) -> Path:
    """Return a folder whose only weights are the average in checkpoint-4."""
    folder = tmp_path / "plain"
    shutil.copytree(averaged / "checkpoint-4", folder, ignore=shutil.ignore_patterns("*.pt", "*.pth", "manifest.json"))
    (folder / AVERAGE).rename(folder / "model.safetensors")
    return folder


@pytest.fixture
def raw(averaged: Path, tmp_path: Path) -> Path:
    """Return checkpoint-4 of a copy of the run, without the average."""
    run = Path(shutil.copytree(averaged, tmp_path / "raw"))
    (run / "checkpoint-4" / AVERAGE).unlink()
    return run / "checkpoint-4"


def test_the_average_is_loaded_without_padding(averaged: Path, plain: Path, raw: Path, tiny_data, events) -> None:
    rows = rows_of(tiny_data, "validation")
    (validation,) = [event for event in events(averaged) if event["step"] == 4 and "eval_loss" in event]
    for folder, key in ((averaged / "checkpoint-4", "eval_EMA_loss"), (raw, "eval_loss")):
        model = load_model(str(folder))
        assert model.config.vocab_size == 300
        assert mean_nll(model, rows) == pytest.approx(validation[key], abs=1e-5)
        record = training_record(folder)
        assert record is not None
        assert record.losses["eval_loss"] == validation[key] and "eval_EMA_loss" not in record.losses
    names = (averaged / "checkpoint-4", plain, raw, averaged / "checkpoint-8", averaged / "final")
    revisions = [open_model(resolve_checkpoint(str(name))).column.revision for name in names]
    assert revisions[0] == revisions[1] and revisions[3] == revisions[4] and len(set(revisions)) == 3


def test_one_table_has_averages_and_names_them(averaged: Path, plain: Path, tmp_path: Path, capsys) -> None:
    output = tmp_path / "out"
    names = [str(averaged / "final"), str(averaged / "checkpoint-4"), str(plain)]
    evaluate([*names, "--baseline", "none", "--device", "cpu", "--output_dir", str(output)])
    comparison = json.loads((output / "comparison.json").read_text(encoding="utf-8"))
    final, checkpoint, other = comparison["models"]
    assert final["weights"] == checkpoint["weights"] != other["weights"] == ""
    for row in comparison["rows"]:
        values = row["values"]
        assert values[checkpoint["name"]] == values[other["name"]] != values[final["name"]]
    table = (output / "comparison.md").read_text(encoding="utf-8")
    assert table.count(final["weights"]) == 2
    assert final["weights"] in (averaged / "final" / "README.md").read_text(encoding="utf-8")


def test_follow_takes_the_average(averaged: Path, plain: Path, tmp_path: Path) -> None:
    columns = {}

    def score(checkpoint, folder: Path) -> None:
        columns[folder.name] = open_model(checkpoint).column
        folder.mkdir(parents=True)

    follow.follow(str(averaged), tmp_path / "scores", score, {})
    assert columns["checkpoint-4"].revision == open_model(resolve_checkpoint(str(plain))).column.revision
    assert columns["checkpoint-8"].revision == columns["final"].revision
    assert len({column.weights for column in columns.values()}) == 1 and columns["final"].weights


def test_generate_and_export_use_the_average_and_say_so(averaged: Path, plain: Path, tmp_path: Path, caplog, capsys):
    words = ("the", "--temperature", "1", "--max_new_tokens", "20")
    weights = open_model(resolve_checkpoint(str(averaged / "checkpoint-4"))).column.weights
    caplog.set_level("INFO", "gpt2_repro")
    caplog.clear()  # open_model's own message, if another test has turned it on
    written = []
    for folder in (averaged / "checkpoint-4", plain):
        generate.main([str(folder), *words])
        written.append(capsys.readouterr().out)
    assert written[0] == written[1]
    export.main([str(averaged / "checkpoint-4"), str(tmp_path / "exported")])
    assert [weights in line for line in caplog.messages].count(True) == 2
    assert weights in (tmp_path / "exported" / "README.md").read_text(encoding="utf-8")
    expected = load_file(plain / "model.safetensors")
    assert [path.name for path in (tmp_path / "exported").glob("*.safetensors")] == ["model.safetensors"]
    for name, weight in load_file(tmp_path / "exported" / "model.safetensors").items():
        assert torch.equal(weight, expected[name][: len(weight)])


def test_a_new_run_starts_from_the_average(averaged: Path, plain: Path, train, events, tmp_path: Path) -> None:
    losses = []
    for name, start in (("ours", averaged / "checkpoint-4"), ("theirs", plain)):
        run = train(tmp_path / name, "--init_from", start, "--max_steps", 4)
        losses.append([event["loss"] for event in events(run) if "loss" in event])
    assert losses[0] == losses[1]


def test_a_resume_uses_the_weights_of_the_step(averaged: Path, train, tmp_path: Path) -> None:
    resumed = train(tmp_path / "run", "--ema_steps", 3, "--stop_at_step", 4)
    train(resumed, "--ema_steps", 3)
    for name in ("checkpoint-8/model.safetensors", f"checkpoint-8/{AVERAGE}", "final/model.safetensors"):
        assert (resumed / name).read_bytes() == (averaged / name).read_bytes(), name
