"""Tests of evaluate.sh on a tiny run, from the command line to comparison.json."""

import copy
import gzip
import json
import math
import os
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from gpt2_repro.checkpoints.manifest import seal
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation import harness
from gpt2_repro.evaluation.__main__ import main
from tests.evaluation.conftest import write_rows


NAME = "final (runs/tiny)"


def save(folder: Path, model, tokenizer, tokens: int, **record) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    seal(folder, {}, tokens=tokens, **record)


@pytest.fixture
def tiny_run(model, tokenizer, prose, tmp_path, monkeypatch) -> Path:
    """Return a run directory with final/ and checkpoint-3/.

    The task data for the run is in data/tiny, outside of the run directory.
    """
    monkeypatch.chdir(tmp_path)
    run = Path("runs/tiny")
    save(run / "final", model, tokenizer, 5000, losses={}, environment={"run_identity": {"seed": 42}})
    save(run / "checkpoint-3", model, tokenizer, 1536, run_identity={})
    section = {"tasks": ["last_word"], "baseline": "untrained", "max_length": 100}
    recipe = {"data": {"sequence_length": 64}, "evaluation": section}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    (run / "run_status.json").write_text(json.dumps({"tokens": 9000}), encoding="utf-8")  # the run has continued since
    (run / "environment.json").write_text(json.dumps({"seed": 42}), encoding="utf-8")
    write_rows(Path("data/tiny/text/validation.jsonl"), ({"text": document} for document in prose))
    return run


def run_main(words: str) -> dict:
    """Run evaluate.sh on runs/tiny and return comparison.json."""
    main(f"runs/tiny --device cpu --output_dir out {words}".split())
    return json.loads(Path("out/comparison.json").read_text(encoding="utf-8"))


def evaluate(words: str = "--baseline none") -> dict:
    return run_main(f"--local_data data/tiny --tasks document_perplexity --device cpu {words}")


def test_run_and_checkpoint_compared_with_an_untrained_model(tiny_run, capfd):
    words = ["runs/tiny", "runs/tiny/checkpoint-3", "--local_data", "data/tiny", "--device", "cpu"]
    main(words)
    output = tiny_run / "evaluation"
    text, table = ((output / f"comparison.{kind}").read_text(encoding="utf-8") for kind in ("json", "md"))
    comparison = json.loads(text)
    trained = {model["name"]: model["tokens_trained"] for model in comparison["models"]}
    assert trained == {NAME: 5000, "checkpoint-3 (runs/tiny)": 1536, "untrained": 0}
    assert comparison["baseline"] == "untrained"
    assert comparison["max_length"] == 64, "the run's sequences are shorter than the recipe's window"
    perplexity, accuracy = comparison["rows"]
    assert (perplexity["metric"], accuracy["metric"]) == ("perplexity", "acc")
    ours, checkpoint, untrained = perplexity["values"].values()
    difference = ours["difference"]
    assert ours == checkpoint and difference["value"] == pytest.approx(ours["value"] - untrained["value"])
    assert difference["stderr"] > 0 and "(20 of 30)" in difference["verdict"]
    printed = capfd.readouterr()
    assert table in printed.out and "git" not in printed.err
    own = json.loads((output / "lm_eval" / "untrained" / "last_word.json").read_text(encoding="utf-8"))
    assert own["results"]["last_word"]["perplexity,none"] == untrained["value"]
    assert not list(output.glob(".*")), "no partly written files remain"

    main([*words, "--limit", "3"])
    assert (output / "comparison.json").read_text(encoding="utf-8") == text, "a smoke test does not change the results"
    assert (output / "smoke_test" / "comparison.md").is_file()


def test_a_score_is_computed_again_only_if_it_could_differ(tiny_run, caplog):
    def scored(words: str = "") -> list[dict]:
        caplog.clear()
        rows = evaluate(f"--baseline none {words}")["rows"]
        return [rows, sum("scoring on" in line for line in caplog.messages)]

    caplog.set_level("INFO")
    path = Path("data/tiny/text/validation.jsonl")
    os.utime(path, (1, 1))
    first, _ = scored()
    assert scored() == [first, 0] and scored("--limit 3")[1] == scored("--no_cache")[1] == 1
    for cached in Path(".cache/evaluation").glob("*.json"):
        cached.write_bytes(b"\0" * 50)
    assert scored() == [first, 1]
    path.write_text("\n".join(path.read_text(encoding="utf-8").splitlines()[1:]), encoding="utf-8")
    os.utime(path, (1, 1))  # `datasets` caches by path and modification time
    changed, count = scored()
    assert changed != first and count == 1 and scored("--no_cache")[0] == changed


