"""Scores are read from lm-eval's output and compared as by hand."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from gpt2_repro.errors import RunFailed
from gpt2_repro.evaluation.comparison import (
    ComparedModel,
    Comparison,
    Difference,
    EvaluationSettings,
    Score,
    TaskDetails,
)
from gpt2_repro.evaluation.output import comparison_markdown
from gpt2_repro.evaluation.overlap import add_clean
from gpt2_repro.evaluation.reading import read_scores
from gpt2_repro.evaluation.references import DOCUMENTS
from gpt2_repro.evaluation.scorer import Rolling
from gpt2_repro.evaluation.scores import Metric, compare, join_seeds


OURS, GPT2 = "final (runs/demo)", "openai-community/gpt2"
SETTINGS = EvaluationSettings(max_length=1024, batch_size=32, seed=1234, device="cuda", limit=None)
METADATA = {"date": "2026-12-01", "command": "bash evaluate.sh runs/demo", "versions": {"lm_eval": "0.4.13"}}
MODELS = {
    OURS: ComparedModel(OURS, "runs/demo/final", 3_538_944, 9_890_693_120, "0123456789abcdef"),
    GPT2: ComparedModel(GPT2, GPT2, 124_439_808, None, "fedcba9876543210"),
}
RIGHT = np.random.default_rng(0).random(2000) < 0.3


def scores(right: np.ndarray, word_perplexity: float, documents: str = "d") -> list[Metric]:
    values = [float(answer) for answer in right]
    pages = [[-np.log(word_perplexity) * 100 * (1 + 0.01 * page), 100] for page in range(-15, 16)]
    hashes = [f"{documents}{number}" for number in range(len(right))]
    items = {"documents": hashes, "details": TaskDetails(1.0, len(right), "Rowan/hellaswag")}
    texts = {"documents": [f"p{page}" for page in range(31)], "details": TaskDetails(2.0, 31, "/d/pages.jsonl")}
    return [
        Metric("hellaswag", "acc", float(np.mean(right)), 0.0102, True, "mean", values, **items),
        Metric("wikitext", "word_perplexity", word_perplexity, None, False, "weighted_perplexity", pages, **texts),
        Metric("wikitext", "grouped", 0.5, None, None, **texts),
    ]


def comparison(theirs: list[Metric] | None = None, limit: int | None = None) -> Comparison:
    worse = RIGHT.copy()
    worse[:200] = False
    scored = [(MODELS[OURS], scores(worse, 52.1)), (MODELS[GPT2], theirs or scores(RIGHT, 37.3698))]
    return compare(scored, MODELS[GPT2], dataclasses.replace(SETTINGS, limit=limit), METADATA)


def test_rows_hold_values_errors_and_paired_differences() -> None:
    accuracy, perplexity, grouped = comparison().rows
    lost = int(RIGHT[:200].sum())
    assert accuracy.values[GPT2] == Score(float(RIGHT.mean()), 0.0102)
    difference = accuracy.values[OURS].difference
    assert difference.value == pytest.approx(-lost / 2000)
    assert difference.low < difference.value < difference.high < 0 and difference.verdict == "worse"
    assert perplexity.values[OURS].difference.verdict == "worse" and perplexity.values[OURS].stderr is None
    assert grouped.values[OURS].difference == Difference(0.0)


def test_only_the_same_documents_and_tokens_are_paired() -> None:
    theirs = scores(RIGHT, 37.0, documents="other")
    pages = [[value, weight * 1.2] for value, weight in theirs[1].values]  # tokens of another tokenizer
    theirs[1] = dataclasses.replace(theirs[1], value=37.0, values=pages)
    accuracy, perplexity, _ = (row.values[OURS].difference for row in comparison(theirs).rows)
    assert accuracy.value < 0 and perplexity.value == pytest.approx(52.1 - 37.0)
    assert accuracy.stderr is accuracy.verdict is perplexity.stderr is perplexity.verdict is None


def test_json_and_markdown_hold_what_a_reader_needs() -> None:
    result = comparison()
    assert Comparison.from_json(result.to_json()) == result and list(result.task_details) == ["hellaswag", "wikitext"]
    markdown = comparison_markdown(result)
    for part in ("1,024", "float32", "1234", "cuda", "9,890,693,120", "0123456789ab", "0.4.13", "acc 0.02", "52.10"):
        assert part in markdown, part
    smoke_test = comparison(limit=20)
    assert all(row.values[OURS].difference.verdict is None for row in smoke_test.rows)
    assert "--limit 20" in comparison_markdown(smoke_test)


def results(task: str, metrics: dict[str, float | str], aggregation: str | None = None) -> dict:
    aggregated = {"aggregation": aggregation} if aggregation else {}
    metric_list = [{"metric": key.split(",")[0]} | aggregated for key in metrics]
    return {
        "results": {task: {"alias": task, "sample_len": 2} | metrics},
        "configs": {task: {"dataset_path": "Some/data", "metric_list": metric_list}},
        "versions": {task: 1.0},
        "n-samples": {task: {"original": 2, "effective": 2}},
        "higher_is_better": {task: {key.split(",")[0]: True for key in metrics}},
    }


def sample(doc_id: int, answers: list, **metrics: object) -> dict:
    return {"doc_id": doc_id, "doc_hash": f"h{doc_id}", "filter": "none", "filtered_resps": answers} | metrics


def test_documents_are_ordered_and_groups_and_filters_are_named() -> None:
    logged = {"t": [sample(1, [(-2.0, False)], acc=0.0), sample(0, [(-1.0, True)], acc=1.0)]}
    accuracy, f1 = read_scores(results("t", {"acc,none": 0.5, "acc_stderr,none": 0.5, "f1,none": 0.1}), logged, None)
    assert (accuracy.values, accuracy.documents, f1.values) == ([1.0, 0.0], ["h0", "h1"], [])
    (group,) = read_scores(results("g", {"acc,none": 0.25, "acc_stderr,none": "N/A"}), {}, None)
    assert (group.name, group.value, group.stderr, group.values, group.documents) == ("acc", 0.25, None, [], [])
    logged = {"t": [sample(0, ["4"], exact_match=1.0) | {"filter": "strict"}]}
    (metric,) = read_scores(results("t", {"exact_match,strict": 1.0}, "mean"), logged, None)
    assert (metric.name, metric.aggregation, metric.values) == ("exact_match (strict)", "mean", [1.0])


def test_each_filter_of_a_task_has_its_own_documents() -> None:
    """gsm8k is scored with two filters, so each of its documents has two samples."""
    logged: list[dict] = []
    for doc_id, strict, flexible in ((0, 0.0, 1.0), (1, 1.0, 1.0)):
        logged.append(sample(doc_id, ["4"], exact_match=strict) | {"filter": "strict"})
        logged.append(sample(doc_id, ["4"], exact_match=flexible) | {"filter": "flexible"})
    both = results("t", {"exact_match,strict": 0.5, "exact_match,flexible": 1.0}, "mean")
    metrics = read_scores(both, {"t": logged}, None)
    assert [(metric.values, metric.documents) for metric in metrics] == [
        ([0.0, 1.0], ["h0", "h1"]),
        ([1.0, 1.0], ["h0", "h1"]),
    ]
    names = [(metric.name, metric.value) for metric in add_clean(metrics, {"h0"})]
    assert names == [
        ("exact_match (strict)", 0.5),
        ("exact_match (strict) (clean)", 1.0),
        ("exact_match (flexible)", 1.0),
        ("exact_match (flexible) (clean)", 1.0),
    ]


@pytest.mark.parametrize("answer", [(math.nan, False), -math.inf])
def test_scores_that_are_not_finite_are_rejected(answer) -> None:
    logged = {"t": [sample(0, [(-1.0, True)], acc=1.0), sample(7, [answer], acc=0.0)]}
    with pytest.raises(RunFailed, match="document 7"):
        read_scores(results("t", {"acc,none": 0.5}), logged, None)


@pytest.mark.parametrize(
    ("model", "window", "missing", "limit", "published"),
    [
        (GPT2, 1024, 0, None, [0.2892, 37.3698]),
        (GPT2, 512, 0, None, [0.2892, 42.5]),
        (GPT2, 256, 0, None, [0.2892, None]),
        (GPT2, 128, 0, None, [None, None]),
        (GPT2, 1024, 42, None, [None, 37.3698]),  # not for a part of the documents
        (GPT2, 1024, 0, 10_042, [None, None]),
        ("somebody/else", 1024, 0, None, [None, None]),
    ],
)
def test_published_scores_are_next_to_the_measured_ones(
    model: str, window: int, missing: int, limit: int | None, published: list[float | None]
) -> None:
    hellaswag, wikitext, _ = scores(RIGHT, 37.3)
    parts = (hellaswag, missing), (wikitext, 0)
    measured = []
    for metric, part in parts:
        details = TaskDetails(documents=DOCUMENTS[metric.task] - part)
        measured.append(dataclasses.replace(metric, details=details))
    settings = dataclasses.replace(SETTINGS, max_length=window, limit=limit)
    scored = [(MODELS[OURS], measured), (ComparedModel(model, model, 1, None, "a"), measured)]
    result = compare(scored, None, settings, METADATA)
    assert [row.values[model].published for row in result.rows] == published
    assert {row.values[OURS].published for row in result.rows} == {None}
    for row, known, decimals in zip(result.table().rows, published, (4, 2), strict=True):
        assert row[-1].text.endswith(f"(published {known:.{decimals}f})") if known else "(" not in row[-1].text


def test_seeds_are_one_column_and_enter_the_interval() -> None:
    """With equal documents, only the seeds make the interval: Welch's."""
    losses = {"a": (3.30, 3.32, 3.31), "b": (3.36, 3.40)}
    scored, empty = [], Metric("wikitext", "bits_per_byte", None, None, False, "bits_per_byte")
    for setting, of_seeds in losses.items():
        for seed, loss in enumerate(of_seeds):
            metric = empty.over([[-loss * 100, 100]] * 40, [f"p{page}" for page in range(40)])
            scored.append((ComparedModel(f"final (runs/{setting}-seed{seed})", revision=f"{loss}"), [metric]))
    settings = {model.name: model.name.partition("-seed")[0] for model, _ in scored}
    (a, _), (b, _) = joined = join_seeds(scored, settings, {})
    assert (a.name, b.name) == ("final (runs/a-seed0), 3 seeds", "final (runs/b-seed0), 2 seeds")
    (row,) = compare(joined, a, SETTINGS, METADATA).rows
    in_bits = [np.array(of_seeds) / math.log(2) for of_seeds in losses.values()]
    assert row.values[a.name].value == pytest.approx(in_bits[0].mean()) and len(row.values[b.name].seeds) == 2
    difference, welch = row.values[b.name].difference, stats.ttest_ind(*in_bits[::-1], equal_var=False)
    assert (difference.low, difference.high) == pytest.approx(tuple(welch.confidence_interval()), abs=1e-9)
    assert difference.verdict == "inconclusive"  # the difference of 0.1 bits is within the seeds
    (row,) = compare([scored[0], scored[4]], scored[0][0], SETTINGS, METADATA).rows
    assert row.values["final (runs/b-seed1)"].verdict == "worse (one seed)"


