"""Scores are read from lm-eval's output. NaN and infinite scores are rejected."""

import math

import pytest

from gpt2_repro.errors import RunFailed
from gpt2_repro.evaluation import compare
from gpt2_repro.evaluation.scores import Metric, TaskScores, read_scores


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


def test_values_stand_in_the_order_of_the_documents() -> None:
    logged = {"t": [sample(1, [(-2.0, False)], acc=0.0), sample(0, [(-1.0, True)], acc=1.0)]}
    (task,) = read_scores(results("t", {"acc,none": 0.5, "acc_stderr,none": 0.5, "f1,none": 0.1}), logged, None)
    assert task.documents == ["h0", "h1"] and (task.version, task.data, task.num_documents) == (1.0, "Some/data", 2)
    accuracy, f1 = task.metrics
    assert accuracy == Metric("acc", 0.5, 0.5, True, "mean", [1.0, 0.0])
    assert f1.aggregation is None and f1.values == []


def test_groups_have_no_values_and_other_filters_are_named() -> None:
    (group,) = read_scores(results("g", {"acc,none": 0.25, "acc_stderr,none": "N/A"}), {}, None)
    assert group.metrics == [Metric("acc", 0.25, None, True)] and group.documents == []
    logged = {"t": [sample(0, ["4"], exact_match=1.0) | {"filter": "strict"}]}
    (task,) = read_scores(results("t", {"exact_match,strict": 1.0}, "mean"), logged, None)
    assert task.metrics == [Metric("exact_match (strict)", 1.0, None, True, "mean", [1.0])]


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("wrap", [lambda number: [(number, False)], lambda number: [number]])
def test_scores_that_are_not_finite_are_rejected(bad: float, wrap) -> None:
    logged = {"t": [sample(0, [(-1.0, True)], acc=1.0), sample(7, wrap(bad), acc=0.0)]}
    with pytest.raises(RunFailed, match="t: document 7 has the log-probability"):
        read_scores(results("t", {"acc,none": 0.5}), logged, None)


def test_published_numbers_check_what_is_measured() -> None:
    def measured(task: str, metric: str, value: float, part: int = 0) -> list[TaskScores]:
        documents = compare.DOCUMENTS[task] - part
        return [TaskScores(task, 1.0, "d", [], documents, [Metric(metric, value, None, True)])]

    gpt2 = "openai-community/gpt2"
    for model, window, scores, broken in (
        (gpt2, 1024, measured("hellaswag", "acc", 0.2892), False),
        (gpt2, 1024, measured("hellaswag", "acc", 0.2504), True),
        (gpt2, 1024, measured("hellaswag", "acc", 0.2504, part=42), False),  # not for a part of the documents
        (gpt2, 512, measured("wikitext", "word_perplexity", 42.5), False),
        (gpt2, 1024, measured("wikitext", "word_perplexity", 42.5), True),
        ("somebody/else", 1024, measured("hellaswag", "acc", 0.5), False),
    ):
        assert len(lines := compare.find_deviations(model, window, scores)) == broken, (model, window, scores)
        assert all(model in line for line in lines)


def test_published_numbers_replace_a_missing_baseline() -> None:
    def scored(*tasks: str) -> list[TaskScores]:
        return [TaskScores(task, 1.0, "d", [], compare.DOCUMENTS[task], []) for task in tasks]

    gpt2 = "openai-community/gpt2"
    _, tasks = compare.published_baseline(gpt2, 1024, scored("lambada_openai", "wikitext"))
    assert {(task.task, its.name): its.value for task in tasks for its in task.metrics} == {
        **{("lambada_openai", "perplexity"): 40.0554, ("lambada_openai", "acc"): 0.3256},
        **{("wikitext", "word_perplexity"): 37.3698, ("wikitext", "bits_per_byte"): 0.9769},
    }
    assert compare.published_baseline(gpt2, 512, scored("wikitext"))[0].published_by == [compare.BLOG]
