"""evaluate.sh from the command line to comparison.json, on a tiny run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.__main__ import main
from gpt2_repro.evaluation.arguments import EvaluationArguments, parse_options, with_options
from gpt2_repro.evaluation.provenance import common_window, default_output_dir, trace


ROOT = Path(__file__).parents[2]


@pytest.fixture
def tiny_run(model, tokenizer, documents, tmp_path, monkeypatch) -> Path:
    """runs/tiny with final/ and checkpoint-3/, and data/tiny with the validation documents, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    run = Path("runs/tiny")
    for name in ("final", "checkpoint-3"):
        model.save_pretrained(run / name)
        tokenizer.save_pretrained(run / name)
    section = {"tasks": ["last_word"], "baseline": "untrained", "max_length": 100}
    (run / "recipe.yaml").write_text(yaml.safe_dump({"data": {"sequence_length": 64}, "evaluation": section}))
    (run / "run_status.json").write_text(json.dumps({"tokens": 5000}))
    (run / "environment.json").write_text(json.dumps({"plan": {"tokens_per_step": 512}}))
    (run / "checkpoint-3" / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    Path("data/tiny/text").mkdir(parents=True)
    lines = [json.dumps({"text": document}) for document in documents]
    Path("data/tiny/text/validation.jsonl").write_text("\n".join(lines))
    return run


def test_run_and_checkpoint_beside_an_untrained_model(tiny_run, capsys):
    main(["runs/tiny", "runs/tiny/checkpoint-3", "--local_data", "data/tiny", "--device", "cpu"])

    output = tiny_run / "evaluation"
    comparison = json.loads((output / "comparison.json").read_text())
    assert [(m["name"], m["tokens_trained"]) for m in comparison["models"]] == [
        ("final (runs/tiny)", 5000),
        ("checkpoint-3 (runs/tiny)", 1536),
        ("untrained", 0),
    ]
    assert comparison["baseline"] == "untrained"
    assert comparison["max_length"] == 64, "the run's sequences are shorter than the recipe's window"
    assert [row["metric"] for row in comparison["rows"]] == ["perplexity", "acc"]
    perplexity = comparison["rows"][0]
    assert perplexity["values"]["final (runs/tiny)"] == perplexity["values"]["checkpoint-3 (runs/tiny)"]
    assert perplexity["difference"]["final (runs/tiny)"] == pytest.approx(
        perplexity["values"]["final (runs/tiny)"]["value"] - perplexity["values"]["untrained"]["value"]
    )
    table = (output / "comparison.md").read_text()
    assert table in capsys.readouterr().out
    own_files = sorted(path.name for path in (output / "lm_eval").iterdir())
    assert own_files == ["checkpoint-3-runs-tiny.json", "final-runs-tiny.json", "untrained.json"]
    assert not list(output.glob(".*")), "nothing half-written is left"


def test_the_command_line_wins_over_the_recipe(tiny_run):
    command = "runs/tiny --local_data data/tiny --tasks document_perplexity --baseline none --max_length 32 --limit 2"
    main([*command.split(), "--output_dir", "out", "--device", "cpu"])
    comparison = json.loads(Path("out/comparison.json").read_text())
    assert comparison["tasks"] == ["document_perplexity"]
    assert (comparison["max_length"], comparison["limit"], comparison["baseline"]) == (32, 2, None)
    assert comparison["task_details"]["document_perplexity"]["documents"] == 2
    assert comparison["task_details"]["document_perplexity"]["data"] == "data/tiny/text/validation.jsonl"
    assert "Not benchmark numbers" in Path("out/comparison.md").read_text()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "no checkpoint is named"),
        ("runs/tiny --task last_word", "there is no option --task: did you mean '--tasks'"),
        ("runs/tiny --limit 0", "--limit: 0 must be at least 1"),
        ("runs/tinny", "runs/tinny"),
        ("runs/tiny --tasks last_wrod", "did you mean 'last_word'"),
        ("runs/tiny", "--local_data DIR"),
        ("runs/tiny --local_data data/none", "data/none is no folder"),
        ("runs/tiny --local_data data", "holds no data for last_word"),
        ("runs/tiny --local_data data/tiny --device nvidia", "--device nvidia does not work"),
        ("runs/tiny --local_data data/tiny --device cpu --baseline ./gone", "./gone"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(command, words, tiny_run):
    with pytest.raises(UserError) as refused:
        main(command.split())
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert not (tiny_run / "evaluation").exists()


def test_baseline_that_cannot_be_loaded_can_be_left_out(tiny_run):
    broken = Path("broken")
    broken.mkdir()
    (broken / "config.json").write_text((tiny_run / "final" / "config.json").read_text())
    with pytest.raises(UserError, match="--baseline none leaves it out"):
        main(["runs/tiny", "--local_data", "data/tiny", "--device", "cpu", "--baseline", "broken"])


def test_task_data_out_of_reach_names_local_data(tiny_run, monkeypatch):
    def unreachable(**_):
        raise ConnectionError("Couldn't reach 'EleutherAI/lambada_openai' on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr("lm_eval.simple_evaluate", unreachable, raising=False)
    with pytest.raises(UserError, match="lambada_openai.*--local_data DIR"):
        main(["runs/tiny", "--local_data", "data/tiny", "--device", "cpu"])


def test_evaluate_sh_ends_a_mistake_with_one_line_and_code_2(tmp_path):
    result = subprocess.run(
        ["bash", str(ROOT / "evaluate.sh"), "runs/x", "--lmit", "3"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr == "error: there is no option --lmit: did you mean '--limit'?\n"


def test_options_replace_the_section():
    options = parse_options(["x", "--tasks", "a,b", "c", "a", "--max_length", "7"], description=None)
    settings = with_options(EvaluationArguments(baseline="none"), options)
    assert settings == EvaluationArguments(tasks=["a", "b", "c"], baseline="none", max_length=7)


def test_window_is_what_every_model_was_trained_on(caplog):
    assert common_window(1024, {"a": 1024, "b": 2048}) == 1024
    assert common_window(1024, {"a": 1024, "b": 256}) == 256
    assert "b was trained on no more" in caplog.text


def test_a_model_without_a_run_keeps_its_name():
    known = trace("openai-community/gpt2")
    assert (known.name, known.run, known.tokens_trained) == ("openai-community/gpt2", None, None)
    assert known.window(1024) == 1024
    assert default_output_dir(known) == Path("evaluations/gpt2")
