"""Values that a recipe leaves open are derived from the recipe and the machine."""

from pathlib import Path

import pytest

from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.errors import UserError
from gpt2_repro.hardware import Accelerator
from gpt2_repro.launchers import LAUNCHERS
from gpt2_repro.training.arguments import PretrainingArguments, load_recipe
from gpt2_repro.training.resolve import _list_price, resolve_arguments
from gpt2_repro.training.sizing import follow_data


@pytest.fixture
def resolve(tiny_recipe: Path, tmp_path: Path):
    def run(*options: str):
        recipe = load_recipe([str(tiny_recipe), "--output_dir", str(tmp_path / "run"), *options])
        return resolve_arguments(recipe)

    return run


def test_accumulation_and_steps_are_derived(resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PretrainingArguments, "n_gpu", property(lambda args: 4))
    args, plan = resolve("--per_device_train_batch_size", "2", "--max_steps", "0", "--total_tokens", "2600")
    assert args.gradient_accumulation_steps == plan.gradient_accumulation_steps == 4
    assert args.max_steps == plan.max_steps == 10 and args.accelerator_config.even_batches
    assert args._n_gpu == 1  # each process uses one of several GPUs
    # --eval_strategy no also turns off the validation at the start.
    assert args.eval_on_start and not resolve("--eval_strategy", "no")[0].eval_on_start


def test_schedule_names_are_not_limited_to_transformers(tmp_path: Path) -> None:
    options = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "max_steps": 1}
    assert PretrainingArguments(lr_scheduler_type="sawtooth", **options).lr_scheduler_type == "sawtooth"


def test_batches_by_length_are_not_compiled(resolve) -> None:
    wrap = ("--packing", "wrap", "--min_length", "8")
    by_length = (*wrap, "--train_sampling_strategy", "group_by_length", "--tokens_per_step")
    args, plan = resolve(*by_length, "2048")
    assert not args.compile_loss and plan.by_length and not args.accelerator_config.even_batches
    assert args.gradient_accumulation_steps == plan.gradient_accumulation_steps > 1
    with pytest.raises(UserError, match="--torch_compile"):
        resolve(*by_length, "2048", "--torch_compile")


def test_data_smaller_than_one_step_is_refused(
    tiny_recipe: Path, wrapped_recipe: Path, train, events, tmp_path: Path, monkeypatch
) -> None:
    def fix(*options: object, recipe: Path = tiny_recipe) -> str:
        with pytest.raises(UserError) as error:
            follow_data(load_recipe([str(recipe), "--output_dir", str(tmp_path / "none"), *map(str, options)]))
        return str(error.value).partition("Pass at most ")[2].partition(", or")[0]

    counts = {
        path: PreparedData.read(path.with_name("data")).manifest.counts for path in (tiny_recipe, wrapped_recipe)
    }
    rows, more = counts[tiny_recipe]["train"].rows, ("--tokens_per_step", 10**6)
    most = f"--tokens_per_step {32 * (rows // 8 * 8)}"
    # The length of the run is not the mistake, although it is also less than one step.
    assert fix(*more) == fix(*more, "--epochs", 1) == most
    run = train(tmp_path / "most", *most.split(), "--max_steps", 2, "--warmup_steps", 0)
    assert [event["step"] for event in events(run) if "loss" in event] == [1, 2]
    batch = f"--per_device_train_batch_size {rows}"
    assert fix(*more, "--per_device_train_batch_size", rows + 1) == f"--tokens_per_step {32 * rows} {batch}"
    by_length = ("--train_sampling_strategy", "group_by_length")
    targets = counts[wrapped_recipe]["train"].row_tokens
    assert fix(*more, *by_length, recipe=wrapped_recipe) == f"--tokens_per_step {targets}"
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert fix(*more) == f"--tokens_per_step {32 * (rows // 24 * 24)}"
    monkeypatch.setenv("WORLD_SIZE", str(rows + 1))
    assert not fix(*more)  # no step has rows for all processes


@pytest.mark.parametrize("launcher", ["zero3", "fsdp2"])
def test_sharded_weights_are_not_compiled(resolve, launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt2_repro.training.resolve.current_launcher", lambda: LAUNCHERS[launcher])
    monkeypatch.setattr("gpt2_repro.training.resolve.allow_fsdp_on_cpu", lambda: None)
    assert not resolve()[0].compile_loss
    for words in (("--torch_compile",), ("--optim", "muon"), ("--ema_steps", "3")):
        with pytest.raises(UserError, match=f"{launcher}.*zero1.yaml"):
            resolve(*words)


@pytest.mark.parametrize(("name", "expected"), [("NVIDIA A100-SXM4-80GB", 8 * 1.79), ("Tesla T4", 0.0)])
def test_list_price_covers_the_cards_of_all_processes(name: str, expected: float, resolve, monkeypatch) -> None:
    card = Accelerator("cuda", name, 8, None, None)
    monkeypatch.setenv("WORLD_SIZE", "8")
    with monkeypatch.context() as cards:
        cards.setattr("gpt2_repro.hardware.find_accelerator", lambda **options: card)
        price = _list_price(use_cpu=False)
    assert price == pytest.approx(expected)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr("gpt2_repro.training.resolve._list_price", lambda **options: price)
    assert resolve()[0].usd_per_hour == price
    assert resolve("--usd_per_hour", "9.5")[0].usd_per_hour == 9.5  # a price that is passed replaces the list price