def test_other_weights_of_an_equal_seed_are_not_another_seed() -> None:
    """As in the report, the first run of each seed is counted."""
    metric = Metric("wikitext", "bits_per_byte", None, None, False, "bits_per_byte")
    runs = {"a": "1", "b": "1", "c": "2"}
    losses = {"a": 3.0, "b": 5.0, "c": 4.0}
    scored = [
        (ComparedModel(run, revision=run), [metric.over([[-losses[run] * 100, 100]] * 40, ["p"] * 40)]) for run in runs
    ]
    settings = dict.fromkeys(runs, "the same")
    assert join_seeds(scored[:2], settings, runs) == scored[:2]
    (joined, metrics), other = join_seeds(scored, settings, runs)
    assert joined.seeds == ["a", "c"] and other == scored[1]
    assert metrics[0].value == pytest.approx(3.5 / math.log(2))
    markdown = comparison_markdown(
        compare([(dataclasses.replace(joined, parameters=1), metrics)], None, SETTINGS, METADATA)
    )
    for run in joined.seeds:
        assert f"{losses[run] / math.log(2):.4f}" in markdown


@pytest.mark.parametrize("documents", [1, 12, 40])
def test_few_documents_have_a_reason_if_tokenizers_differ(documents: int, tokenizer) -> None:
    """Their windows differ, so that they are compared by document."""
    scored = []
    for name, windows, nats in (("ours", 2, 90.0), ("theirs", 3, 100.0)):
        texts = [sample(n, [Rolling([(-nats / windows - n, 5)] * windows)]) for n in range(documents)]
        for text in texts:
            text["arguments"] = [("the river",)]
            text["bits_per_byte"] = (float(text["filtered_resps"][0]), 40)
        metrics = read_scores(
            results("bits_per_byte_a", {"bits_per_byte,none": 1.0}, "bits_per_byte"),
            {"bits_per_byte_a": texts},
            tokenizer,
        )
        scored.append((ComparedModel(name, revision=name), [dataclasses.replace(metrics[0], higher_is_better=False)]))
    (row,) = compare(scored, scored[1][0], SETTINGS, METADATA).rows
    difference = row.values["ours"].difference
    assert difference.verdict is not None
    assert (f"({documents} of 30)" in difference.verdict) is (documents < 30)
    if documents > 1:
        assert difference.stderr > 0


