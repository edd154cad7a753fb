"""The commands of the README, as a user types them."""

import json
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel


@pytest.fixture(scope="module")
def run(type_command, tiny_recipe: Path, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("end") / "run"
    words = ("train.py", tiny_recipe, "--output_dir", output, "--per_device_train_batch_size", 4)
    done = type_command("launch", 2, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return output


def test_the_run_directory_is_the_record(run: Path, tiny_recipe: Path, events) -> None:
    assert {path.name for path in run.iterdir() if not path.name.startswith(".")} == {
        "recipe.yaml",
        "environment.json",
        "run_status.json",
        "metrics.jsonl",
        "samples.jsonl",
        "checkpoint-4",
        "checkpoint-8",
        "final",
    }
    assert yaml.safe_load((run / "recipe.yaml").read_text())["training"]["output_dir"] == str(run)
    resolved, written = yaml.safe_load((run / "recipe.yaml").read_text()), yaml.safe_load(tiny_recipe.read_text())
    for section, keys in written.items():
        for key, value in keys.items():
            if key != "per_device_train_batch_size":
                assert resolved[section][key] == value, f"{section}.{key}"
    environment = json.loads((run / "environment.json").read_text())
    assert environment["plan"]["total_tokens"] == 8 * 256
    assert environment["data"]["counts"]["train"]["rows"] > 0
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [0, 8] and samples[-1]["text"]
    training = [event for event in events(run) if "loss" in event]
    assert all(event["tokens_per_second"] > 0 and 0 <= event["data_wait"] < 1 for event in training)


def test_stock_transformers_loads_what_training_wrote(run: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    GPT2LMHeadModel(model.config).save_pretrained(tmp_path)
    ours, stock = (load_file(folder / "model.safetensors") for folder in (run / "final", tmp_path))
    assert {name: (weight.shape, weight.dtype) for name, weight in ours.items()} == {
        name: (weight.shape, weight.dtype) for name, weight in stock.items()
    }
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    assert model.config.architectures == ["GPT2LMHeadModel"]
    assert model.config.vocab_size == len(tokenizer) == 300
    assert model.config.eos_token_id == model.config.bos_token_id == tokenizer.eos_token_id == 299
    assert model.config.activation_function == "gelu_new" and model.config.use_cache is True
    card = (run / "final" / "README.md").read_text()
    assert "| tokens | 2,048 |" in card and "validation loss" in card


def test_generate_writes_text_from_final_run_and_checkpoint(run: Path, type_command) -> None:
    texts = []
    for checkpoint in (run, run / "final", run / "checkpoint-8"):
        done = type_command(
            "python", "-m", "gpt2_repro.generate", checkpoint, "--prompt", "abc", "--max_new_tokens", 8
        )
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert texts[0] == texts[1] and all(text.startswith("abc") and len(text) > 5 for text in texts)


def test_evaluate_and_report(run: Path, tiny_recipe: Path, type_command) -> None:
    data = yaml.safe_load(tiny_recipe.read_text())["data"]["dataset_dir"]
    tasks = ("--tasks", "last_word", "document_perplexity")
    done = type_command("bash", "evaluate.sh", run / "final", "--local_data", data, *tasks)
    assert done.returncode == 0, done.stderr[-2000:]
    comparison = json.loads((run / "evaluation" / "comparison.json").read_text())
    assert comparison["baseline"] == "untrained" and comparison["max_length"] == 32
    assert {row["task"] for row in comparison["rows"]} == {"last_word", "document_perplexity"}
    bits = next(row for row in comparison["rows"] if row["metric"] == "bits_per_byte")
    trained = comparison["models"][0]["name"]
    difference = bits["difference"][trained]
    assert difference["high"] < 0 and difference["verdict"] == "inconclusive", "of 15 documents"
    assert comparison["models"][0]["tokens_trained"] == 2048
    done = type_command("python", "-m", "gpt2_repro.report", run)
    assert done.returncode == 0, done.stderr
    page = (run / "report.html").read_text()
    assert "bits_per_byte" in page and "bigram" in page and (run / "report" / "loss.png").exists()
    assert str(run / "report.html") in done.stdout


def test_bars_can_be_left_out_and_the_lines_stay(type_warm, tiny_recipe: Path, tmp_path: Path) -> None:
    for number, option in enumerate(("false", "true")):
        words = ("--output_dir", tmp_path / str(number), "--max_steps", 1, "--disable_tqdm", option)
        done = type_warm("python", "train.py", tiny_recipe, *words)
        assert done.returncode == 0, done.stderr
        assert "loss" in done.stdout and "validation loss" in done.stdout
        assert ("train:" in done.stderr and "validate:" in done.stderr) is (option == "false")


def test_dry_run_derives_everything_and_writes_nothing(type_command, tmp_path: Path) -> None:
    done = type_command("python", "train.py", "--dry_run", "--output_dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    for words in (
        "124,439,808 (124,475,904 while training",
        "on 1 GPUs       64 rows x 1 x 8 accumulation steps",
        "on 8 GPUs       64 rows x 8 x 1 accumulation steps",
        "18,865 = 9,890,693,120 tokens",
        "855.4 M a token",
        "checkpoint        1.99 GB",
        "learning_rate: 0.0006",
    ):
        assert words in done.stdout, words
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_wandb_records_offline_never_asks_and_cannot_end_a_training(
    type_command, type_warm, tiny_recipe: Path, tmp_path: Path
) -> None:
    nobody = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_API_KEY": ""}
    unreachable = {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "2"}
    # wandb writes the last of its record when Python ends, which a forked process does not.
    for name, typed, environment in (
        ("headless", type_command, nobody),
        ("unreachable", type_warm, nobody | unreachable | {"WANDB_API_KEY": "0" * 40}),
    ):
        run = tmp_path / name
        options = ("--report_to", "wandb", "--max_steps", 2, "--warmup_steps", 1)
        done = typed("python", "train.py", tiny_recipe, "--output_dir", run, *options, **environment)
        assert done.returncode == 0, done.stderr[-3000:]
        assert (run / "final" / "model.safetensors").exists()
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 4
        assert not any("0" * 40 in path.read_text(errors="ignore") for path in run.glob("*.json*"))
    assert "WandbCallback failed in on_train_begin" in done.stdout
    (record,) = (tmp_path / "headless" / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"train/tokens" in record.read_bytes()  # the axis
    assert list((tmp_path / "headless" / "wandb").glob("offline-run-*/files/media/html/sample*.html"))


@pytest.mark.parametrize("command", [("train.py",), ("prepare_data.py",), ("-m", "gpt2_repro.evaluation")])
def test_help_shows_launch_lines_and_own_options(type_command, command) -> None:
    done = type_command("python", *command, "--help")
    assert done.returncode == 0
    launch_line, own = {
        "train.py": ("accelerate launch --config_file accelerate_configs/zero1.yaml train.py", "--tokens_per_step"),
        "prepare_data.py": ("python prepare_data.py recipes/demo.yaml", "--data_files"),
        "-m": ("bash evaluate.sh runs/gpt2_124m", "--baseline"),
    }[command[0]]
    assert launch_line in done.stdout and own in done.stdout
    if command == ("train.py",):
        assert done.stdout.index("--tokens_per_step") < done.stdout.index("inherited from transformers")
        assert "--gradient_accumulation_steps" not in done.stdout


@pytest.mark.slow
def test_two_steps_of_the_real_model_on_real_text(real_data: Path, type_command, tmp_path: Path) -> None:
    prepared = type_command(
        "python",
        "prepare_data.py",
        *("--data_files", real_data / "tinyshakespeare" / "input.txt", "--tokenizer", real_data / "gpt2"),
        *("--split", "hash", "--dataset_dir", tmp_path / "data"),
    )
    # One document makes no validation split: the message says so, and documents do.
    assert prepared.returncode == 2 and "validation has 0 tokens" in prepared.stderr
    prepared = type_command(
        "python",
        "prepare_data.py",
        *("--data_files", real_data / "prose" / "gov_web.jsonl.gz", "--tokenizer", real_data / "gpt2"),
        *("--validation_tokens", 2000, "--max_tokens", 30_000, "--dataset_dir", tmp_path / "data"),
    )
    assert prepared.returncode == 0, prepared.stderr
    run = tmp_path / "run"
    small = ("--tokens_per_step", 1024, "--per_device_train_batch_size", 1, "--eval_tokens", 1024)
    done = type_command(
        "python",
        "train.py",
        *("--dataset_dir", tmp_path / "data", "--output_dir", run, "--max_steps", 2, "--use_cpu"),
        *(*small, "--sample_tokens", 0, "--logging_steps", 1, "--save_steps", 100),
        timeout=590,
        OMP_NUM_THREADS="2",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "HellaSwag is not scored" in done.stdout  # the recipe asks for it, and there is no network
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert events[0]["step"] == 0 and events[0]["eval_loss"] == pytest.approx(10.98, abs=0.1)
    assert [event["step"] for event in events if "loss" in event] == [1, 2]
    assert [event["learning_rate"] for event in events if "loss" in event] == pytest.approx([6e-4 / 700, 12e-4 / 700])
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    assert model.num_parameters() == 124_439_808 and model.config.vocab_size == 50_257
