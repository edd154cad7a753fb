"""What is logged is the mean negative log-likelihood per target, computed here a second time in plain PyTorch."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from datasets import load_from_disk
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, set_seed

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.collator import EpochSampler, collate_rows
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.model.build import build_model
from gpt2_repro.model.configuration import build_config


@pytest.fixture(scope="module")
def folder(tiny_recipe: Path) -> Path:
    return Path(yaml.safe_load(tiny_recipe.read_text())["data"]["dataset_dir"])


def rows(folder: Path, split: str) -> torch.Tensor:
    return torch.tensor(np.asarray(load_from_disk(str(folder / split)).with_format("numpy")["input_ids"][:]))


def mean_nll(model, table: torch.Tensor, vocabulary: int) -> float:
    """The stock model's logits, one row at a time, summed in double precision."""
    model.eval()
    total, targets = 0.0, 0
    with torch.no_grad():
        for row in table:
            logits = model(row[None, :-1]).logits[0, :, :vocabulary].double()
            total += F.cross_entropy(logits, row[1:], reduction="sum").item()
            targets += len(row) - 1
    return total / targets


def first_model(run: Path):
    """The fresh weights of the run: the same seed and the same configuration."""
    (checkpoint, *_) = run.glob("checkpoint-*")
    config = AutoConfig.from_pretrained(checkpoint)
    set_seed(json.loads((run / "environment.json").read_text())["seed"])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("launcher", [("python",), ("launch", 2)], ids=["one-process", "two-zero1"])
def test_logged_losses_equal_a_hand_computation(launcher, train, events, folder: Path, tmp_path: Path) -> None:
    micro = 8 if launcher == ("python",) else 2  # two processes accumulate over two passes
    # 151 rows: no number of processes and no batch size divides them.
    options = ("--per_device_train_batch_size", micro, "--eval_tokens", 151 * 32)
    run = train(tmp_path / "run", *options, launcher=launcher)
    logged = events(run)
    validation, vocabulary = rows(folder, "validation")[:151], 300

    untrained = first_model(run)
    by_step = {event["step"]: event for event in logged if "eval_loss" in event}
    assert sorted(by_step) == [0, 4, 8]
    assert by_step[0]["eval_loss"] == pytest.approx(mean_nll(untrained, validation, vocabulary), abs=1e-5)
    assert by_step[0]["eval_tokens"] == validation[:, 1:].numel() == 151 * 32
    expected = math.log(vocabulary) + 32 * 0.02**2 / 2
    assert by_step[0]["eval_loss"] == pytest.approx(expected, abs=0.1)

    train_rows = rows(folder, "train")
    order = list(EpochSampler(len(train_rows), rows_per_step=8, seed=42, shuffle=True))
    first = next(event for event in logged if event["step"] == 1 and "loss" in event)
    assert first["loss"] == pytest.approx(mean_nll(untrained, train_rows[order[:8]], vocabulary), abs=1e-5)
    assert first["tokens"] == 256

    final = AutoModelForCausalLM.from_pretrained(run / "final")
    assert by_step[8]["eval_loss"] == pytest.approx(mean_nll(final, validation, vocabulary), abs=1e-5)


@pytest.mark.parametrize("launcher", [("python",), ("launch", 2)], ids=["one-process", "two-zero1"])
def test_every_epoch_has_an_order_of_its_own(launcher, train, events, folder: Path, tmp_path: Path) -> None:
    # A rate too small to move a weight: each step's loss is then the first model's on that step's rows.
    micro = 128 if launcher == ("python",) else 32
    options = ("--tokens_per_step", 128 * 32, "--per_device_train_batch_size", micro, "--learning_rate", 1e-30)
    table = rows(folder, "train")
    steps = len(table) // 128  # whole steps of an epoch
    long = (*options, "--max_steps", 2 * steps + 2, "--eval_strategy", "no", "--save_steps", 1000)
    run = train(tmp_path / "run", *long, "--stop_at_step", steps + 2, launcher=launcher)
    train(run, *long, launcher=launcher)  # resumed in the middle of the second epoch
    logged = {event["step"]: event["loss"] for event in events(run) if "loss" in event}
    assert sorted(logged) == list(range(1, 2 * steps + 3))

    untrained = first_model(run)
    per_row = torch.tensor([mean_nll(untrained, row[None], 300) for row in table])
    for step, loss in logged.items():
        epoch, place = divmod(step - 1, steps)
        sampler = EpochSampler(len(table), rows_per_step=128, seed=42, shuffle=True)
        sampler.set_epoch(epoch)
        order = list(sampler)[place * 128 : (place + 1) * 128]
        assert loss == pytest.approx(per_row[order].mean().item(), abs=1e-5), step