def test_a_group_has_the_documents_of_its_tasks() -> None:
    right = {"a": [1.0, 0.0, 1.0], "b": [0.0, 0.0, 1.0]}
    whole = results("g", {"acc,none": 0.5, "acc_stderr,none": 0.1})
    del whole["configs"]["g"]
    for task, answers in right.items():
        part = results(task, {"acc,none": sum(answers) / 3}, "mean")
        for key, entries in part.items():
            whole[key] |= entries
    samples = {task: [sample(n, [], acc=one) for n, one in enumerate(answers)] for task, answers in right.items()}
    (group,) = read_scores(whole | {"group_subtasks": {"g": ["a", "b"]}}, samples, None)
    assert (group.task, group.values, group.details.documents) == ("g", right["a"] + right["b"], 6)


def test_a_window_of_a_single_text_has_its_share_of_the_bytes_by_its_tokens(tokenizer) -> None:
    logged = {"bits_per_byte_a": [sample(0, [Rolling([(-4.0, 6), (-6.0, 2)])], bits_per_byte=(-10.0, 32))]}
    logged["bits_per_byte_a"][0]["arguments"] = [("the river",)]
    measured = results("bits_per_byte_a", {"bits_per_byte,none": 10 / 32 / math.log(2)}, "bits_per_byte")
    (metric,) = read_scores(measured, logged, tokenizer)
    assert metric.values == [[-4.0, 24.0], [-6.0, 8.0]] and metric.documents == ["h0 0", "h0 1"]
    assert metric.value == pytest.approx(10 / 32 / math.log(2)) and metric.stderr > 0
