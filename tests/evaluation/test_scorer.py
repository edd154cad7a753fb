"""Scores equal those of lm-eval's own class, and CORE's those of a loop over its description."""

import csv
import dataclasses
import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from scipy import stats
from transformers import AutoConfig, AutoModelForCausalLM

from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.comparison import ComparedModel, EvaluationSettings
from gpt2_repro.evaluation.core import CoreTask, core_score, find_bundle, read_bundle, rows_of
from gpt2_repro.evaluation.overlap import texts_of
from gpt2_repro.evaluation.scorer import SHARING, Scorer
from gpt2_repro.evaluation.scores import Metric, compare, join_seeds
from gpt2_repro.evaluation.tasks import write_task_files
from tests.evaluation.conftest import WORDS, write_rows


def requests(kind: str, arguments: list[tuple[str, ...]]) -> list[Instance]:
    return [Instance(kind, {}, args, 0, ("task", number, 1)) for number, args in enumerate(arguments)]  # type: ignore[arg-type]


@pytest.mark.parametrize("positions", [1, 200, 10_000])
@pytest.mark.parametrize("model_type", [*SHARING, "gpt_neo"])
def test_scores_equal_those_of_lm_eval(model_type: str, positions: int, model, tokenizer, documents) -> None:
    """Continuations of one context share a row, except for architectures whose attention is not known to allow it."""
    if model_type != "gpt2":
        torch.manual_seed(0)
        shape = {"vocab_size": 300, "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 128}
        if model_type == "gpt_neo":
            shape |= {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}
        else:
            shape |= {"num_hidden_layers": 2, "intermediate_size": 64, "num_key_value_heads": 2}
        config = AutoConfig.for_model(model_type, **shape, initializer_range=0.3)
        model = AutoModelForCausalLM.from_config(config).eval()
    options = {"pretrained": model, "tokenizer": tokenizer, "max_length": 64, "batch_size": 2}
    ours, stock = Scorer(positions=positions, **options), HFLM(**options)
    source = random.Random(0)
    words = [document.split() for document in documents]
    cuts = [(text, source.randrange(len(text) - 8), source.randrange(1, 8)) for text in words for _ in range(4)]
    # lm-eval (0.4.13) scores the wrong tokens if a second request has the same text with a later cut.
    cuts = list({(len(text), at + length): (text, at, length) for text, at, length in cuts}.values())
    pairs = [(" ".join(text[:at]), " " + " ".join(text[at : at + length])) for text, at, length in cuts]
    # Several continuations of one context, some longer than the window, and one of them twice.
    pairs += [("the river", f" {' '.join(text[:length])}") for text in words for length in (1, 9, 20)]
    mine, theirs = (one.loglikelihood(requests("loglikelihood", pairs)) for one in (ours, stock))
    assert [score for score, _ in mine] == pytest.approx([score for score, _ in theirs], abs=1e-4)
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in theirs]
    rolling = requests("loglikelihood_rolling", [(document,) for document in documents])
    mine, theirs = (one.loglikelihood_rolling(rolling) for one in (ours, stock))
    assert mine == pytest.approx(theirs, rel=1e-6)
    for score, ids in zip(mine, tokenizer(documents)["input_ids"], strict=True):
        assert sum(number for _, number in score.windows) == len(ids)


def write_bundle(folder: Path) -> None:
    """Write an evaluation bundle with a task of each kind, in the format of DCLM's."""
    source = random.Random(3)

    def text(length: int) -> str:
        return " ".join(source.choices(WORDS, k=length))

    choices = [{"query": text(9), "choices": [text(3) for _ in range(3)], "gold": n % 3} for n in range(20)]
    beginning = [{"query": text(5), "choices": [f"{text(2)} x", "x"], "gold": n % 2} for n in range(20)]
    schema = [{"context_options": [text(6), text(7)], "continuation": text(4), "gold": n % 2} for n in range(20)]
    completion = [{"context": f"{text(8)} ", "continuation": "the"} for _ in range(20)]
    tasks = {
        "choices": ("multiple_choice", choices, 2, "\nAnswer: ", 33.3),
        "beginning": ("multiple_choice", beginning, 0, " ", 50.0),
        "schema": ("schema", schema, 1, " ", 50.0),
        "completion": ("language_modeling", completion, 3, " ", 0.0),
    }
    listed = []
    for label, (kind, rows, shots, delimiter, _) in tasks.items():
        write_rows(folder / "eval_data" / f"{label}.jsonl", rows)
        entry = {"label": label, "dataset_uri": f"{label}.jsonl", "num_fewshot": [shots], "icl_task_type": kind}
        listed.append(entry | ({"continuation_delimiter": delimiter} if delimiter != " " else {}))
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": listed}), encoding="utf-8")
    with (folder / "eval_meta_data.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Eval Task", "Random baseline"])
        writer.writerows([label, task[-1]] for label, task in tasks.items())