@pytest.mark.parametrize("change", ["no roles", "another bos", "a bos before each text"])
def test_a_change_of_the_tokenizers_roles_is_scored_again(change: str, tiny_run, tokenizer) -> None:
    def scores(words: str) -> list[object]:
        return [row["values"] for row in evaluate(f"--baseline none {words}")["rows"]]

    roles = tiny_run / "final" / "tokenizer_config.json"
    before = scores("")
    config = json.loads(roles.read_text(encoding="utf-8"))
    if change == "no roles":
        config = {key: value for key, value in config.items() if key not in ("bos_token", "eos_token")}
    elif change == "another bos":
        config["bos_token"] = "A"
    else:
        end, files = tokenizer.eos_token, tiny_run / "final" / "tokenizer.json"
        described = Tokenizer.from_file(str(files))
        described.post_processor = TemplateProcessing(
            single=f"{end} $A", special_tokens=[(end, tokenizer.eos_token_id)]
        )
        described.save(str(files))
    roles.write_text(json.dumps(config), encoding="utf-8")
    after = scores("--no_cache")
    assert (after == before) is (change == "a bos before each text"), "rows never have the tokens of a post-processor"
    assert scores("") == after


def test_a_score_of_another_library_is_computed_again(tiny_run, monkeypatch, caplog) -> None:
    caplog.set_level("INFO")
    evaluate()
    monkeypatch.setattr(harness, "version", lambda name: "0.0" if name == "transformers" else version(name))
    caplog.clear()
    evaluate()
    assert sum("scoring on" in line for line in caplog.messages) == 1


def test_two_evaluations_of_one_run_score_their_own_data(tiny_run, monkeypatch):
    """If two evaluations of one run overlap, each evaluation uses the right task data."""
    shutil.copytree("data/tiny", "data/other")
    path = Path("data/other/text/validation.jsonl")
    path.write_text("\n".join(path.read_text(encoding="utf-8").splitlines()[:4]), encoding="utf-8")
    alone, original = evaluate("--baseline none --no_cache")["rows"], harness.score_task

    def interrupted(*args):
        monkeypatch.setattr(harness, "score_task", original)
        evaluate("--baseline none --local_data data/other")
        return original(*args)

    monkeypatch.setattr(harness, "score_task", interrupted)
    # An earlier version reported the scores of the second evaluation, and cached them for the first.
    assert evaluate()["rows"] == evaluate()["rows"] == alone


def test_a_comparison_of_another_program_is_kept(tiny_run):
    Path("out").mkdir()
    for name in ("comparison.md", "comparison.json", "comparison.csv", "comparison.tex"):
        Path("out", name).write_text("[1]", encoding="utf-8")
        with pytest.raises(UserError, match=name):
            evaluate()
        assert Path("out", name).read_text(encoding="utf-8") == "[1]"
        Path("out", name).unlink()


