"""A mistake of the user ends in one line and exit code 2, before anything is written.

Mistakes that other files test: a changed trajectory (training/test_resuming.py), a full disk
(training/test_saving.py, faults/), folders that are not run directories (training/test_going_on.py).
"""

import importlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import train as train_script
from gpt2_repro import hardware
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.tokenizer import obtain_tokenizer
from gpt2_repro.errors import UserError
from tests.sections import ROOT


@pytest.fixture
def refused(tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that passes wrong options to train.py and returns the message."""
    monkeypatch.chdir(ROOT)

    def run(*options: object, recipe: Path = tiny_recipe) -> str:
        with pytest.raises(UserError) as error:
            train_script.main([str(recipe), "--output_dir", str(tmp_path / "run"), *map(str, options)])
        assert not (tmp_path / "run").exists() and "\n" not in str(error.value)
        return str(error.value)

    return run


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--optm muon", "--optim"),
        ("--dropout 1.5", "--dropout"),
        ("--n_head 3", "--n_embd"),
        ("--config_overrides n_iner=3", "n_inner"),
        ("--dataset_dir data/nowhere", "python prepare_data.py"),
        ("--sequence_length 16", "--sequence_length 32"),
        ("--document_mask --packing wrap", "--document_mask"),
        ("--tokens_per_step 300", "--tokens_per_step 256"),
        ("--total_tokens 255 --max_steps 0", "--total_tokens"),
        ("--warmup_steps 8", "--warmup_steps"),
        ("--init_from runs/none", "runs/none"),
        ("--attn_implementation flash_attention_2", "GPU"),
    ],
)
def test_an_option(refused, options: str, named: str) -> None:
    assert named in refused(*shlex.split(options))


RECIPES = {"train: {seed: 3}": "training", "training: {sed: 3}": "seed"}
RECIPES["training: {seed: 1, max_steps: 2, seed: 3}"] = "seed"  # YAML alone would use the last value


@pytest.mark.parametrize(("text", "named"), RECIPES.items())
def test_a_recipe(refused, text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(text, encoding="utf-8")
    assert named in refused(recipe=tmp_path / "r.yaml")


@pytest.mark.parametrize("command", ["diagnose", "evaluation.__main__", "generate", "report.__main__", "export"])
def test_a_run_that_does_not_exist(command: str) -> None:
    words = ["runs/none", "out"] if command == "export" else ["runs/none"]
    with pytest.raises(UserError, match="runs/none"):
        importlib.import_module(f"gpt2_repro.{command}").main(words)


def test_no_gpu_and_fewer_gpus_than_processes(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for driver in (None, "470.57.02"):
        monkeypatch.setattr(hardware, "nvidia_driver", lambda driver=driver: driver)
        assert "--use_cpu" in (message := refused("--use_cpu", "false")) and (driver or "") in message
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "--num_processes 1" in refused("--use_cpu", "false")


def test_a_launcher_that_did_not_start_the_process(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this check, the process waits for the others or trains without DeepSpeed."""
    for name, value in (("WORLD_SIZE", "3"), ("ACCELERATE_USE_DEEPSPEED", "true")):
        monkeypatch.setenv(name, value)
        assert f"unset {name}" in refused()
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("vocab_size", "ids"), [(300, 300), (320, 300), (300, 290)])  # ids of the model, tokenizer
def test_weights_of_another_tokenizer(refused, documents, tmp_path: Path, vocab_size: int, ids: int) -> None:
    shape = {"vocab_size": vocab_size, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    args = DataArguments(tokenizer=f"train:{ids}", sequence_length=32)
    obtain_tokenizer(args, tmp_path / "other", lambda: [text[::-1] for text in documents], 0)
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path / "other")
    assert f"--tokenizer {tmp_path / 'other'}" in refused("--init_from", tmp_path / "other")


def test_a_cluster_that_sets_the_variables_of_a_launcher(type_warm, train, tmp_path: Path) -> None:
    """Only training needs the processes that the variables name."""
    run = train(tmp_path / "run", "--max_steps", 1, "--warmup_steps", 0)
    variables = {"MASTER_ADDR": "job-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0"}
    for name in ("generate", "report/__main__"):
        done = type_warm("python", f"gpt2_repro/{name}.py", run, **variables)
        assert done.returncode == 0, done.stderr


def test_rank_0_prints_one_line_and_the_launcher_gets_it(type_command, tmp_path: Path) -> None:
    words = ("python", "train.py", "recipes/demos.yaml", "--output_dir", tmp_path / "run")
    file = tmp_path / "error.json"
    for rank, lines in (("0", 1), ("1", 0)):
        launcher = {"LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "TORCHELASTIC_ERROR_FILE": str(file)}
        done = type_command(*words, **launcher)
        assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == lines
        assert "recipes/demo.yaml" in json.loads(file.read_text(encoding="utf-8"))["message"]
    assert not (tmp_path / "run").exists()
