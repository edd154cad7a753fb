"""What a recipe becomes on this machine."""

from pathlib import Path

import pytest

from gpt2_repro.errors import UserError
from gpt2_repro.hardware import Accelerator
from gpt2_repro.recipe import parse_recipe
from gpt2_repro.training.arguments import PretrainingArguments
from gpt2_repro.training.resolve import _list_price, resolve_arguments


@pytest.fixture
def resolve(tiny_recipe: Path, tmp_path: Path):
    def run(*options: str, manifest: dict | None = None):
        words = [str(tiny_recipe), "--output_dir", str(tmp_path / "run"), *options]
        asked = parse_recipe(words, sections={"training": PretrainingArguments}, options=("training",)).values
        return resolve_arguments(asked["training"], sequence_length=32, stem="tiny", manifest=manifest)

    return run


def test_accumulation_and_steps_are_derived(resolve) -> None:
    args, plan = resolve("--per_device_train_batch_size", "2", "--max_steps", "0", "--total_tokens", "2600")
    assert args.gradient_accumulation_steps == plan.gradient_accumulation_steps == 4
    assert args.max_steps == plan.max_steps == 10


def test_one_process_takes_one_of_several_gpus(resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PretrainingArguments, "n_gpu", property(lambda args: 4))
    args, _ = resolve()
    assert args._n_gpu == 1


def test_rows_by_length_are_not_compiled(resolve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    wrap = {"request": {"packing": "wrap", "min_length": 8}, "counts": {"train": {"row_tokens": 4096}}}
    by_length = ("--train_sampling_strategy", "group_by_length", "--tokens_per_step", "2048")
    assert resolve()[0].accelerator_config.even_batches and "compilation: off" not in caplog.text
    args, plan = resolve(*by_length, manifest=wrap)
    assert not args.compile_loss and plan.by_length and not args.accelerator_config.even_batches
    assert args.gradient_accumulation_steps == plan.gradient_accumulation_steps > 1
    assert "compilation: off, for train_sampling_strategy group_by_length" in caplog.text
    with pytest.raises(UserError, match="--train_sampling_strategy group_by_length .* --torch_compile"):
        resolve(*by_length, "--torch_compile", manifest=wrap)
    with pytest.raises(UserError, match="have 4,096 targets, less than one step of 8,192"):
        resolve(*by_length[:2], "--tokens_per_step", "8192", manifest=wrap)


def test_under_sharded_weights_nothing_is_compiled(
    resolve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("gpt2_repro.training.resolve.launcher_name", lambda: "zero3")
    assert not resolve()[0].compile_loss and "compilation: off, for zero3 fetches" in caplog.text
    with pytest.raises(UserError, match="zero3 fetches .* leave out --torch_compile, or launch .*zero1.yaml"):
        resolve("--torch_compile")
    for launcher, name in (("zero3", "ZeRO"), ("fsdp2", "FSDP")):
        monkeypatch.setattr("gpt2_repro.training.resolve.launcher_name", lambda launcher=launcher: launcher)
        with pytest.raises(UserError, match=f"{name} cuts them up: launch with .*ddp.yaml"):
            resolve("--optim", "muon")


def test_never_validating_means_not_at_the_start_either(resolve) -> None:
    assert resolve()[0].eval_on_start
    assert not resolve("--eval_strategy", "no")[0].eval_on_start


@pytest.mark.parametrize(("name", "expected"), [("NVIDIA A100-SXM4-80GB", 8 * 1.79), ("Tesla T4", 0.0)])
def test_the_list_price_is_that_of_all_processes_cards(
    name: str, expected: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    card = Accelerator("cuda", name, 8, None, None)
    monkeypatch.setattr("gpt2_repro.hardware.find_accelerator", lambda **options: card)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert _list_price(use_cpu=False) == pytest.approx(expected)
    assert ("A100 SXM 80 GB, RunPod secure's list price of 2026-11-09" in caplog.text) == (expected > 0)


def test_a_typed_price_outweighs_the_list(resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt2_repro.training.resolve._list_price", lambda **options: 14.32)
    assert resolve()[0].usd_per_hour == 14.32
    assert resolve("--usd_per_hour", "9.5")[0].usd_per_hour == 9.5