def test_a_folder_that_cannot_be_written_is_an_error_and_the_table_is_not_lost(tiny_run, monkeypatch, capsys, caplog):
    """An unwritable run is an error before the scoring. If the disk is full after it, the table is printed."""
    for name in ("evaluation", ".cache"):  # folders cannot be made here, even by root
        Path(tiny_run if name == "evaluation" else "", name).touch()
    words = ["runs/tiny", "--local_data", "data/tiny", "--device", "cpu", "--baseline", "none"]
    with pytest.raises(UserError, match="runs/tiny/evaluation cannot be written.*--output_dir"):
        main(words)
    words += ["--output_dir", "evaluations"]
    before = sorted(path.name for path in Path(tiny_run, "final").iterdir())
    main(words)
    assert sorted(path.name for path in Path(tiny_run, "final").iterdir()) == before  # the model folder is not edited
    table = Path("evaluations/comparison.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    assert sum(".cache/evaluation" in line for line in caplog.messages) == 1

    original = harness.score_task

    def fills_the_disk(*args):
        shutil.rmtree("evaluations")
        Path("evaluations").touch()
        return original(*args)

    monkeypatch.setattr(harness, "score_task", fills_the_disk)
    with pytest.raises(OSError, match="evaluations"):
        main(words)
    assert table.partition("lm_eval 0")[0] in capsys.readouterr().out


@pytest.mark.parametrize("count", [1, 5])
def test_a_checkpoint_without_the_average_is_named(count: int, tiny_run, model, tokenizer, caplog) -> None:
    """Before its first update, a run has no average. Its checkpoints are not comparable with final/."""
    identity = {"seed": 42, "ema_steps": 3}
    names = []
    for step in range(10, 10 + count):
        save(tiny_run / f"checkpoint-{step}", model, tokenizer, 1536, run_identity=identity)
        names.append(f"runs/tiny/checkpoint-{step}")
    comparison = evaluate(f"{' '.join(names)} --baseline runs/tiny/checkpoint-3")
    named = {model["name"]: model["weights"] for model in comparison["models"] if model["weights"]}
    assert named.keys() == {f"checkpoint-{step} (runs/tiny)" for step in range(10, 10 + count)}
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    table = Path("out/comparison.md").read_text(encoding="utf-8")
    for name, weights in named.items():
        assert any(name in line and weights in line for line in warnings)
        assert f"{weights}\n" in table


def test_all_checkpoints_are_a_trend(tiny_run, model, tokenizer):
    for step in (6, 12):
        save(tiny_run / f"checkpoint-{step}", model, tokenizer, 512 * step, run_identity={})
    evaluate(" ".join([*(f"runs/tiny/checkpoint-{step}" for step in (12, 3, 6)), "--baseline untrained"]))
    lines = Path("out/comparison.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split(" | ")[1] for line in lines if " | " in line]
    assert rows[-5:] == ["0", "1,536", "3,072", "5,000", "6,144"] and rows[-7] == "tokens trained"


def test_text_files_are_scored_in_bits_per_byte(tiny_run, model, tokenizer, prose) -> None:
    for name, text in (("a.txt", "\n".join(prose * 3)), ("b/1.txt", prose[1]), ("b/2.txt", prose[-1])):
        path = Path("texts", name)
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text, encoding="utf-8")
    rows = run_main("--bits_per_byte texts --baseline untrained")["rows"]
    assert [row["task"] for row in rows] == ["bits_per_byte_a", "bits_per_byte_b"]
    nats, size = 0.0, 0
    for text in (prose[1], prose[-1]):  # WikiText's detokenizer would change the second one
        ids = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]
        for start in range(0, len(ids) - 1, 64):
            end = min(start + 64, len(ids) - 1)
            begin = max(0, end - 64)  # the last window is filled with context
            logits = model(torch.tensor([ids[begin:end]])).logits[0, start - begin :]
            nats += F.cross_entropy(logits, torch.tensor(ids[start + 1 : end + 1]), reduction="sum").item()
        size += len("".join(tokenizer.convert_ids_to_tokens(ids[1:])))  # one character per byte
    assert rows[1]["values"][NAME]["value"] == pytest.approx(nats / math.log(2) / size, rel=1e-6)
    assert rows[0]["values"][NAME]["difference"]["verdict"] == "worse"  # the windows of the one document are resampled
    Path("texts", "b.md").write_text("another text with the name b", encoding="utf-8")
    with pytest.raises(UserError, match="texts/b"):
        run_main("--bits_per_byte texts --baseline none")


def test_the_names_of_text_files_are_kept_apart(tiny_run, prose) -> None:
    names = (
        "Novel [1].txt",
        "a-v1.0.txt",
        "a-v1.5.txt",
        "b.jsonl.gz",
        "50% *?.md",
        "小说 {2}.txt",
        "letters 1.5/a.txt",
    )
    for name in names:
        path = Path("texts", name)
        path.parent.mkdir(exist_ok=True, parents=True)
        rows = json.dumps({"text": prose[1]}) + "\n"
        content = gzip.compress(rows.encode()) if name.endswith(".gz") else prose[1].encode()
        path.write_bytes(content)
    rows = run_main("--bits_per_byte texts --baseline none")["rows"]
    tasks = {row["task"].removeprefix("bits_per_byte_") for row in rows}
    assert len(tasks) == len(names) and {"a-v1.0", "a-v1.5", "b", "letters-1.5"} <= tasks
    assert len({row["values"][NAME]["value"] for row in rows}) == 1