def core_by_hand(model, tokenizer, task: CoreTask) -> list[float]:
    """Return 1 or 0 for each item of a task, from the description in DCLM's paper and nanochat's prompts."""
    items: list[dict[str, Any]] = [json.loads(line) for line in task.data.read_text(encoding="utf-8").splitlines()]
    random.Random(1337).shuffle(items)

    def texts(item: dict[str, Any]) -> list[str]:
        if "choices" in item:
            return [item["query"] + task.delimiter + choice for choice in item["choices"]]
        contexts = item.get("context_options", [item.get("context", "").strip()])
        return [context + task.delimiter + item["continuation"] for context in contexts]

    right = []
    for number, item in enumerate(items):
        picked = random.Random(1234 + number).sample([n for n in range(len(items)) if n != number], task.examples)
        shots = "".join(f"{texts(shot)[shot.get('gold', 0)]}\n\n" for shot in (items[index] for index in picked))
        rows = [[tokenizer.bos_token_id, *tokenizer(shots + text)["input_ids"]] for text in texts(item)]
        scores = []
        for row in rows:
            logits = model(torch.tensor([row[:-1]])).logits[0]
            losses = F.cross_entropy(logits, torch.tensor(row[1:]), reduction="none").tolist()
            if "choices" in item:
                shortest = min(map(len, rows))
                first = next((n for n in range(shortest) if len({r[n] for r in rows}) > 1), shortest)
                part = losses[first - 1 :]
            elif "context_options" in item:
                same = next(n for n in range(1, len(row)) if len({tuple(r[-n:]) for r in rows}) > 1) - 1
                part = losses[-same:]
            else:
                begin = len(tokenizer((shots + item["context"].strip() + task.delimiter).strip())["input_ids"]) + 1
                right.append(float(logits[begin - 1 :].argmax(-1).tolist() == row[begin:]))
                continue
            scores.append(sum(part) / len(part))
        if scores:
            right.append(float(scores.index(min(scores)) == item["gold"]))
    return right


def test_the_standard_error_of_core_has_no_variance_between_tasks() -> None:
    """Neither for one model, nor for the mean of several seeds, nor for a difference."""
    bundle = [CoreTask(f"core_{size}", "schema", Path("b/d/x"), 0, " ", size / 400) for size in (20, 40, 300)]
    source, models = np.random.default_rng(0), []
    for seed in range(3):
        answers = [source.random(int(task.name[5:])) < 0.1 + 2 * task.guessing**2 for task in bundle]
        scored = [
            Metric(task.name, "acc", float(right.mean()), None, True, "mean", right.tolist(), ["d"] * len(right))
            for task, right in zip(bundle, answers, strict=True)
        ]
        (core,) = core_score(scored, bundle)
        models.append((ComparedModel(str(seed), revision=str(seed)), [core], answers))

    def by_tasks(arrays: list[Any]) -> float:
        errors = [stats.sem(array) / (1 - task.guessing) for array, task in zip(arrays, bundle, strict=True)]
        return float(np.sqrt(np.square(errors).sum())) / 3

    for _, (core,), answers in models:
        assert core.stderr == pytest.approx(by_tasks(answers))
    (_, (joined,)), (_, (other,)) = columns = join_seeds([(m, one) for m, one, _ in models], {"0": "a", "1": "a"})
    means = [np.mean(pair, axis=0) for pair in zip(models[0][2], models[1][2], strict=True)]
    assert joined.stderr == pytest.approx(by_tasks(means)) and len(joined.seeds) == 2
    (row,) = compare(columns, columns[1][0], EvaluationSettings(), {}).rows
    (difference,) = row.difference.values()
    apart = [mine - theirs for mine, theirs in zip(means, models[2][2], strict=True)]
    assert difference.stderr == pytest.approx(by_tasks(apart))
    assert difference.value == pytest.approx(joined.value - other.value)
    one_item = [dataclasses.replace(one, values=one.values[:1], documents=["d"]) for one in scored]
    assert core_score(one_item, bundle)[0].stderr is None


def test_another_bundle_than_the_published_one_is_refused(tmp_path: Path, monkeypatch) -> None:
    write_bundle(tmp_path / "eval_bundle")
    archive = Path(shutil.make_archive(str(tmp_path / "bundle"), "zip", tmp_path, "eval_bundle"))
    monkeypatch.setattr("datasets.DownloadManager.download", lambda *_: str(archive))
    with pytest.raises(UserError, match="--local_data"):
        find_bundle(None)
    monkeypatch.setattr("gpt2_repro.evaluation.core.SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    assert len(read_bundle(find_bundle(None))) == 4


def test_the_texts_of_a_core_item_have_no_examples(tmp_path: Path) -> None:
    """Otherwise one item in the training data would count once for each item that shows it."""
    write_bundle(tmp_path)
    bundle = read_bundle(tmp_path)
    write_task_files({task.name: task.data for task in bundle}, tmp_path / "tasks", bundle)
    for task in bundle:
        texts = texts_of(task.name, tmp_path / "tasks")
        alone = [row | {"shown": ""} for row in rows_of(task._replace(examples=0))]
        assert len(texts) == len(alone) == 20
        for row, of_item in zip(alone, texts.values(), strict=True):
            options = row.get("options", [""])
            assert of_item == [row.get("context", "") + option + row.get("continuation", "") for option in options]
