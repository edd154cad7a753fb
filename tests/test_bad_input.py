"""Each mistake a user can make: one line that says what to type, exit code 2, in seconds, nothing left behind."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import GPT2Config, GPT2LMHeadModel

import prepare_data
import train as train_story
from gpt2_repro import hardware
from gpt2_repro.data.tokenizer import train_tokenizer
from gpt2_repro.errors import UserError


@pytest.fixture
def refused(tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs train.py's story on the tiny recipe with further options; returns the one line of the refusal."""
    monkeypatch.chdir(Path(train_story.__file__).parent)

    def run(*options: object, recipe: Path | None = None) -> str:
        output = tmp_path / "run"
        with pytest.raises(UserError) as error:
            train_story.main([str(recipe or tiny_recipe), "--output_dir", str(output), *map(str, options)])
        assert not output.exists()
        assert "\n" not in str(error.value)
        return str(error.value)

    return run


@pytest.fixture
def changed(tiny_recipe: Path, tmp_path: Path):
    """The tiny recipe with a change."""

    def write(change) -> Path:
        document = yaml.safe_load(tiny_recipe.read_text())
        change(document)
        path = tmp_path / "changed.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return write


def test_unknown_recipe_key(refused, changed) -> None:
    recipe = changed(lambda document: document["training"].update(learning_rat=1))
    assert "training has no key 'learning_rat': did you mean 'learning_rate'?" in refused(recipe=recipe)


def test_unknown_recipe_section(refused, changed) -> None:
    recipe = changed(lambda document: document.update(trainig={}))
    assert "did you mean 'training'?" in refused(recipe=recipe)


def test_unknown_choice(refused) -> None:
    assert refused("--separator", "befor") == "--separator cannot be 'befor': did you mean 'before'?"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--model_type", "lama"), "did you mean 'llama'?"),
        (("--model_type", "bloom"), "gpt2, llama, mixtral"),
        (("--config_overrides", "n_iner=3"), "a gpt2 has no 'n_iner' for config_overrides: did you mean 'n_inner'?"),
        (("--config_overrides", "wide"), "no mapping, which is key=value,key=value or JSON: 'wide'"),
    ],
)
def test_an_architecture_that_there_is_not(refused, options: tuple[str, ...], line: str) -> None:
    assert line in refused(*options)


def test_unknown_evaluation_key_is_found_before_training(refused, changed) -> None:
    recipe = changed(lambda document: document["evaluation"].update(task=["x"]))
    assert "evaluation has no key 'task': did you mean 'tasks'?" in refused(recipe=recipe)


def test_missing_recipe(refused) -> None:
    assert "did you mean 'recipes/demo.yaml'?" in refused(recipe=Path("recipes/demos.yaml"))


def test_missing_data_folder(refused, tiny_recipe: Path) -> None:
    message = refused("--dataset_dir", "data/nowhere")
    command = f"python prepare_data.py {tiny_recipe} --dataset_dir data/nowhere"
    assert message == f"there is no data/nowhere: prepare the data first with `{command}`"