@pytest.mark.parametrize("bad", ["a file of a folder", "a file", "a row"])
def test_a_text_that_cannot_be_read_is_refused(bad: str, tiny_run, prose) -> None:
    latin = "naïve café ".encode("latin-1") * 20
    folder = Path("texts/letters")
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"{number}.txt").write_text(prose[1], encoding="utf-8")
    path = {"a file of a folder": folder / "9.txt", "a file": Path("texts/9.txt"), "a row": Path("texts/9.jsonl")}[bad]
    path.write_bytes(json.dumps({"text": prose[1]}).encode() + b'\n{"text": 5}\n' if bad == "a row" else latin)
    with pytest.raises(UserError, match=str(path)):
        run_main("--bits_per_byte texts --baseline none")
    assert not Path("out").exists()


@pytest.mark.parametrize("loss", ["none", "unknown words", "lower case", "normalization"])
def test_a_tokenizer_that_loses_text_is_not_judged(loss: str, tiny_run, model, tokenizer, prose, caplog) -> None:
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    if loss == "unknown words":
        vocabulary = {"<|endoftext|>": 0, "[UNK]": 1, "river": 2, "the": 3}
        words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        normalizer = {"lower case": {"type": "Lowercase"}, "normalization": {"type": "NFKD"}}.get(loss)
        words = Tokenizer.from_str(json.dumps(described | {"normalizer": normalizer}))
    end = tokenizer.eos_token
    other = PreTrainedTokenizerFast(tokenizer_object=words, bos_token=end, eos_token=end)
    save(Path("runs/lossy"), model, other, 1)
    texts = [f"{text} The RIVER, naïve." for text in prose]
    write_rows(Path("data/tiny/text/validation.jsonl"), [{"text": text} for text in texts])
    comparison = evaluate("--baseline runs/lossy --tasks document_perplexity last_word")
    _, lossy = comparison["models"]
    rows = {
        f"{row['task']} {row['metric']}": row["values"][NAME]["difference"]["verdict"] for row in comparison["rows"]
    }
    unjudged = {name for name in rows if name.startswith("document") or name == "last_word perplexity"}
    if loss == "none":
        assert lossy["lossy_tasks"] == [] and all(rows[name] for name in unjudged)
    else:
        assert "document_perplexity" in lossy["lossy_tasks"] and lossy["name"] in Path("out/comparison.md").read_text(
            encoding="utf-8"
        )
        assert {name for name in unjudged if name.startswith("document") and rows[name]} == set()
    assert any(line.levelname == "WARNING" and "document" in line.message for line in caplog.records) is (
        loss != "none"
    )