def test_learning_rates_and_gradient_norm_of_the_log(train, events, folder: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", "--final_learning_rate_fraction", 0.1)
    logged = [event for event in events(run) if "loss" in event]
    assert [event["step"] for event in logged] == list(range(1, 9))
    for event in logged:
        step = event["step"] - 1
        if step < 3:
            rate = 1e-2 * (step + 1) / 3
        else:
            rate = 1e-3 + 0.5 * (1 + math.cos(math.pi * (step - 3) / 5)) * (1e-2 - 1e-3)
        assert event["learning_rate"] == pytest.approx(rate, rel=1e-9)

    model = first_model(run)
    table = rows(folder, "train")
    batch = table[list(EpochSampler(len(table), rows_per_step=8, seed=42, shuffle=True))[:8]]
    logits = model(batch[:, :-1]).logits[..., :300]
    F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item()
    assert logged[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.slow
def test_under_zero1_in_bf16_the_fp32_masters_move(train, tmp_path: Path) -> None:
    options = ("--bf16", "true", "--per_device_train_batch_size", 4, "--learning_rate", 1e-3)
    run = train(tmp_path / "run", *options, launcher=("launch", 2))
    environment = json.loads((run / "environment.json").read_text())
    if environment["precision"] != "bf16":
        pytest.skip("this CPU has no bf16 instructions, so the run was in fp32")
    engine = environment["engine"]
    assert engine["engine"] == "DeepSpeedEngine" and engine["zero_stage"] == 1
    assert (engine["weights"], engine["masters"], engine["accumulation"]) == ("bfloat16", "float32", "float32")
    assert engine["optimizer"] == "AdamW" and engine["clip"] == 1.0
    assert engine["zero_optimizer"] == "BF16_Optimizer"  # the one that sums passes in fp32
    final = load_file(run / "final" / "model.safetensors")
    gains = torch.cat([weight for name, weight in final.items() if ".ln_" in name and name.endswith("weight")])
    # One bf16 step at 1.0 is 0.0039 and more than the whole run moves a gain: only an fp32 master can show it.
    assert (gains != 1.0).float().mean() > 0.95 and (gains - 1).abs().max() < 0.0039 * 2
    assert (gains.bfloat16().float() != gains).any()
    checkpoint = load_file(run / "checkpoint-8" / "model.safetensors")
    assert {weight.dtype for weight in checkpoint.values()} == {torch.bfloat16}
    for name, weight in final.items():
        stored = checkpoint[name][: len(weight)]
        assert torch.equal(weight.bfloat16(), stored), name


def test_the_id_that_separates_documents_is_a_target(folder: Path) -> None:
    separator = json.loads((folder / "manifest.json").read_text())["vocab_size"] - 1
    table = rows(folder, "train")
    assert (table == separator).any()
    batch = collate_rows([{"input_ids": row.numpy()} for row in table])
    assert torch.equal(batch["labels"], table[:, 1:]) and torch.equal(batch["input_ids"], table[:, :-1])


def test_a_model_that_learns_by_heart_writes_what_it_learnt() -> None:
    """Labels shifted twice, or not at all, would learn another text."""
    torch.manual_seed(0)
    config = build_config(ModelArguments(n_layer=1, n_head=2, n_embd=32), sequence_length=12, vocab_size=10)
    model = build_model(config, attention="causal_sdpa")
    text = np.tile([1, 2, 3, 4], 4)[:13]
    batch = collate_rows([{"input_ids": text}])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    # The first target is certain too: every row starts alike.
    assert loss.item() < 0.01
    prompt = torch.tensor([[1, 2]])
    mask = torch.ones_like(prompt)
    written = model.eval().generate(prompt, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert written[0].tolist() == [1, 2, 3, 4, 1, 2, 3, 4]


def test_a_loss_that_is_not_finite_is_shown(type_warm, tiny_recipe: Path, events, tmp_path: Path) -> None:
    special = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=32, n_embd=32, n_layer=2, n_head=2, **special))
    model.transformer.ln_f.weight.data[0] = math.nan
    model.save_pretrained(tmp_path / "nan")
    options = (
        "--init_from",
        tmp_path / "nan",
        "--max_steps",
        1,
        "--output_dir",
        tmp_path / "run",
        "--sample_tokens",
        0,
    )
    done = type_warm("python", "train.py", tiny_recipe, *options)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the validation loss is not finite at step 0" in done.stdout + done.stderr
    logged = events(tmp_path / "run")
    assert math.isnan(logged[0]["eval_loss"]) and math.isnan(next(e["loss"] for e in logged if "loss" in e))


@pytest.fixture(scope="module")
def wrapped_recipe(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe on windows of single documents, of 8 to 32 targets."""
    folder = tmp_path_factory.mktemp("wrapped")
    recipe = yaml.safe_load(tiny_recipe.read_text())
    recipe["data"] |= {"dataset_dir": str(folder / "data"), "packing": "wrap", "min_length": 8}
    prepare(DataArguments(**recipe["data"]))
    path = folder / "wrapped.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.mark.parametrize("launcher", [("python",), ("launch", 2)], ids=["one-process", "two-zero1"])
def test_padding_is_no_target(launcher, type_warm, wrapped_recipe: Path, events, tmp_path: Path) -> None:
    folder = Path(yaml.safe_load(wrapped_recipe.read_text())["data"]["dataset_dir"])
    micro = 8 if launcher == ("python",) else 2
    options = ("--output_dir", tmp_path / "run", "--per_device_train_batch_size", micro, "--learning_rate", 1e-30)
    for stop in (3, 0) if launcher == ("python",) else (0,):  # one of the two is interrupted
        done = type_warm(*launcher, "train.py", wrapped_recipe, *options, "--stop_at_step", stop)
        assert done.returncode == 0, done.stderr[-3000:]

    model = first_model(tmp_path / "run").eval()

    def nll(row: torch.Tensor) -> float:
        with torch.no_grad():
            logits = model(row[None, :-1]).logits[0, :, :300].double()
        return F.cross_entropy(logits, row[1:], reduction="sum").item()

    splits = {split: load_from_disk(str(folder / split))["input_ids"][:] for split in ("train", "validation")}
    table = {split: [torch.tensor(row) for row in splits[split]] for split in splits}
    assert len({len(row) for row in table["train"]}) > 3
    logged = events(tmp_path / "run")
    targets = sum(len(row) - 1 for row in table["validation"])
    by_hand = sum(map(nll, table["validation"])) / targets
    evaluations = [event for event in logged if "eval_loss" in event]
    stopped = [3] if launcher == ("python",) else []
    assert [event["step"] for event in evaluations] == [0, *stopped, 4, 8]
    assert all(event["eval_tokens"] == targets for event in evaluations)
    assert evaluations[0]["eval_loss"] == pytest.approx(by_hand, abs=1e-5)

    order = list(EpochSampler(len(table["train"]), rows_per_step=8, seed=42, shuffle=True))
    seen = 0
    for event in (event for event in logged if "loss" in event):
        step = [table["train"][place] for place in order[(event["step"] - 1) * 8 : event["step"] * 8]]
        count = sum(len(row) - 1 for row in step)
        seen += count
        assert event["loss"] == pytest.approx(sum(map(nll, step)) / count, abs=1e-5), event["step"]
        assert event["tokens"] == seen  # targets, not positions, and right after a resume
        batches = [step[first : first + micro] for first in range(0, 8, micro)]
        positions = sum(micro * max(len(row) - 1 for row in batch) for batch in batches)
        assert event["step_tokens"] == count
        assert event["padding"] == pytest.approx(1 - count / positions, abs=1e-4)
    assert seen < 8 * 8 * 32
