"""A wrong command or recipe ends with a one-line error message and exit code 2."""

import errno
import importlib
import io
import json
import logging
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import GPT2Config, GPT2LMHeadModel

import prepare_data
import train as train_story
from gpt2_repro import cli, hardware
from gpt2_repro.data.tokenizer import train_tokenizer
from gpt2_repro.errors import UserError
from gpt2_repro.launchers import check_variables
from tests.commands import ROOT


@pytest.fixture
def refused(tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs train.py with wrong options and returns the error."""
    monkeypatch.chdir(ROOT)

    def run(*options: object, recipe: Path | None = None) -> str:
        output = tmp_path / "run"
        with pytest.raises(UserError) as error:
            train_story.main([str(recipe or tiny_recipe), "--output_dir", str(output), *map(str, options)])
        assert not output.exists()
        assert "\n" not in str(error.value)
        return str(error.value)

    return run


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--model_type bloom", ["gpt2, llama, mixtral"]),
        ("--config_overrides n_iner=3", ["config_overrides", "'n_inner'"]),
        ("--config_overrides wide", ["'wide'"]),
        ("--optim moun", ["--optim moun", "'muon'"]),
        ("--min_learning_rate 1e-5", ["--final_learning_rate_fraction"]),
        ("--threads 4", ["OMP_NUM_THREADS"]),
        ("--debug underflow_overflow", ["--debug"]),
        ("--no_document_mask", ["--document_mask false"]),
        ("--diff_recipe demo", ["recipes/demo.yaml"]),
        ("--diff_recipe recipes/demo.yaml --dry_run", ["Pass one of them"]),
        ("--no_bf16 true", ["takes no value"]),
        ("--early_stopping_patience 3", ["--keep_best_checkpoint"]),
        ("dataset_dir=data/x", ["--dataset_dir data/x"]),
        ("\u2014seed 3", ["--seed", "two hyphens"]),
        ("' --seed' 3", ["begins with a space"]),
        ("--init_from runs/gone", ["runs/gone"]),
        ("--attempts 2", ["gpt2_repro.supervise"]),
        ("--text_column title abstract", ["'abstract'", "--text_column takes one value"]),
        ("recipes/llama_124m.yaml --max_steps 3", ["Pass one recipe"]),
        ("--train_file little.txt", ["--data_files", "prepare_data.py recipes/own_text.yaml"]),
        ("--model 124M", ["recipes/gpt2_124m.yaml"]),
        ("--data books", ["--dataset_dir", "--data_files"]),
        ("--report_to wandb,tensorboard", ["spaces"]),
        ("--report_to wandbb", ["'wandbb'", "'wandb'"]),
        ("--dataset_dir data/nowhere", ["`python prepare_data.py", " --dataset_dir data/nowhere`"]),
        ("--dataset_dir docs", ["--data_files docs"]),
        ("--sequence_length 16", ["32", "16", "--sequence_length 32"]),
        ("--tokens_per_step 300", ["8 rows x 32 tokens x 1 processes", "--tokens_per_step 256 or 512"]),
        ("--train_sampling_strategy group_by_length --dry_run", ["concat", "--packing wrap"]),
        ("--attn_implementation flash_attention_2", ["no GPU", "--attn_implementation auto"]),
        ("--document_mask --packing wrap", ["--document_mask"]),
        ("--document_mask --separator none --dry_run", ["--separator before"]),
        ("--deepspeed 1", ["--deepspeed", "zero1.yaml"]),
        ("--hub_token 1", ["--hub_token", "HF_TOKEN"]),
        ("--logging_steps 0", ["--logging_steps 10"]),
        ("--warmup_steps -1", ["--warmup_steps 1"]),
        ("--warmup_steps 8", ["--warmup_steps 8", "--warmup_steps 0"]),
        ("--max_steps -3", ["--max_steps -3"]),
        ("--sequence_length 0", ["--sequence_length 0", "--sequence_length 1024"]),
        ("--validation_fraction 2", ["between 0 and 1"]),
        ("--decay_fraction 1.5", ["--decay_fraction 1.5"]),
        ("--dropout 1.5", ["--dropout 1.5"]),
        ("--learning_rate 0", ["--learning_rate 0.0006"]),
        ("--learning_rate 1,5e-3", ["--learning_rate 0.0015"]),
        ("--total_tokens 10M", ["--total_tokens 10000000"]),
        ("--warmup_steps 5%", ["--warmup_steps 0.05"]),
        ("--usd_per_hour '$2.5'", ["--usd_per_hour 2.5"]),
        ("--n_layer 2,5", ["--n_layer 12"]),
        ("--save_minutes 5m", ["--save_minutes 15.0"]),
        ("--hang_timeout 2h", ["--hang_timeout 600.0"]),
        ("--learning_rate -1e-3", ["--learning_rate -0.001", "--learning_rate 0.001"]),
        ("--learning_rate 6e4", ["--learning_rate 60000.0", "--learning_rate 0.0006"]),
        ("--learning_rate 1", ["--learning_rate 0.0006"]),
        ("--weight_decay=-0.1", ["--weight_decay 0.1"]),
        ("--epochs=-1", ["--epochs 1.0"]),
        ("--adam_beta2 1", ["--adam_beta2 0.95"]),
        ("--final_learning_rate_fraction 2", ["--final_learning_rate_fraction 0.0"]),
        ("--total_tokens 255 --max_steps 0", ["--total_tokens 256"]),
        ("--init_from scratch", ["--init_from scratch"]),
        ("--n_head 3", ["--n_embd 32", "--n_head 3"]),
        ("--n_head 1e30", ["--n_head 32 "]),
        ("--n_layer 1e20", ["smaller --n_layer"]),
        ("--tokens_per_step 1e308", ["--tokens_per_step 524288"]),
        ("--hang_timeout 1e308", ["--hang_timeout 600"]),
        ("--dataloader_num_workers 1e9", ["--dataloader_num_workers 2"]),
        ("--dataloader_multiprocessing_context fork", ["--dataloader_multiprocessing_context"]),
        ("--per_device_train_batch_size -1", ["--per_device_train_batch_size"]),
        (f"--sample_prompt {'abc-' * 40}", ["fewer than 32", "--sample_prompt"]),
    ],
)
def test_an_option_that_cannot_be(refused, options: str, told: list[str]) -> None:
    message = refused(*shlex.split(options))
    assert all(word in message for word in told), message


def test_a_source_that_does_not_fit(refused, tiny_recipe: Path, tmp_path: Path) -> None:
    recipe = yaml.safe_load(tiny_recipe.read_text(encoding="utf-8"))
    recipe["data"] |= {"source": "embedded", "data_files": []}
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    message = refused(recipe=tmp_path / "changed.yaml")
    assert "files" in message and "embedded" in message
    # A folder on the command line replaces the data of the recipe, so the next mistake is reported.
    typed = ("--dataset_dir", recipe["data"]["dataset_dir"], "--tokens_per_step", 100)
    assert "--tokens_per_step 256" in refused(*typed, recipe=tmp_path / "changed.yaml")


def test_many_more_processes_than_cpu_cores(refused, monkeypatch) -> None:
    monkeypatch.setattr("gpt2_repro.training.launcher.cpu_cores", lambda: 2)
    for processes, told in (("4", "--logging_steps 10"), ("5", "--num_processes 2")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert told in refused("--use_cpu", "--logging_steps", 0)


def test_more_processes_than_gpus(refused, monkeypatch) -> None:
    monkeypatch.setattr("gpt2_repro.training.launcher.cpu_cores", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    message = refused("--use_cpu", "false")
    assert "8 processes" in message and "--num_processes 1" in message


def test_no_gpu_and_a_gpu_that_cannot_be_used(refused, monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for driver, options in (("", ()), ("470.57.02", ("--accept_any_hardware",))):
        monkeypatch.setattr(hardware, "nvidia_driver", lambda driver=driver: driver or None)
        message = refused("--use_cpu", "false", *options)
        assert "--use_cpu" in message and driver in message


@pytest.mark.parametrize("vocab_size", [300, 320])  # without and with padding
def test_weights_of_another_tokenizer_are_refused(
    refused, documents: list[str], tmp_path: Path, vocab_size: int
) -> None:
    shape = {"vocab_size": vocab_size, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path / "other")
    train_tokenizer([text[::-1] for text in documents], 300, tmp_path / "other", sequence_length=32)
    message = refused("--init_from", tmp_path / "other")
    assert f"--tokenizer {tmp_path / 'other'}" in message


def test_an_output_dir_that_is_a_file(tiny_recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file", encoding="utf-8")
    with pytest.raises(UserError, match="run is a file.*--output_dir"):
        train_story.main([str(tiny_recipe), "--output_dir", str(tmp_path / "run")])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("", "empty"),
        ("--num_proc 1e30", "--num_proc 2"),
        ("--source_split test", "--source "),
        ("--tokenizer no/where", "own_text.yaml"),
    ],
)
def test_an_empty_corpus_and_wrong_options_of_its_preparation(options: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    words = ("--data_files", tmp_path / "empty.txt", "--tokenizer", "train:300", "--dataset_dir", tmp_path / "data")
    with pytest.raises(UserError, match=told):
        prepare_data.main([str(word) for word in words] + options.split())
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("command", "words", "told"),
    [
        *((name, ".", "\\.") for name in ("diagnose", "evaluation.__main__", "generate", "report.__main__")),
        *((name, "runs/none", "runs/none") for name in ("diagnose", "evaluation.__main__", "generate")),
        ("evaluation.__main__", "", "evaluate.sh runs/"),
        ("generate", "O_Romeo! --top_k 5", "O_Romeo!"),
        ("generate", "runs/none abc --top_p 2", "--top_p"),
        ("generate", "runs/none --start=O\u2003Romeo", "--start"),
        ("generate", "runs/none abc --num_samples 1e8", "--num_samples 100000000"),
        ("generate", "runs/none abc --temperature 1e-300", "--temperature 1e-300"),
        ("generate", ". abc", "'.'"),
        ("evaluation.__main__", "x --limit 1e30", "--limit 8"),
        ("preflight.__main__", "--gpu H100 --tokens_per_second 1e-300", "--tokens_per_second 100"),
        ("diagnose", "x --output_dir /dev/null", "/dev/null is a file"),
        ("generate", "runs/none abc --num_samples 0", "--num_samples 0 must be at least 1"),
        ("generate", "runs/none abc --seed 99999999999999999999", "--seed 42"),
        ("generate", "runs/none abc --num_beams 4", "no beam search"),
        ("generate", "utf16.txt abc", "utf16.txt is a file"),
        ("generate", "runs/none FILE:", "FILE: needs a path"),
        ("generate", "runs/none FILE:latin1.txt", "iconv -f cp1252"),
        ("generate", "runs/none FILE:none.txt", "none.txt"),
        ("generate", "runs/none FILE:utf16.txt", "iconv -f utf-16 -t utf-8 utf16.txt"),
        ("generate", "runs/none FILE:recipes", "recipes is a folder"),
        ("diagnose", "runs/a runs/b", "--baseline runs/b"),
        ("generate", "--model x", "CHECKPOINT"),
        ("generate", "", "generate runs/demo"),
        ("report.__main__", "", "report runs/demo"),
        ("generate", "runs/none/checkpoint-3 abc", "not found: runs/none/checkpoint-3. Pass a run"),
        ("generate", "checkpoint-3 abc", "runs/NAME/checkpoint-3"),
        ("generate", "runs/none FILE:zeros.txt", "not a text file"),
        ("generate", "--out_dir=runs/none", "CHECKPOINT without"),
        ("generate", "x --greedy", "--temperature 0"),
        ("generate", "x abc --temperature 0 --num_samples 3", "samples equal"),
        ("export", "x --output y", "OUT"),
        ("export", "x y.gguf", ".gguf"),
        ("evaluation.__main__", "x --limit 0", "--limit"),
        ("evaluation.__main__", "x --num_fewshot 5", "zero-shot"),
        ("preflight.__main__", "--gpu A100 H100", "'H100'"),
        ("preflight.__main__", "--gpu H100 --tokens_per_second 1.5M", "--tokens_per_second 1500000"),
        ("generate", "runs/none abc --device cuda", "--device"),
        ("generate", "runs/x checkpoint-10 abc", "runs/x/checkpoint-10"),
        ("generate", "Once recipes", "generate recipes 'Once'"),
        ("generate", "recip* abc", "without quotes"),
        ("generate", "runs/x abc --output y.txt", "> FILE"),
        ("export", "runs/x y --private", "--push_to_hub"),
        ("report.__main__", "runs/x --check -o y.html", "--check"),
        ("report.__main__", "recipes reports/x.html -o my", "-o"),
        ("preflight.__main__", "--num_gpus 8", "--n"),
        ("export", "gpt2", "--push_to_hub"),
        ("export", "gpt2 --push_to_hub me/x", "HF_TOKEN"),
        ("export", "gpt2 x --format gguf", "hf, llmc"),
        ("preflight.__main__", "--n 0", "--n 8"),
        ("preflight.__main__", "--gpu GTX_1060", "--tokens_per_second"),
        ("preflight.__main__", "recipes/gpt2_small.yaml", "recipes/gpt2_124m.yaml"),
        ("supervise", "", "supervise -- accelerate launch"),
        ("supervise", "-- python trian.py", "trian.py does not exist"),
        ("supervise", "--attempts x -- python train.py", "--attempts 3"),
        ("supervise", "--attempts 0 -- python train.py", "--attempts"),
        ("supervise", "--wait -1 -- python train.py", "--wait"),
    ],
)
def test_a_wrong_command(command: str, words: str, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "utf16.txt").write_text("O Romeo", "utf-16")
    (tmp_path / "zeros.txt").write_bytes(b"\0\xff")
    (tmp_path / "latin1.txt").write_text("caf\u00e9", "latin-1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=told):
        importlib.import_module(f"gpt2_repro.{command}").main(words.split())


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("data: {seed: 1}", "section training"),
        ("training: {seed: [1, 2]}", "seed: 1"),
        ("training: {seed: 1, max_steps: 2, seed: 3}", "'seed'"),
        ("training: {}\nmodel: {}\ntraining: {seed: 3}", "'training'"),
        ("[data, model]", "recipes/gpt2_124m.yaml"),
        ("training: {seed: 4294967296}", "--seed"),
        ("training: {optim_args: momentum=0.9}", "--muon_momentum"),
        ("base_model: gpt2", "'base_model'"),
        ("train:\n  seed: 3", "Did you mean 'training'"),
        ("training:\n\tseed: 3", "tab"),
        ("training:\n  seed: 3\n\u00a0 epochs", "non-breaking"),
        ("training: {weight_decay: 1e9}", "--weight_decay"),
        ("training: {batch_size: 8}", "per_device_train_batch_size"),
        ("training: {hang_timeout: 0.1}", "--hang_timeout"),
        ("model: {n_embd: 64, n_head: 3}", "--n_head 2 or --n_embd 66"),
    ],
)
def test_a_wrong_recipe(written: str, message: str, refused, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(written, encoding="utf-8")
    assert message in refused(recipe=tmp_path / "r.yaml")


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "3"},
        {"RANK": "1"},
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        {"ACCELERATE_USE_DEEPSPEED": "true"},
        {"ACCELERATE_USE_DEEPSPEED": "1", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds_configs/zero1.json"},
        {"ACCELERATE_USE_FSDP": "True"},
        {"ACCELERATE_USE_MEGATRON_LM": "true"},
    ],
)
def test_variables_of_a_launcher_that_did_not_start_it(variables: dict[str, str], monkeypatch, capsys) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["train.py"])
    with pytest.raises(SystemExit) as ended:
        cli.run(train_story.main)
    assert ended.value.code == 2
    assert f"unset {next(iter(variables))}" in capsys.readouterr().err


def test_home_folders_that_the_shell_did_not_expand(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr("sys.argv", ["train.py", "~/my.yaml", "--output_dir=~/runs", "~", "a ~/b", "~user"])
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    words: list[str] = []
    cli.run(words.extend)
    assert os.environ.pop("GOMP_SPINCOUNT") == "10000"
    assert words == ["/home/me/my.yaml", "--output_dir=/home/me/runs", "/home/me", "a ~/b", "~user"]


def test_variables_of_accelerate_launch_with_zero1_are_accepted(monkeypatch) -> None:
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds_configs/zero1.json"}
    for name, value in {**variables, "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    check_variables()


def test_only_training_needs_the_variables_of_its_launcher(
    type_warm, train, tiny_recipe: Path, tmp_path: Path
) -> None:
    """A cluster can set variables of a launcher for all commands."""
    run = train(tmp_path / "run", "--max_steps", 1, "--warmup_steps", 0)
    cluster = {
        "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456",
        "WORLD_SIZE": "2",
        "RANK": "1",
        "PET_NNODES": "2",
    }
    stale = cluster | {"LOCAL_RANK": "0", "ACCELERATE_USE_DEEPSPEED": "true"}
    data = yaml.safe_load(tiny_recipe.read_text(encoding="utf-8"))["data"]["dataset_dir"]
    words = (run, "--local_data", data, "--device", "cpu", "--output_dir", tmp_path / "out", "--no_cache")
    for variables in (cluster, stale):
        for name, options in (("generate", (run,)), ("report/__main__", (run,)), ("evaluation/__main__", words)):
            done = type_warm("python", f"gpt2_repro/{name}.py", *options, **variables)
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("error", "told"),
    [
        *((OSError(n, os.strerror(n), "exports/x"), "exports/x") for n in (errno.EACCES, errno.EROFS, errno.ENOSPC)),
        (OSError(errno.EFBIG, os.strerror(errno.EFBIG)), "ulimit -f"),
        (Exception("No space left on device (os error 28)"), "disk"),  # raised by tokenizers
    ],
)
def test_a_disk_that_cannot_be_written(error: Exception, told: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["export.py"])

    def write(argv: list[str]) -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        cli.run(write)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_log_on_a_full_disk_shows_no_traceback(capsys) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cli._LogHandler(Full()).handle(logging.makeLogRecord({"msg": "text"}))
    assert capsys.readouterr().err == ""


def test_a_run_in_a_run_or_a_prepared_folder(refused, tiny_recipe: Path, tmp_path: Path) -> None:
    for name in ("run_status.json", "dataset_dict.json"):
        (tmp_path / "outer").mkdir(exist_ok=True)
        (tmp_path / "outer" / name).write_text("{}", encoding="utf-8")
        with pytest.raises(UserError, match="outer.*--output_dir"):
            train_story.main([str(tiny_recipe), "--output_dir", str(tmp_path / "outer" / "run")])
        (tmp_path / "outer" / name).unlink()


def test_as_typed_it_is_one_line_and_exit_code_2_and_the_launcher_quotes_it(type_command, tmp_path: Path) -> None:
    words = ("python", "train.py", "recipes/demos.yaml", "--output_dir", tmp_path / "run")
    for rank, lines in (("0", 1), ("1", 0)):
        done = type_command(
            *words, LOCAL_RANK=rank, MASTER_ADDR="localhost", TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json")
        )
        assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == lines
        told = json.loads((tmp_path / "error.json").read_text(encoding="utf-8"))["message"]
        assert told.startswith("error: ") and "'recipes/demo.yaml'" in told and done.stderr.strip() in told
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_not_run_as_a_module() -> None:
    done = subprocess.run([sys.executable, ROOT / "gpt2_repro/generate.py", "x"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "error: Run it as a module: python -m gpt2_repro.generate\n"
