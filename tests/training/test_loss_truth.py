"""What is logged is the mean negative log-likelihood per target, computed here a second time in plain PyTorch."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from gpt2_repro.data.collator import EpochSampler
from tests.training.by_hand import mean_nll, nll, rows_of, targets_of, untrained


LAUNCHERS = pytest.mark.parametrize("launcher", [("python",), ("launch", 2)], ids=["one-process", "two-zero1"])


def order_of(rows: list, *, rows_per_step: int = 8, epoch: int = 0) -> list[int]:
    sampler = EpochSampler(len(rows), rows_per_step=rows_per_step, seed=42, shuffle=True)
    sampler.set_epoch(epoch)
    return list(sampler)


@LAUNCHERS
def test_the_log_equals_a_hand_computation(launcher, train, events, data: Path, tmp_path: Path) -> None:
    micro = 8 if launcher == ("python",) else 2  # two processes accumulate over two passes
    # 151 rows: no number of processes and no batch size divides them.
    options = ("--per_device_train_batch_size", micro, "--eval_tokens", 151 * 32)
    run = train(tmp_path / "run", *options, "--final_learning_rate_fraction", 0.1, launcher=launcher)
    fresh, validation = untrained(run), rows_of(data, "validation")[:151]
    validated = {event["step"]: event for event in events(run) if "eval_loss" in event}
    assert sorted(validated) == [0, 4, 8] and validated[0]["eval_tokens"] == 151 * 32
    assert validated[0]["eval_loss"] == pytest.approx(mean_nll(fresh, validation), abs=1e-5)
    assert validated[0]["eval_loss"] == pytest.approx(math.log(300) + 32 * 0.02**2 / 2, abs=0.1)
    final = AutoModelForCausalLM.from_pretrained(run / "final")
    assert validated[8]["eval_loss"] == pytest.approx(mean_nll(final, validation), abs=1e-5)

    logged = [event for event in events(run) if "loss" in event]
    rows = rows_of(data, "train")
    batch = torch.stack([rows[place] for place in order_of(rows)[:8]])
    F.cross_entropy(fresh(batch[:, :-1]).logits[..., :300].flatten(0, 1), batch[:, 1:].flatten()).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in fresh.parameters()]).norm().item()
    assert logged[0]["loss"] == pytest.approx(mean_nll(fresh, list(batch)), abs=1e-5)
    assert logged[0]["tokens"] == 256 and logged[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    fall = [1e-3 + 0.5 * (1 + math.cos(math.pi * step / 5)) * 9e-3 for step in range(5)]
    assert [event["step"] for event in logged] == list(range(1, 9))
    rates = [event["learning_rate"] for event in logged]
    assert rates == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, *fall], rel=1e-9)


@LAUNCHERS
def test_every_epoch_has_an_order_of_its_own(launcher, train, events, data: Path, tmp_path: Path) -> None:
    # A rate too small to move a weight: each step's loss is then the first model's on that step's rows.
    micro = 128 if launcher == ("python",) else 32
    rows = rows_of(data, "train")
    steps = len(rows) // 128  # whole steps of an epoch
    options = ("--tokens_per_step", 128 * 32, "--per_device_train_batch_size", micro, "--learning_rate", 1e-30)
    options += ("--max_steps", 2 * steps + 2, "--eval_strategy", "no", "--save_steps", 1000)
    run = train(tmp_path / "run", *options, "--stop_at_step", steps + 2, launcher=launcher)
    train(run, *options, launcher=launcher)  # resumed in the middle of the second epoch
    logged = {event["step"]: event["loss"] for event in events(run) if "loss" in event}
    assert sorted(logged) == list(range(1, 2 * steps + 3))
    fresh = untrained(run)
    per_row = torch.tensor([nll(fresh, row) / 32 for row in rows])
    for step, loss in logged.items():
        epoch, place = divmod(step - 1, steps)
        order = order_of(rows, rows_per_step=128, epoch=epoch)[place * 128 : (place + 1) * 128]
        assert loss == pytest.approx(per_row[order].mean().item(), abs=1e-5), step


@pytest.mark.slow
def test_under_zero1_in_bf16_the_fp32_masters_move(train, tmp_path: Path) -> None:
    options = ("--bf16", "true", "--per_device_train_batch_size", 4, "--learning_rate", 1e-3)
    run = train(tmp_path / "run", *options, launcher=("launch", 2))
    environment = json.loads((run / "environment.json").read_text())
    if environment["precision"] != "bf16":
        pytest.skip("this CPU has no bf16 instructions, so the run was in fp32")
    engine = environment["engine"]
    assert (engine["weights"], engine["masters"], engine["accumulation"]) == ("bfloat16", "float32", "float32")
    assert engine["zero_optimizer"] == "BF16_Optimizer"  # the one that sums passes in fp32
    final = load_file(run / "final" / "model.safetensors")
    gains = torch.cat([weight for name, weight in final.items() if ".ln_" in name and name.endswith("weight")])
    # One bf16 step at 1.0 is 0.0039 and more than the whole run moves a gain: only an fp32 master can show it.
    assert (gains != 1.0).float().mean() > 0.95 and (gains - 1).abs().max() < 0.0039 * 2
    checkpoint = load_file(run / "checkpoint-8" / "model.safetensors")
    assert {weight.dtype for weight in checkpoint.values()} == {torch.bfloat16}
    assert all(torch.equal(weight.bfloat16(), checkpoint[name][: len(weight)]) for name, weight in final.items())


def test_a_loss_that_is_not_finite_is_shown(typed, events, tmp_path: Path) -> None:
    special = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=32, n_embd=32, n_layer=2, n_head=2, **special))
    model.transformer.ln_f.weight.data[0] = math.nan
    model.save_pretrained(tmp_path / "nan")
    run, options = tmp_path / "run", ("--max_steps", 1, "--sample_tokens", 0)
    done = typed(run, "--init_from", tmp_path / "nan", *options)
    assert done.returncode == 0 and "not finite at step 0: eval_loss" in done.stdout + done.stderr
    validated, trained, *_ = events(run)
    assert math.isnan(validated["eval_loss"]) and math.isnan(trained["loss"])


@LAUNCHERS
def test_padding_is_no_target(launcher, type_warm, wrapped_recipe: Path, events, tmp_path: Path) -> None:
    one, run = launcher == ("python",), tmp_path / "run"
    micro = 8 if one else 2
    options = ("--output_dir", run, "--per_device_train_batch_size", micro, "--learning_rate", 1e-30)
    for stop in (3, 0) if one else (0,):  # one of the two is interrupted
        done = type_warm(*launcher, "train.py", wrapped_recipe, *options, "--stop_at_step", stop)
        assert done.returncode == 0, done.stderr[-3000:]

    fresh = untrained(run)
    rows, validation = (rows_of(wrapped_recipe.with_name("data"), split) for split in ("train", "validation"))
    assert len({len(row) for row in rows}) > 3
    validated = [event for event in events(run) if "eval_loss" in event]
    assert [event["step"] for event in validated] == ([0, 3, 4, 8] if one else [0, 4, 8])
    assert {event["eval_tokens"] for event in validated} == {targets_of(validation)}
    assert validated[0]["eval_loss"] == pytest.approx(mean_nll(fresh, validation), abs=1e-5)

    order, seen = order_of(rows), 0
    for event in (event for event in events(run) if "loss" in event):
        step = [rows[place] for place in order[(event["step"] - 1) * 8 : event["step"] * 8]]
        seen += targets_of(step)
        assert event["loss"] == pytest.approx(mean_nll(fresh, step), abs=1e-5), event["step"]
        # Targets, not positions, and right after a resume.
        assert (event["tokens"], event["step_tokens"]) == (seen, targets_of(step))
        batches = [step[first : first + micro] for first in range(0, 8, micro)]
        positions = sum(micro * max(len(row) - 1 for row in batch) for batch in batches)
        assert event["padding"] == pytest.approx(1 - targets_of(step) / positions, abs=1e-4)
    assert seen < 8 * 8 * 32