def test_two_models_with_the_same_lossy_tokenizer_are_judged(tiny_run, tokenizer) -> None:
    described = json.loads(tokenizer.backend_tokenizer.to_str()) | {"normalizer": {"type": "Lowercase"}}
    (tiny_run / "final/tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    write_rows(Path("data/tiny/text/validation.jsonl"), [{"text": f"The RIVER {number}."} for number in range(40)])
    comparison = evaluate("--baseline untrained")
    assert all(model["lossy_tasks"] for model in comparison["models"])
    assert all(row["values"][NAME]["difference"]["verdict"] for row in comparison["rows"])


@pytest.fixture
def trained_on(tiny_run, tokenizer, prose) -> Path:
    """Prepare documents 3 and 4 as the training data of runs/tiny, and return the prepared folder."""
    write_rows(Path("train.jsonl"), ({"text": text} for text in prose[3:5]))
    write_rows(Path("validation.jsonl"), [{"text": prose[0] * 3}])
    tokenizer.save_pretrained("tokenizer")
    data = {"data_files": ["train.jsonl", "validation.jsonl"], "split": "source", "tokenizer": "tokenizer"}
    prepare(DataArguments(**data, dataset_dir="data/trained", sequence_length=64))
    recipe = yaml.safe_load((tiny_run / "recipe.yaml").read_text(encoding="utf-8"))
    recipe["data"] |= {"dataset_dir": "data/trained"}
    (tiny_run / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return Path("data/trained")


def test_documents_in_the_training_text_are_counted_and_left_out(trained_on, prose) -> None:
    assert evaluate()["task_details"]["document_perplexity"]["overlap"] is None, "the search takes minutes"
    comparison = evaluate("--baseline none --check_overlap")
    assert comparison["task_details"]["document_perplexity"]["overlap"] == 2
    rows = {row["metric"]: row["values"][NAME]["value"] for row in comparison["rows"]}
    write_rows(Path("clean/validation.jsonl"), ({"text": document} for document in prose[:3] + prose[5:]))
    clean = evaluate("--baseline none --local_data clean")["rows"]
    for row in clean:
        assert rows[f"{row['metric']} (clean)"] == pytest.approx(row["values"][NAME]["value"], rel=1e-6)


def test_the_table_is_written_before_overlaps_are_searched(trained_on, monkeypatch, capsys) -> None:
    def killed(*_, **__) -> set[str]:
        written = json.loads(Path("out/comparison.json").read_text(encoding="utf-8"))
        assert written["rows"] and Path("out/comparison.md").read_text(encoding="utf-8") in capsys.readouterr().out
        raise KeyboardInterrupt

    monkeypatch.setattr("gpt2_repro.evaluation.overlap.find_overlaps", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate("--baseline none --check_overlap")


@pytest.mark.parametrize("damage", ["shard", "tokenizer", "other rows", "folder", "no run"])
def test_an_overlap_that_cannot_be_searched_is_refused_before_scoring(damage: str, trained_on, monkeypatch) -> None:
    monkeypatch.setattr("gpt2_repro.evaluation.__main__.score_models", lambda *_, **__: pytest.fail("scored"))
    if damage == "no run":
        shutil.copytree("runs/tiny/final", "runs/model")
        shutil.rmtree("runs/tiny")
        Path("runs/model").rename("runs/tiny")
    elif damage == "other rows":
        recorded = json.dumps({"data": {"sha256": {"train": "a"}}})
        Path("runs/tiny/environment.json").write_text(recorded, encoding="utf-8")
    elif damage == "folder":
        shutil.rmtree(trained_on)
    else:
        pattern = "train/*.arrow" if damage == "shard" else "tokenizer/tokenizer.json"
        next(trained_on.glob(pattern)).unlink()
    with pytest.raises(UserError):
        evaluate("--baseline none --check_overlap")
    assert not Path("out").exists()


@pytest.fixture
def later_checkpoint(tiny_run, model, tokenizer) -> Path:
    """Add checkpoint-5, with other weights, to runs/tiny."""
    later = copy.deepcopy(model)
    with torch.no_grad():
        for weight in later.parameters():
            weight.add_(torch.randn_like(weight))
    save(folder := tiny_run / "checkpoint-5", later, tokenizer, 2560, run_identity={})
    return folder


def test_runs_that_differ_only_in_the_seed_are_one_column(tiny_run, later_checkpoint) -> None:
    shutil.copytree(tiny_run, "runs/other")
    for run, seed in ((tiny_run, 42), (Path("runs/other"), 1)):
        final = run / "final"
        weights = {name: weight * (1 + seed / 100) for name, weight in load_file(final / "model.safetensors").items()}
        save_file(weights, final / "model.safetensors", metadata={"format": "pt"})
        seal(final, {}, tokens=2560, run_identity={}, environment={"run_identity": {"seed": seed}})
    comparison = evaluate("runs/other --baseline runs/tiny/checkpoint-5")
    assert comparison["baseline"] == "checkpoint-5 (runs/tiny)"
    joined, baseline = (model["name"] for model in comparison["models"])
    assert (joined, baseline) == (f"{NAME}, 2 seeds", comparison["baseline"])
    for row in comparison["rows"]:
        assert {name for name, score in row["values"].items() if score["difference"]} == {joined}


def test_an_unfinished_run_is_a_baseline_as_it_is_a_model(tiny_run, later_checkpoint) -> None:
    shutil.copytree(tiny_run, "runs/unfinished")
    shutil.rmtree("runs/unfinished/final")
    assert evaluate("--baseline runs/unfinished")["baseline"] == "checkpoint-5 (runs/unfinished)"
    shutil.rmtree(tiny_run / "final")
    comparison = evaluate("--baseline runs/tiny")  # the model itself
    (score,) = comparison["rows"][0]["values"].values()
    assert len(comparison["models"]) == 1 and score["difference"] is None


@pytest.mark.parametrize(
    "words",
    [
        *("--baseline openai-community/gpt2", "--baseline runs/tiny/checkpoint-4", "--baseline runs/empty"),
        *("--max_length 129", "runs/more"),  # the model has 128 positions. A tokenizer has more ids than its model
    ],
)
def test_what_cannot_be_scored_is_refused_before_scoring(words: str, tiny_run, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("gpt2_repro.evaluation.__main__.score_models", lambda *_, **__: pytest.fail("scored"))
    Path("runs/empty").mkdir()
    shutil.copytree(tiny_run / "final", "runs/more")
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<one more>"])
    other.save_pretrained("runs/more")
    with pytest.raises(UserError):
        evaluate(words)
    assert not Path("out").exists()
