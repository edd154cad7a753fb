"""Scores of CORE equal those of a loop over its description."""

import csv
import dataclasses
import hashlib
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from scipy import stats

from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.__main__ import main
from gpt2_repro.evaluation.comparison import ComparedModel, EvaluationSettings
from gpt2_repro.evaluation.core import (
    COMPLETION,
    MULTIPLE_CHOICE,
    SCHEMA,
    CoreTask,
    core_score,
    find_bundle,
    read_bundle,
    rows_of,
)
from gpt2_repro.evaluation.overlap import texts_of
from gpt2_repro.evaluation.scores import Metric, compare, join_seeds
from gpt2_repro.evaluation.tasks import write_task_files
from tests.evaluation.conftest import WORDS, write_rows


ITEMS = 20  # of each task
ENTRIES = [
    {"label": "choices", "icl_task_type": MULTIPLE_CHOICE, "num_fewshot": [2], "continuation_delimiter": "\nAnswer: "},
    {"label": "beginning", "icl_task_type": MULTIPLE_CHOICE, "num_fewshot": [0]},  # an option begins with another one
    {"label": "schema", "icl_task_type": SCHEMA, "num_fewshot": [1]},
    {"label": "completion", "icl_task_type": COMPLETION, "num_fewshot": [3]},
]
GUESSING = {"choices": 33.3, "beginning": 50.0, "schema": 50.0, "completion": 0.0}


def items_of(label: str) -> list[dict[str, Any]]:
    source = random.Random(label)

    def text(length: int) -> str:
        return " ".join(source.choices(WORDS, k=length))

    items: list[dict[str, Any]] = []
    for number in range(ITEMS):
        if label == "choices":
            items.append({"query": text(9), "choices": [text(3), text(3), text(3)], "gold": number % 3})
        elif label == "beginning":
            items.append({"query": text(5), "choices": [f"{text(2)} x", "x"], "gold": number % 2})
        elif label == "schema":
            items.append({"context_options": [text(6), text(7)], "continuation": text(4), "gold": number % 2})
        else:
            items.append({"context": f"{text(8)} ", "continuation": "the"})
    return items


def write_bundle(folder: Path) -> None:
    """Write an evaluation bundle with a task of each kind, in the format of DCLM's."""
    for entry in ENTRIES:
        entry["dataset_uri"] = f"{entry['label']}.jsonl"
        write_rows(folder / "eval_data" / str(entry["dataset_uri"]), items_of(str(entry["label"])))
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": ENTRIES}), encoding="utf-8")
    with (folder / "eval_meta_data.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Eval Task", "Random baseline"])
        writer.writerows(GUESSING.items())


def whole_texts(item: dict[str, Any], task: CoreTask) -> list[str]:
    """Return an item's texts, one per option."""
    if task.kind == MULTIPLE_CHOICE:
        return [item["query"] + task.delimiter + choice for choice in item["choices"]]
    if task.kind == SCHEMA:
        return [context + task.delimiter + item["continuation"] for context in item["context_options"]]
    return [item["context"].strip() + task.delimiter + item["continuation"]]


def scored_part(rows: Sequence[list[int]], number: int, task: CoreTask) -> int:
    """Return how many ids at the end of the row `number` are scored: those after the place where the rows differ."""
    row = rows[number]
    if task.kind == SCHEMA:
        same = 0
        while len({other[len(other) - same - 1] for other in rows}) == 1:
            same += 1
        return same
    shortest = min(len(other) for other in rows)
    first = 0
    while first < shortest - 1 and len({other[first] for other in rows}) == 1:
        first += 1
    return len(row) - first


def losses_of(model: Any, row: list[int]) -> tuple[list[float], list[int]]:
    """Return the loss of each id after the first one, and the most likely ids."""
    with torch.no_grad():
        logits = model(torch.tensor([row[:-1]])).logits[0]
    losses: list[float] = F.cross_entropy(logits, torch.tensor(row[1:]), reduction="none").tolist()
    return losses, logits.argmax(-1).tolist()


def right_answers(model: Any, tokenizer: Any, task: CoreTask) -> list[float]:
    """Return 1 or 0 for each item of a task, from the description in DCLM's paper and nanochat's prompts."""
    items = [json.loads(line) for line in task.data.read_text(encoding="utf-8").splitlines()]
    random.Random(1337).shuffle(items)
    answers: list[float] = []
    for number, item in enumerate(items):
        others = [other for other in range(len(items)) if other != number]
        examples = ""
        for index in random.Random(1234 + number).sample(others, task.examples):
            solved = whole_texts(items[index], task)[items[index].get("gold", 0)]
            examples += f"{solved}\n\n"
        rows: list[list[int]] = []
        for text in whole_texts(item, task):
            rows.append([tokenizer.bos_token_id, *tokenizer(examples + text)["input_ids"]])
        if task.kind == COMPLETION:
            (row,) = rows
            prompt = (examples + item["context"].strip() + task.delimiter).strip()
            begin = 1 + len(tokenizer(prompt)["input_ids"])
            _, likely = losses_of(model, row)
            answers.append(float(likely[begin - 1 :] == row[begin:]))
            continue
        means: list[float] = []
        for index, row in enumerate(rows):
            losses, _ = losses_of(model, row)
            part = losses[-scored_part(rows, index, task) :]
            means.append(sum(part) / len(part))
        answers.append(float(means.index(min(means)) == item["gold"]))
    return answers


