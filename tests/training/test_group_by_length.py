"""Rows of like length together, and further validation sets: through train.py, beside a computation by hand."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.collator import EpochSampler
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.rows import open_rows
from gpt2_repro.data.shards import write_rows


TOKENS = 2048  # targets of a step; the longest row has 32
SHORT, CUT = 9, 1500  # rows of one further set, and the targets at which the other is cut


@pytest.fixture(scope="module")
def recipe(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe on wrapped rows of 8 to 32 targets, grouped by length, with two further validation sets."""
    folder = tmp_path_factory.mktemp("grouped")
    document = yaml.safe_load(tiny_recipe.read_text())
    document["data"] |= {"dataset_dir": str(folder / "data"), "packing": "wrap", "min_length": 8}
    prepare(DataArguments(**document["data"]))
    add_set(folder / "data", "few", slice(0, SHORT))
    add_set(folder / "data", "many_words", slice(SHORT, 200))
    document["training"] |= {
        "tokens_per_step": TOKENS,
        "per_device_train_batch_size": 32,
        "train_sampling_strategy": "group_by_length",
        "eval_tokens": CUT,
        "sample_tokens": 0,
    }
    path = folder / "grouped.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def add_set(folder: Path, name: str, part: slice) -> None:
    """Write some training rows as validation_<name>, as a preparation would."""
    rows = [row["input_ids"] for row in open_rows(folder / "train").__getitems__(range(part.start, part.stop))]
    block = (np.concatenate(rows), np.array([len(row) for row in rows]))
    written = write_rows(folder / f"validation_{name}", [block], rows[0].dtype, None)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["counts"][f"validation_{name}"] = {"rows": written.rows, "row_tokens": written.targets}
    manifest["sha256"][f"validation_{name}"] = written.sha256
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def table(recipe: Path) -> Callable[[str], list[np.ndarray]]:
    """The rows of a split."""
    folder = Path(yaml.safe_load(recipe.read_text())["data"]["dataset_dir"])

    def rows_of(split: str) -> list[np.ndarray]:
        rows = open_rows(folder / split)
        return [row["input_ids"] for row in rows.__getitems__(range(len(rows)))]

    return rows_of


