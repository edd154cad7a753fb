"""The commands of the README work, from the data preparation to the report."""

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from gpt2_repro import export, generate
from gpt2_repro.evaluation.models import open_model
from gpt2_repro.model.checkpoint import resolve_checkpoint
from gpt2_repro.model.size import NO_LIMIT, max_positions
from gpt2_repro.report import __main__ as report


@pytest.fixture(scope="module")
def run(train, tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("end") / "run", "--per_device_train_batch_size", 4)


def test_the_run_directory_is_the_record(run: Path, tiny_recipe: Path, events) -> None:
    files = {"recipe.yaml", "environment.json", "run_status.json", "metrics.jsonl", "samples.jsonl", "console.log"}
    folders = {"checkpoint-4", "checkpoint-8", "final"}
    assert {path.name for path in run.iterdir() if not path.name.startswith(".")} == files | folders
    resolved, written = (yaml.safe_load(one.read_text(encoding="utf-8")) for one in (run / "recipe.yaml", tiny_recipe))
    assert resolved["training"]["output_dir"] == str(run)
    for section, keys in (written | {"training": {"per_device_train_batch_size": 4}}).items():
        assert keys.items() <= resolved[section].items()
    assert json.loads((run / "environment.json").read_text(encoding="utf-8"))["plan"]["total_tokens"] == 8 * 256
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [sample["step"] for sample in samples] == [0, 8] and samples[-1]["text"]
    training = [event for event in events(run) if "loss" in event]
    assert all(event["tokens_per_second"] > 0 and 0 <= event["data_wait"] < 1 for event in training)


def test_stock_transformers_loads_what_training_wrote(run: Path) -> None:
    model, tokenizer = (kind.from_pretrained(run / "final") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert model.config.architectures == ["GPT2LMHeadModel"] and str(model.dtype) == "torch.float32"
    assert model.config.vocab_size == len(tokenizer) == 300
    assert model.config.eos_token_id == model.config.bos_token_id == tokenizer.eos_token_id == 299


def test_generate_writes_text_from_final_run_and_checkpoint(run: Path, capsys) -> None:
    texts = []
    for words in ((run, "--prompt", "abc"), (run / "final", "--top_k", "50", "abc"), (run / "checkpoint-8", "abc")):
        generate.main([*map(str, words), "--max_new_tokens", "8"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and all(text.startswith("abc") and len(text) > 5 for text in texts)
    for sampling in (("--top_p", "1e-6"), ("--temperature", "0")):  # both take the most likely token
        generate.main([str(run), "abc " * 99 + "end", *sampling, "--max_new_tokens", "8"])
        texts.append(capsys.readouterr().out)
    assert texts[3] == texts[4] and "abc end" in texts[3] and texts[3].count("abc") < 32  # cut to the window


@pytest.mark.parametrize(
    ("kind", "further", "positions"),
    [("mamba", {"state_size": 4}, NO_LIMIT), ("mpt", {"max_seq_len": 32, "d_model": 32}, 32)],
)
def test_any_architecture_writes_text_and_is_exported(run: Path, kind, further, positions, tmp_path, capsys) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    ids = dict.fromkeys(("eos_token_id", "bos_token_id"), tokenizer.eos_token_id)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **{**ids, **shape, **further})
    for part in (AutoModelForCausalLM.from_config(config), tokenizer):
        part.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    generate.main([str(tmp_path / "model"), "abc " * 20, "--max_new_tokens", "40"])
    assert capsys.readouterr().out
    export.main([str(tmp_path / "model"), str(tmp_path / "exported")])
    opened = open_model(resolve_checkpoint(str(tmp_path / "exported")), lambda: (model, tokenizer))
    assert opened.positions == max_positions(model.config) == positions


def test_evaluate_and_report(run: Path, tiny_data: Path, type_command, capsys) -> None:
    tasks = ("--tasks", "last_word", "document_perplexity")
    done = type_command("bash", "evaluate.sh", run / "final", "--local_data", tiny_data, *tasks)
    assert done.returncode == 0, done.stderr[-2000:]
    comparison = json.loads((run / "evaluation" / "comparison.json").read_text(encoding="utf-8"))
    assert comparison["baseline"] == "untrained" and comparison["max_length"] == 32
    assert {row["task"] for row in comparison["rows"]} == {"last_word", "document_perplexity"}
    bits = next(row for row in comparison["rows"] if row["metric"] == "bits_per_byte")
    trained = comparison["models"][0]
    assert bits["values"][trained["name"]]["difference"]["high"] < 0 and trained["tokens_trained"] == 2048
    exported = run.with_name("exported")
    export.main([str(run), str(exported)])
    cards = [(folder / "README.md").read_text(encoding="utf-8") for folder in (run / "final", exported)]
    assert ["| last_word | perplexity ↓ |" in card for card in cards] == [False, True]
    report.main([str(run)])
    page = (run / "report.html").read_text(encoding="utf-8").replace("<wbr>", "")
    assert "bits_per_byte" in page and "bigram" in page and (run / "report" / "loss.png").exists()
    assert str(run / "report.html") in capsys.readouterr().out


@pytest.mark.slow
def test_two_steps_of_the_real_model_on_real_text(real_data: Path, type_command, tmp_path: Path, events) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    texts = ("--data_files", real_data / "prose" / "gov_web.jsonl.gz", "--tokenizer", real_data / "gpt2")
    sizes = ("--validation_tokens", 2000, "--max_tokens", 30_000)
    prepared = type_command("python", "prepare_data.py", *texts, *sizes, "--dataset_dir", data)
    assert prepared.returncode == 0, prepared.stderr
    small = "--tokens_per_step 1024 --per_device_train_batch_size 1 --eval_tokens 1024 --sample_tokens 0"
    short = "--max_steps 2 --warmup_steps 1 --use_cpu --logging_steps 1 --save_steps 100"
    words = ("train.py", "--dataset_dir", data, "--output_dir", run, *small.split(), *short.split())
    done = type_command("python", *words, timeout=590, OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "HellaSwag is not scored" in done.stdout  # the recipe enables it, but there is no network
    logged = events(run)
    assert logged[0]["step"] == 0 and logged[0]["eval_loss"] == pytest.approx(10.98, abs=0.1)
    rates = {event["step"]: event["learning_rate"] for event in logged if "loss" in event}
    assert rates == pytest.approx({1: 6e-4, 2: 6e-4})
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    assert model.num_parameters() == 124_439_808 and model.config.vocab_size == 50_257
