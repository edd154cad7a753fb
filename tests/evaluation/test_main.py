"""evaluate.sh from the command line to comparison.json, on a tiny run."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.__main__ import main
from gpt2_repro.evaluation.arguments import EvaluationArguments, parse_options, with_options
from gpt2_repro.evaluation.provenance import common_window, default_output_dir, trace
from gpt2_repro.evaluation.published import DOCUMENTS, Published
from gpt2_repro.training.checkpoints import seal


ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "plan": {"tokens_per_step": 512, "sequence_length": 64},
    "parameters": 39_168,
    "precision": "fp32",
    "seed": 42,
    "versions": {"torch": "2.13.0"},
    "commit": "0123456789ab",
    "trajectory": {"learning_rate": 1e-2, "init_from": ""},
    "data": {
        "source": {"name": "files", "files": [{"path": "/here/a.jsonl"}]},
        "counts": {"train": {"documents": 6, "tokens": 5000}},
        "request": {"packing": "concat", "separator": "before"},
    },
}
PUBLISHED = Published("last_word", "acc", 0.3, 0.001, "somebody", stderr=0.01)
NUMBERS = {"runs/tiny/final": [PUBLISHED]}


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
    (run / "run_status.json").write_text(json.dumps({"tokens": 9000}))  # the run has continued since
    (run / "environment.json").write_text(json.dumps(ENVIRONMENT))
    seal(run / "final", {}, step=10, tokens=5000, losses={}, environment=ENVIRONMENT)
    seal(run / "checkpoint-3", {}, tokens=1536, trajectory={}, eval_loss=None)
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
    difference = perplexity["difference"]["final (runs/tiny)"]
    assert difference["value"] == pytest.approx(
        perplexity["values"]["final (runs/tiny)"]["value"] - perplexity["values"]["untrained"]["value"]
    )
    assert difference["stderr"] > 0 and difference["verdict"] in ("better", "worse", "inconclusive")
    table = (output / "comparison.md").read_text()
    assert table in capsys.readouterr().out
    assert {path.relative_to(output / "lm_eval").as_posix() for path in (output / "lm_eval").glob("*/*")} == {
        f"{name}/last_word.json" for name in ("checkpoint-3-runs-tiny", "final-runs-tiny", "untrained")
    }
    own = json.loads((output / "lm_eval" / "untrained" / "last_word.json").read_text())
    assert own["results"]["last_word"]["perplexity,none"] == perplexity["values"]["untrained"]["value"]
    assert not list(output.glob(".*")), "nothing half-written is left"
    card = (tiny_run / "final" / "README.md").read_text()
    results = yaml.safe_load(card.split("---")[1])["model-index"][0]["results"]
    assert [metric["type"] for metric in results[0]["metrics"]] == ["perplexity", "acc"]
    assert "| last_word | perplexity ↓ |" in card and "/here" not in card


def evaluations(monkeypatch) -> list[str]:
    """The tasks that are really scored from now on."""
    from gpt2_repro.evaluation import scoring

    scored: list[str] = []
    original = scoring.evaluate_model
    monkeypatch.setattr(
        scoring,
        "evaluate_model",
        lambda model, tokenizer, task, *rest: scored.append(task) or original(model, tokenizer, task, *rest),
    )
    return scored


def test_what_is_scored_is_not_scored_again_unless_it_could_differ(tiny_run, monkeypatch, caplog):
    scored = evaluations(monkeypatch)
    words = "runs/tiny --local_data data/tiny --device cpu --tasks last_word document_perplexity --output_dir out"
    main(words.split())
    first = Path("out/comparison.json").read_text()
    assert scored == ["last_word", "document_perplexity"] * 2
    main(words.split())
    assert (
        len(scored) == 4 and json.loads(first)["rows"] == json.loads(Path("out/comparison.json").read_text())["rows"]
    )
    main([*words.split(), "--limit", "3"])
    main([*words.split(), "--max_length", "32"])
    assert len(scored) == 12
    main([*words.split(), "--no_cache"])
    assert len(scored) == 16
    lines = Path("data/tiny/text/validation.jsonl").read_text().splitlines()
    Path("data/tiny/text/validation.jsonl").write_text("\n".join(lines[1:]))
    main(words.split())
    assert scored[16:] == ["document_perplexity"] * 2, "the first document is too short for a passage"
    monkeypatch.setattr("gpt2_repro.evaluation.cache.version", lambda _: "0.4.99")
    assert "was scored by lm_eval" not in caplog.text
    main(words.split())
    assert len(scored) == 22
    assert "scored again, for here it is 0.4.99" in caplog.text


def test_two_evaluations_of_one_run_score_their_own_data(tiny_run, monkeypatch):
    """B starts while A is at its first task: A once reported B's numbers and cached them under A's hash."""
    from gpt2_repro.evaluation import scoring

    shutil.copytree("data/tiny", "data/other")
    lines = Path("data/other/text/validation.jsonl").read_text().splitlines()
    Path("data/other/text/validation.jsonl").write_text("\n".join(lines[:4]))
    words = "runs/tiny --device cpu --baseline none --tasks document_perplexity"
    main([*words.split(), "--local_data", "data/tiny", "--no_cache", "--output_dir", "alone"])
    alone = json.loads(Path("alone/comparison.json").read_text())["rows"]
    original = scoring.evaluate_model

    def interrupted(*args, **rest):
        monkeypatch.setattr(scoring, "evaluate_model", original)
        main([*words.split(), "last_word", "--local_data", "data/other"])
        return original(*args, **rest)

    monkeypatch.setattr(scoring, "evaluate_model", interrupted)
    main([*words.split(), "--local_data", "data/tiny"])
    assert json.loads((tiny_run / "evaluation/comparison.json").read_text())["rows"] == alone
    main([*words.split(), "--local_data", "data/tiny"])
    assert json.loads((tiny_run / "evaluation/comparison.json").read_text())["rows"] == alone, (
        "the cache has A's scores"
    )


def test_changed_data_with_the_same_mtime_is_scored_anew(tiny_run):
    data = Path("data/tiny/text/validation.jsonl")
    words = "runs/tiny --device cpu --baseline none --tasks wikitext --local_data data/tiny --output_dir out"
    pages = [{"page": json.loads(line)["text"]} for line in data.read_text().splitlines()]
    rows = []
    for chosen in (pages, pages[::-1][1:]):
        Path("data/tiny/wikitext.jsonl").write_text("\n".join(map(json.dumps, chosen)))
        os.utime("data/tiny/wikitext.jsonl", (1, 1))
        main(words.split())
        rows.append(json.loads(Path("out/comparison.json").read_text())["rows"][0]["values"]["final (runs/tiny)"])
    main([*words.split(), "--no_cache"])
    assert rows[0] != rows[1]
    details = json.loads(Path("out/comparison.json").read_text())["task_details"]["wikitext"]
    assert (details["data"], details["version"]) == ("data/tiny/wikitext.jsonl", 2.0)
    assert rows[1] == json.loads(Path("out/comparison.json").read_text())["rows"][0]["values"]["final (runs/tiny)"]


@pytest.mark.parametrize("name", ["tasks/mine.yaml", "comparison.md", "comparison.json"])
def test_files_of_others_in_the_output_folder_stay(tiny_run, name):
    Path("out/tasks").mkdir(parents=True)
    Path("out", name).write_text("[1]")
    words = "runs/tiny --device cpu --baseline none --local_data data/tiny --limit 1 --output_dir out"
    if name.startswith("comparison"):
        with pytest.raises(UserError, match=name):
            main(words.split())
    else:
        main(words.split())
    assert Path("out", name).read_text() == "[1]"


@pytest.mark.parametrize("content", [b"", b"\0" * 50, b"[1]"])
def test_a_damaged_entry_of_the_cache_is_scored_again(tiny_run, monkeypatch, content):
    words = ["runs/tiny", "--device", "cpu", "--baseline", "none", "--local_data", "data/tiny", "--output_dir", "out"]
    main(words)
    (entry,) = Path(".cache/evaluation").glob("*.json")
    entry.write_bytes(content)
    scored = evaluations(monkeypatch)
    main(words)
    assert scored == ["last_word"]


def test_a_second_start_goes_on_where_the_first_was_ended(tiny_run, monkeypatch):
    from gpt2_repro.evaluation import scoring

    words = "runs/tiny --local_data data/tiny --device cpu --tasks last_word document_perplexity --baseline none"
    original = scoring.evaluate_model

    def dies(model, tokenizer, task, *rest):
        if task == "document_perplexity":
            raise KeyboardInterrupt
        return original(model, tokenizer, task, *rest)

    monkeypatch.setattr(scoring, "evaluate_model", dies)
    with pytest.raises(KeyboardInterrupt):
        main(words.split())
    assert not (tiny_run / "evaluation" / "comparison.json").exists()
    monkeypatch.setattr(scoring, "evaluate_model", original)
    scored = evaluations(monkeypatch)
    main(words.split())
    assert scored == ["document_perplexity"]


def test_all_checkpoints_are_a_trend(tiny_run, model, tokenizer):
    for step in (6, 12, 24):
        folder = tiny_run / f"checkpoint-{step}"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if step < 24:  # the last one is not complete
            seal(folder, {}, tokens=512 * step, trajectory={}, eval_loss=None)
    main(["runs/tiny", "--all_checkpoints", "--local_data", "data/tiny", "--device", "cpu"])
    comparison = json.loads((tiny_run / "evaluation" / "comparison.json").read_text())
    assert [m["tokens_trained"] for m in comparison["models"]] == [1536, 3072, 6144, 5000, 0]
    assert (
        "| model | tokens trained | last_word perplexity ↓ |"
        in (tiny_run / "evaluation" / "comparison.md").read_text()
    )
    with pytest.raises(UserError, match="--all_checkpoints: data is no run with checkpoints"):
        main(["data", "--all_checkpoints"])


def test_published_numbers_stand_in_for_gpt2_where_it_cannot_be_loaded(tiny_run, monkeypatch):
    monkeypatch.setattr("gpt2_repro.evaluation.published.numbers_of", lambda *_: [PUBLISHED])
    main(["runs/tiny", "--local_data", "data/tiny", "--device", "cpu", "--baseline", "openai-community/gpt2"])
    comparison = json.loads((tiny_run / "evaluation" / "comparison.json").read_text())
    assert comparison["baseline"] == "openai-community/gpt2 (published)"
    accuracy = next(row for row in comparison["rows"] if row["metric"] == "acc")
    assert accuracy["values"]["openai-community/gpt2 (published)"] == {"value": 0.3, "stderr": 0.01}
    difference = accuracy["difference"]["final (runs/tiny)"]
    assert difference["stderr"] is None and difference["verdict"] is None
    table = (tiny_run / "evaluation" / "comparison.md").read_text()
    assert "openai-community/gpt2 (published): not measured here, published by somebody" in table


def test_without_a_published_number_there_is_no_baseline(tiny_run, caplog):
    main(["runs/tiny", "--local_data", "data/tiny", "--device", "cpu", "--baseline", "openai-community/gpt2"])
    comparison = json.loads((tiny_run / "evaluation" / "comparison.json").read_text())
    assert comparison["baseline"] is None and len(comparison["models"]) == 1
    assert "nothing is published of openai-community/gpt2 for these documents" in caplog.text


def test_published_numbers_do_not_stand_beside_scores_of_other_documents(tiny_run, monkeypatch):
    monkeypatch.setattr("gpt2_repro.evaluation.published.numbers_of", lambda *_: [PUBLISHED])
    monkeypatch.setitem(DOCUMENTS, "last_word", 5153)
    main(["runs/tiny", "--local_data", "data/tiny", "--device", "cpu", "--baseline", "openai-community/gpt2"])
    comparison = json.loads((tiny_run / "evaluation" / "comparison.json").read_text())
    assert comparison["baseline"] is None and len(comparison["models"]) == 1


def test_a_smoke_test_leaves_results_alone(tiny_run):
    words = ["runs/tiny", "--local_data", "data/tiny", "--device", "cpu"]
    main(words)
    before = (tiny_run / "evaluation" / "comparison.json").read_text()
    main([*words, "--limit", "3"])
    assert (tiny_run / "evaluation" / "comparison.json").read_text() == before
    assert "smoke test" in (tiny_run / "evaluation" / "smoke_test" / "comparison.md").read_text()


def test_a_known_model_that_scores_otherwise_is_a_broken_setup(tiny_run, monkeypatch, caplog):
    monkeypatch.setattr("gpt2_repro.evaluation.published.NUMBERS", {"runs/tiny/final": (PUBLISHED,)})
    monkeypatch.setattr("gpt2_repro.evaluation.published.numbers_of", lambda model, _: NUMBERS.get(model, []))
    words = "runs/tiny --local_data data/tiny --device cpu --baseline none --output_dir out"
    main(words.split())
    line = "BROKEN SETUP: runs/tiny/final has last_word acc"
    assert Path("out/comparison.md").read_text().startswith(f"**{line}") and line in caplog.text
    assert "0.3000 ± 0.001 is known (somebody)" in Path("out/comparison.md").read_text()
    main([*words.split(), "--limit", "2"])
    assert "BROKEN" not in Path("out/comparison.md").read_text()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("nan", "weights that are no numbers, in transformer"),
        ("keys", "missing keys"),
        ("tokenizer", "the tokenizer of broken has 301 tokens and its model 300"),
        ("pickle", "cannot load broken"),
        ("remote", "cannot load broken"),
        ("nothing", "broken is no checkpoint"),
    ],
)
def test_a_folder_that_is_no_sound_model_is_refused(tiny_run, tokenizer, damage, words):
    broken = Path("broken")
    shutil.copytree(tiny_run / "final", broken)
    weights = load_file(broken / "model.safetensors")
    if damage == "nan":
        next(iter(weights.values())).view(-1)[3] = float("nan")
    elif damage == "keys":
        weights = {f"_orig_mod.{name}": weight for name, weight in weights.items()}
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    if damage == "tokenizer":
        other = copy.deepcopy(tokenizer)
        other.add_tokens(["<one more>"])
        other.save_pretrained(broken)
    if damage == "pickle":
        torch.save(weights, broken / "pytorch_model.bin")
        (broken / "model.safetensors").unlink()
    if damage == "remote":
        config = json.loads((broken / "config.json").read_text())
        config |= {"model_type": "strange", "auto_map": {"AutoConfig": "evil.Config"}}
        (broken / "config.json").write_text(json.dumps(config))
        (broken / "evil.py").write_text("open('ran', 'w')")
    if damage == "nothing":
        (broken / "config.json").unlink()
    with pytest.raises(UserError) as refused:
        main(["broken", "--local_data", "data/tiny", "--device", "cpu", "--tasks", "last_word", "--baseline", "none"])
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert not Path("ran").exists() and not Path("evaluations").exists()


def test_the_command_line_wins_over_the_recipe(tiny_run):
    command = "runs/tiny --local_data data/tiny --tasks document_perplexity --baseline none --max_length 32 --limit 2"
    main([*command.split(), "--output_dir", "out", "--device", "cpu"])
    comparison = json.loads(Path("out/comparison.json").read_text())
    assert comparison["tasks"] == ["document_perplexity"]
    assert (comparison["max_length"], comparison["limit"], comparison["baseline"]) == (32, 2, None)
    assert comparison["task_details"]["document_perplexity"]["documents"] == 2
    assert comparison["task_details"]["document_perplexity"]["data"] == "data/tiny/text/validation.jsonl"
    assert "not benchmark numbers" in Path("out/comparison.md").read_text()


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


def test_several_processes_do_not_start_for_data_that_is_out_of_reach(tiny_run, monkeypatch):
    """Really offline: what is loaded once before the launch, and what is not in any cache."""
    monkeypatch.setattr("gpt2_repro.evaluation.scoring.count_processes", lambda _: 2)
    monkeypatch.setattr("gpt2_repro.evaluation.scoring.evaluate_launched", lambda *_, **__: pytest.fail("launched"))
    with pytest.raises(UserError, match="EleutherAI/lambada_openai.*--local_data DIR") as refused:
        main(["runs/tiny", "--tasks", "lambada_openai", "--device", "cpu", "--baseline", "none"])
    assert "\n" not in str(refused.value)


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
    positions = {"a": 1024, "b": 1024}
    assert common_window(1024, {"a": 1024, "b": 2048}, positions, insist=False) == 1024
    assert common_window(1024, {"a": 1024, "b": 512}, positions, insist=False) == 512
    assert "window 512 tokens in place of 1024: b was trained on no more" in caplog.text
    assert common_window(1024, {"a": 1024, "b": 512}, positions, insist=True) == 1024
    assert "b was trained on 512, its later positions are random" in caplog.text
    assert common_window(1024, {"a": 1024, "b": 512}, positions | {"b": 512}, insist=True) == 512


def test_a_model_without_a_run_keeps_its_name():
    known = trace("openai-community/gpt2")
    assert (known.name, known.run, known.tokens_trained) == ("openai-community/gpt2", None, None)
    assert known.window(1024) == 1024
    assert default_output_dir(known) == Path("evaluations/openai-community-gpt2")