@pytest.fixture(scope="module")
def steps(table) -> list[list[int]]:
    """The rows of the steps of two epochs, by their definition."""
    lengths = [len(row) - 1 for row in table("train")]
    found: list[list[int]] = []
    for epoch in (0, 1):
        order = EpochSampler(len(lengths), rows_per_step=1, seed=42, shuffle=True)
        order.set_epoch(epoch)
        of_epoch: list[list[int]] = [[] for _ in range(-(-sum(lengths) // TOKENS))]
        before = 0
        for row in order:
            of_epoch[before // TOKENS].append(row)
            before += lengths[row]
        found += of_epoch[: sum(lengths) // TOKENS]
    return found


@pytest.fixture(scope="module")
def grouped(recipe: Path, type_warm, steps, tmp_path_factory) -> Callable[..., Path]:
    """Trains it into a folder of its own, to two steps before the end of the second epoch."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str, *options: object, launcher: tuple[object, ...] = ("python",)) -> Path:
        words = ("--output_dir", folder / name, "--max_steps", len(steps) - 2, "--eval_steps", 4, *options)
        done = type_warm(*launcher, "train.py", recipe, *words)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        (folder / f"{name}.log").write_text(done.stdout + done.stderr)
        return folder / name

    return run


@pytest.fixture(scope="module")
def straight(grouped) -> Path:
    return grouped("straight")


def untrained(run: Path):
    """The fresh weights of the run: the same seed and the same configuration."""
    (checkpoint, *_) = run.glob("checkpoint-*")
    set_seed(json.loads((run / "environment.json").read_text())["seed"])
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint), dtype=torch.float32).eval()


def mean_nll(model, rows: list[np.ndarray]) -> float:
    """The stock model's logits, one row at a time, summed in double precision."""
    total = 0.0
    for ids in rows:
        row = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            logits = model(row[None, :-1]).logits[0, :, :300].double()
        total += F.cross_entropy(logits, row[1:], reduction="sum").item()
    return total / sum(len(ids) - 1 for ids in rows)


def first_targets(rows: list[np.ndarray], tokens: int) -> list[np.ndarray]:
    """The first rows that make so many targets; all where there are fewer."""
    taken: list[np.ndarray] = []
    for row in rows:
        if sum(len(ids) - 1 for ids in taken) < tokens:
            taken.append(row)
    return taken


def test_every_step_is_what_it_should_be(straight: Path, table, steps, events) -> None:
    rows = table("train")
    assert len({len(row) for row in rows}) > 10 and len(steps) >= 8
    logged = [event for event in events(straight) if "loss" in event]
    assert [event["step"] for event in logged] == list(range(1, len(steps) - 1))
    seen = 0
    for event, step in zip(logged, steps[:-2], strict=True):
        targets = sum(len(rows[row]) - 1 for row in step)
        seen += targets
        assert (event["step_tokens"], event["tokens"]) == (targets, seen)
        assert abs(targets - TOKENS) < 32
        assert 0 <= event["padding"] < 0.1
    assert logged[0]["loss"] == pytest.approx(mean_nll(untrained(straight), [rows[r] for r in steps[0]]), abs=1e-5)
    log = (straight.parent / "straight.log").read_text()
    assert "compilation: off" in log and "2,048 targets a step without padding, give or take a row's" in log
    plan = json.loads((straight / "environment.json").read_text())["plan"]
    assert plan["by_length"] and plan["gradient_accumulation_steps"] == 4  # 1 + ln 4 + 2,079 / (1,024 * 32 / 33)


@pytest.mark.slow
def test_two_zero1_processes_train_the_same_steps(straight: Path, grouped, events) -> None:
    run = grouped("two", "--per_device_train_batch_size", 16, launcher=("launch", 2))
    engine = json.loads((run / "environment.json").read_text())["engine"]
    assert (engine["zero_stage"], engine["processes"], engine["accumulation_steps"]) == (1, 2, 3)
    keys = ("loss", "step_tokens", "tokens", "eval_loss", "eval_few_loss", "eval_many_words_loss", "eval_few_tokens")
    for ours, theirs in zip(events(run), events(straight), strict=True):
        for key in keys:
            assert ours.get(key) == pytest.approx(theirs.get(key), abs=1e-5), (ours["step"], key)


def test_a_run_resumed_in_the_middle_of_an_epoch_is_the_straight_one(straight: Path, grouped, steps, events) -> None:
    stop = len(steps) // 2 + 2
    grouped("resumed", "--stop_at_step", stop)
    run = grouped("resumed")
    losses = [[event["loss"] for event in events(folder) if "loss" in event] for folder in (run, straight)]
    assert losses[0] == losses[1] and stop < len(losses[0])
    finals = [load_file(folder / "final" / "model.safetensors") for folder in (run, straight)]
    assert all(torch.equal(weight, finals[1][name]) for name, weight in finals[0].items())


def test_each_validation_set_has_a_loss_of_its_own(straight: Path, table, events) -> None:
    evaluations = [event for event in events(straight) if "eval_loss" in event]
    assert len(evaluations) >= 3 and evaluations[0]["step"] == 0
    final = AutoModelForCausalLM.from_pretrained(straight / "final").eval()
    sets = {"eval": "validation", "eval_few": "validation_few", "eval_many_words": "validation_many_words"}
    for key, split in sets.items():
        rows = first_targets(table(split), CUT)
        targets = sum(len(row) - 1 for row in rows)
        assert {event[f"{key}_tokens"] for event in evaluations} == {targets}
        assert (targets < CUT) == (split == "validation_few") and (len(rows) < len(table(split))) == (targets >= CUT)
        for event, model in ((evaluations[0], untrained(straight)), (evaluations[-1], final)):
            assert event[f"{key}_loss"] == pytest.approx(mean_nll(model, rows), abs=1e-5), (key, event["step"])
    status = json.loads((straight / "run_status.json").read_text())
    card = (straight / "final" / "README.md").read_text()
    log = (straight.parent / "straight.log").read_text()
    assert "validation: also on few, many_words" in log
    for name in ("few", "many_words"):
        loss = evaluations[-1][f"eval_{name}_loss"]
        assert status[f"eval_{name}_loss"] == loss
        assert f"| validation loss, {name} | {loss:.4f} nats per token |" in card
        assert f"; {name} {loss:.4f} over {evaluations[-1][f'eval_{name}_tokens']:,}" in log


def test_a_set_whose_rows_are_not_the_manifests_is_refused(recipe: Path, type_warm, tmp_path: Path) -> None:
    document = yaml.safe_load(recipe.read_text())
    folder = tmp_path / "data"
    shutil.copytree(document["data"]["dataset_dir"], folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["counts"]["validation_few"]["rows"] += 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    done = type_warm("python", "train.py", recipe, "--dataset_dir", folder, "--output_dir", tmp_path / "run")
    assert done.returncode == 2 and "validation_few has 9 rows and its manifest says 10" in done.stderr
    assert not (tmp_path / "run").exists()
