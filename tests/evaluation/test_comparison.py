"""The table from two recorded results of the harness, against numbers worked out by hand."""

import json

import pytest

from gpt2_repro.evaluation.comparison import ComparedModel, compare
from gpt2_repro.evaluation.table import to_markdown


def recorded(acc: float, perplexity: float, word_perplexity: float) -> dict:
    """Results as lm-evaluation-harness 0.4.13 returns them, shortened."""
    return {
        "results": {
            "lambada_openai": {
                "name": "lambada_openai",
                "alias": "lambada_openai",
                "sample_len": 5153,
                "perplexity,none": perplexity,
                "perplexity_stderr,none": 1.4787,
                "acc,none": acc,
                "acc_stderr,none": 0.0065,
            },
            "wikitext": {
                "alias": "wikitext",
                "sample_len": 62,
                "word_perplexity,none": word_perplexity,
                "word_perplexity_stderr,none": "N/A",
            },
        },
        "configs": {
            "lambada_openai": {"dataset_path": "EleutherAI/lambada_openai"},
            "wikitext": {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "/d/pages.jsonl"}}},
        },
        "versions": {"lambada_openai": 1.0, "wikitext": 2.0},
        "n-samples": {
            "lambada_openai": {"original": 5153, "effective": 5153},
            "wikitext": {"original": 62, "effective": 62},
        },
        "higher_is_better": {
            "lambada_openai": {"perplexity": False, "acc": True},
            "wikitext": {"word_perplexity": False},
        },
    }


def comparison(baseline: str | None = "openai-community/gpt2", limit: int | None = None, **ours) -> dict:
    names = ("final (runs/demo)", "openai-community/gpt2")
    numbers = {"acc": 0.25, "perplexity": 1234.5, "word_perplexity": 52.1} | ours
    return compare(
        {names[0]: recorded(**numbers), names[1]: recorded(0.3256, 40.0554, 37.3698)},
        baseline,
        models=[
            ComparedModel(names[0], "runs/demo/final", 3_538_944, 9_890_693_120),
            ComparedModel(names[1], names[1], 124_439_808, None),
        ],
        date="2026-12-01T00:00:00+00:00",
        command="bash evaluate.sh runs/demo",
        max_length=1024,
        limit=limit,
        versions={"lm_eval": "0.4.13"},
    )


def test_rows_hold_metrics_errors_and_differences():
    rows = comparison()["rows"]
    assert [(row["task"], row["metric"], row["higher_is_better"]) for row in rows] == [
        ("lambada_openai", "perplexity", False),
        ("lambada_openai", "acc", True),
        ("wikitext", "word_perplexity", False),
    ]
    assert rows[1]["values"] == {
        "final (runs/demo)": {"value": 0.25, "stderr": 0.0065},
        "openai-community/gpt2": {"value": 0.3256, "stderr": 0.0065},
    }
    assert rows[1]["difference"] == {"final (runs/demo)": pytest.approx(-0.0756)}
    assert rows[2]["values"]["openai-community/gpt2"] == {"value": 37.3698, "stderr": None}
    assert rows[2]["difference"] == {"final (runs/demo)": pytest.approx(14.7302)}


def test_comparison_records_what_was_run():
    result = comparison()
    assert result["tasks"] == ["lambada_openai", "wikitext"]
    assert result["task_details"]["wikitext"] == {"version": 2.0, "documents": 62, "data": "/d/pages.jsonl"}
    assert result["task_details"]["lambada_openai"]["data"] == "EleutherAI/lambada_openai"
    assert result["models"][0]["tokens_trained"] == 9_890_693_120
    assert (result["dtype"], result["max_length"], result["limit"]) == ("float32", 1024, None)


def test_markdown_is_the_known_table():
    lines = to_markdown(comparison()).splitlines()
    assert lines[:5] == [
        "| task | metric | final (runs/demo) | openai-community/gpt2 | final (runs/demo) − openai-community/gpt2 |",
        "| --- | --- | ---: | ---: | ---: |",
        "| lambada_openai | perplexity ↓ | 1,234.50 ± 1.48 | 40.06 ± 1.48 | +1,194.44 |",
        "| lambada_openai | acc ↑ | 0.2500 ± 0.0065 | 0.3256 ± 0.0065 | −0.0756 |",
        "| wikitext | word_perplexity ↓ | 52.10 | 37.37 | +14.73 |",
    ]
    notes = "\n".join(lines[5:])
    for part in (
        "1,024 tokens, float32",
        "9,890,693,120 tokens trained",
        "tokens trained not known",
        "version 2.0, 62 documents of /d/pages.jsonl",
        "lm_eval 0.4.13",
        "`bash evaluate.sh runs/demo`",
        "One seed is one checkpoint",
    ):
        assert part in notes
    assert "benchmark" not in notes


def test_limit_is_loud():
    lines = to_markdown(comparison(limit=20)).splitlines()
    assert "Not benchmark numbers: --limit 20" in lines[0]
    assert lines[0] in lines[1:], "it stands above and below the table"


def test_without_baseline_there_is_no_difference():
    result = comparison(baseline=None)
    assert all(row["difference"] == {} for row in result["rows"])
    assert to_markdown(result).splitlines()[0] == "| task | metric | final (runs/demo) | openai-community/gpt2 |"


def test_values_that_json_cannot_hold_are_null():
    result = comparison(perplexity=float("inf"), acc=float("nan"))
    assert result["rows"][0]["values"]["final (runs/demo)"]["value"] is None
    assert result["rows"][1]["difference"] == {}
    assert "| lambada_openai | acc ↑ | - |" in to_markdown(result)
    json.dumps(result, allow_nan=False)