def test_a_folder_that_is_not_prepared(refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "is not a prepared folder" in refused("--dataset_dir", tmp_path / "empty")


def test_a_manifest_that_does_not_fit(refused) -> None:
    message = refused("--sequence_length", 16)
    assert "was prepared with sequence_length 32 and the recipe asks for 16: use --sequence_length 32" in message
    assert "with separator before and the recipe asks for none" in refused("--separator", "none")


def test_a_source_that_does_not_fit_unless_the_folder_was_typed(refused, changed, tiny_recipe: Path) -> None:
    recipe = changed(lambda document: document["data"].update(source="embedded", data_files=[]))
    assert "with source files and the recipe asks for embedded" in refused(recipe=recipe)
    folder = yaml.safe_load(tiny_recipe.read_text())["data"]["dataset_dir"]
    # The typed folder is the data: the next mistake is reached.
    assert "do not divide" in refused("--dataset_dir", folder, "--tokens_per_step", 100, recipe=recipe)


def test_tokens_per_step_that_do_not_divide(refused) -> None:
    message = refused("--tokens_per_step", 300)
    assert message.startswith("300 tokens per step do not divide by 8 rows x 32 tokens x 1 processes = 256")
    assert message.endswith("--tokens_per_step 256 or 512")


def test_rows_of_one_length_are_not_grouped_by_length(refused, tiny_recipe: Path) -> None:
    message = refused("--train_sampling_strategy", "group_by_length")
    assert message.startswith("with packing concat all rows have one length: leave out --train_sampling_strategy")
    assert refused("--train_sampling_strategy", "group_by_length", "--dry_run") == message


def test_more_validation_than_there_is(refused) -> None:
    assert "eval_tokens asks for 10,000,000" in refused("--eval_tokens", "1e7")


def test_more_processes_than_gpus(refused, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    message = refused("--use_cpu", "false")
    assert message == "8 processes and 1 GPU: type --num_processes 1 after `accelerate launch`"


def test_no_gpu_and_a_gpu_that_cannot_be_used(refused, monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "nvidia_driver", lambda: None)
    assert refused("--use_cpu", "false").startswith("there is no GPU here: type --use_cpu")
    monkeypatch.setattr(hardware, "nvidia_driver", lambda: "470.57.02")
    assert "an NVIDIA device is here (driver 470.57.02) and torch" in refused("--use_cpu", "false")


def test_an_optimizer_or_a_fall_that_there_is_not(refused) -> None:
    assert refused("--optim", "moun") == "there is no --optim moun: did you mean 'muon'?"
    assert refused("--decay_fraction", 1.5) == "--decay_fraction 1.5 must be from 0 to 1"
    assert "did you mean 'warmup_stable_decay'?" in refused("--lr_scheduler_type", "warmup_stable")


def test_flash_attention_where_it_is_missing(refused) -> None:
    message = refused("--attn_implementation", "flash_attention_2")
    assert message.startswith("flash_attention_2 cannot be used: there is no GPU")


def test_documents_that_rows_do_not_show_are_not_kept_apart(refused) -> None:
    assert refused("--document_mask", "--packing", "wrap") == (
        "with packing wrap a row is of one document: leave out --document_mask"
    )
    message = refused("--document_mask", "--separator", "none")
    assert message.endswith("prepare the data with --separator before, or leave it out")
    assert refused("--document_mask", "--separator", "none", "--dry_run") == message
    message = refused("--document_mask", "--attn_implementation", "flash_attention_2")
    assert message.endswith("there is no GPU; use --attn_implementation auto")


def test_a_field_of_training_arguments_that_something_else_owns(refused, changed) -> None:
    for field, owner in [
        ("gradient_accumulation_steps", "tokens_per_step"),
        ("deepspeed", "zero1.yaml"),
        ("save_total_limit", "keep_checkpoints"),
        ("fp16", "bf16"),
        ("hub_token", "HF_TOKEN"),
        ("resume_from_checkpoint", "automatic"),
    ]:
        message = refused(f"--{field}", "1")
        assert message.startswith(f"--{field} has another owner") and owner in message
    recipe = changed(lambda document: document["training"].update(save_total_limit=1))
    assert "training.save_total_limit has another owner" in refused(recipe=recipe)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--logging_steps", 0, "logging_steps"),
        ("--warmup_steps", -1, "warmup_steps"),
        ("--max_steps", -3, "--max_steps -3 must be at least 1"),
        ("--sequence_length", 0, "--sequence_length 0"),
        ("--validation_fraction", 2, "must lie between 0 and 1"),
        ("--dropout", 1.5, "--dropout 1.5"),
        ("--n_head", 3, "--n_embd 32 does not divide by --n_head 3"),
        ("--per_device_train_batch_size", 0, "must be at least 1"),
        ("--tokens_per_step", "many", "no whole number of tokens: 'many'"),
        ("--sample_prompt", "abc " * 40, "leaves no room in a window of 32"),
        ("--tokens_per_step", "inf", "no whole number of tokens: 'inf'"),
        ("--report_to", "wandbb", "there is no service 'wandbb' to report to: did you mean 'wandb'?"),
    ],
)
def test_impossible_values(refused, option: str, value: object, message: str) -> None:
    assert message in refused(option, value)


def test_an_output_dir_that_is_a_file(tiny_recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UserError, match="cannot write into .*run .*--output_dir"):
        train_story.main([str(tiny_recipe), "--output_dir", str(tmp_path / "run")])


def test_an_empty_corpus(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(UserError, match="an empty corpus cannot be prepared"):
        prepare_data.main(
            ["--data_files", str(empty), "--tokenizer", "train:300", "--dataset_dir", str(tmp_path / "data")]
        )
    assert not (tmp_path / "data").exists()


def test_as_typed_it_is_one_line_and_exit_code_2(type_command, tiny_recipe: Path, tmp_path: Path) -> None:
    done = type_command("python", "train.py", tiny_recipe, "--learning_rat", "1", "--output_dir", tmp_path / "run")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: there is no option --learning_rat: did you mean '--learning_rate'?\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["diagnose", "evaluation", "generate", "report"])
def test_a_checkpoint_folder_that_is_none(type_command, tmp_path: Path, command: str) -> None:
    (tmp_path / "some").mkdir()
    done = type_command("python", "-m", f"gpt2_repro.{command}", tmp_path / "some")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert "is no checkpoint" in done.stderr or "is no run folder" in done.stderr


def test_under_a_launcher_the_line_stands_alone_and_the_launcher_quotes_it(type_command, tmp_path: Path) -> None:
    errors = tmp_path / "error.json"
    for rank, lines in (("0", 1), ("1", 0)):
        done = type_command(
            "python", "train.py", "recipes/nothing.yaml", LOCAL_RANK=rank, TORCHELASTIC_ERROR_FILE=str(errors)
        )
        assert done.returncode == 2 and len(done.stderr.splitlines()) == lines
        assert json.loads(errors.read_text())["message"].startswith("error: there is no recipe recipes/nothing.yaml")


@pytest.mark.slow
def test_the_bare_command_without_data_says_what_prepares_it(type_warm) -> None:
    if Path("data/fineweb-10bt").exists():
        pytest.skip("the data is prepared here")
    done = type_warm("launch", 8, "train.py")
    line = "error: there is no data/fineweb-10bt: prepare the data first with `python prepare_data.py"
    assert done.returncode != 0
    lines = [text.strip() for text in done.stderr.splitlines() if text.strip("=- ")]
    # By rank 0, if no other rank was faster and had the launcher end it; and by the launcher, last.
    told = f"{line} recipes/gpt2_124m.yaml`"
    assert lines[-1].endswith(told) and lines.count(told) <= 1


def test_weights_of_another_tokenizer_are_refused(refused, documents: list[str], tmp_path: Path) -> None:
    shape = {"vocab_size": 300, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path / "other")
    train_tokenizer([text[::-1] for text in documents], 300, tmp_path / "other", sequence_length=32)
    assert "other meanings than the prepared data" in refused("--init_from", tmp_path / "other")