def test_core_equals_a_loop_over_its_description(model, tokenizer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_bundle(Path("bundle"))
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    words = ["model", "--local_data", "bundle", "--suite", "core", "--baseline", "none", "--max_length", "128"]
    comparison = main([*words, "--device", "cpu"])
    assert comparison is not None
    scores = {row.task: row.values["model"].value for row in comparison.rows}
    tasks = read_bundle(Path("bundle"))
    centred: list[float] = []
    for task in tasks:
        (stored,) = Path(".cache/evaluation").glob(f"{task.name}-*.json")
        (metric,) = json.loads(stored.read_text(encoding="utf-8"))["scores"]
        assert metric["values"] == right_answers(model, tokenizer, task), task.name
        centred.append((scores[task.name] - task.guessing) / (1 - task.guessing))
    assert 0 < scores["core_choices"] < 1
    assert scores["core"] == pytest.approx(sum(centred) / len(tasks))
    assert comparison.task_details["core"].documents == ITEMS * len(tasks)

    missing = Path("bundle/eval_data/schema.jsonl")
    missing.unlink()
    with pytest.raises(UserError, match=r"schema\.jsonl"):
        main([*words, "--device", "cpu"])


@dataclasses.dataclass
class Seed:
    """The answers of one model: 1 or 0 per item, by task."""

    model: ComparedModel
    answers: list[Any]
    core: Metric


def three_seeds(tasks: Sequence[CoreTask], sizes: Sequence[int]) -> list[Seed]:
    source = np.random.default_rng(0)
    seeds: list[Seed] = []
    for number in range(3):
        answers: list[Any] = []
        metrics: list[Metric] = []
        for task, size in zip(tasks, sizes, strict=True):
            right = (source.random(size) < 0.1 + 2 * task.guessing**2).astype(float)
            answers.append(right)
            value = float(right.mean())
            metrics.append(Metric(task.name, "acc", value, None, True, "mean", right.tolist(), ["d"] * size))
        (core,) = core_score(metrics, tasks)
        seeds.append(Seed(ComparedModel(str(number), revision=str(number)), answers, core))
    return seeds


def test_the_standard_error_of_core_has_no_variance_between_tasks() -> None:
    """Neither for one model, nor for the mean of several seeds, nor for a difference."""
    sizes = (20, 40, 300)
    tasks = [CoreTask(f"core_{size}", SCHEMA, Path("b/d/x"), 0, " ", size / 400) for size in sizes]
    seeds = three_seeds(tasks, sizes)

    def expected(arrays: Sequence[Any]) -> float:
        errors = [stats.sem(array) / (1 - task.guessing) for array, task in zip(arrays, tasks, strict=True)]
        return float(np.sqrt(np.square(errors).sum())) / len(tasks)

    for seed in seeds:
        assert seed.core.stderr == pytest.approx(expected(seed.answers))

    columns = join_seeds(
        [(seed.model, [seed.core]) for seed in seeds], {"0": "a", "1": "a", "2": "b"}, {"0": "1", "1": "2", "2": "1"}
    )
    (_, (joined,)), (other_model, (other,)) = columns
    means = [(first + second) / 2 for first, second in zip(seeds[0].answers, seeds[1].answers, strict=True)]
    assert joined.stderr == pytest.approx(expected(means))
    assert len(joined.seed_scores) == 2

    metadata: dict[str, Any] = {"date": "", "command": "", "versions": {}}
    (row,) = compare(columns, other_model, EvaluationSettings(), metadata).rows
    difference = row.values[columns[0][0].name].difference
    assert difference is not None
    apart = [mine - theirs for mine, theirs in zip(means, seeds[2].answers, strict=True)]
    assert difference.stderr == pytest.approx(expected(apart))
    assert difference.value == pytest.approx(joined.value - other.value)


def test_one_item_has_no_standard_error() -> None:
    task = CoreTask("core_x", SCHEMA, Path("b/d/x"), 0, " ", 0.5)
    (core,) = core_score([Metric("core_x", "acc", 1.0, None, True, "mean", [1.0], ["d"])], [task])
    assert core.value == 1.0
    assert core.stderr is None
    assert core_score([], []) == []


def test_another_bundle_than_the_published_one_is_refused(tmp_path: Path, monkeypatch) -> None:
    write_bundle(tmp_path / "eval_bundle")
    archive = Path(shutil.make_archive(str(tmp_path / "bundle"), "zip", tmp_path, "eval_bundle"))
    monkeypatch.setattr("datasets.DownloadManager.download", lambda *_: str(archive))
    with pytest.raises(UserError, match="--local_data"):
        find_bundle(None)
    monkeypatch.setattr("gpt2_repro.evaluation.core.SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    assert len(read_bundle(find_bundle(None))) == len(ENTRIES)


def test_the_texts_of_an_item_have_no_examples(tmp_path: Path) -> None:
    """Otherwise one item in the training data would count once for each item that shows it."""
    write_bundle(tmp_path)
    tasks = read_bundle(tmp_path)
    write_task_files({task.name: task.data for task in tasks}, tmp_path / "tasks", tasks)
    for task in tasks:
        found = list(texts_of(task.name, tmp_path / "tasks").values())
        items = [json.loads(line) for line in task.data.read_text(encoding="utf-8").splitlines()]
        expected = [whole_texts(item, task) for item in items]
        assert sorted(found) == sorted(expected)
        assert len(rows_of(task)) == ITEMS
