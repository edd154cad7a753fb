"""Launcher, micro-batch size and interruptions do not change losses or weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.prepare import prepare
from tests.faults.runs import losses, status


# Launcher, rows per pass, class of the engine, and ZeRO stage.
LAYOUTS = {
    "8x1": (("python",), 8, "GPT2LMHeadModel", None),
    "4x2": (("python",), 4, "GPT2LMHeadModel", None),
    "ddp-2x4": (("ddp", 2), 4, "DistributedDataParallel", None),
    "zero1-1x8": (("launch", 1), 8, "DeepSpeedEngine", 1),
    "zero1-2x4": (("launch", 2), 4, "DeepSpeedEngine", 1),
    "zero1-2x2x2": (("launch", 2), 2, "DeepSpeedEngine", 1),
    "zero2-2x2x2": (("zero2", 2), 2, "DeepSpeedEngine", 2),
    "zero3-2x2x2": (("zero3", 2), 2, "DeepSpeedEngine", 3),
    "fsdp2-2x2x2": (("fsdp2", 2), 2, "FSDPGPT2LMHeadModel", None),
}


IN_BF16 = [((name, 2), "true") for name in ("launch", "zero2", "zero3", "fsdp2")]


@pytest.fixture(scope="module")
def reference(train, tmp_path_factory) -> Path:
    """Return the run to compare with: one process, fp32, no gradient accumulation."""
    return train(tmp_path_factory.mktemp("reference") / "run")


def engine_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "environment.json").read_text(encoding="utf-8"))["engine"]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "final" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_changes_neither_losses_nor_weights(name: str, reference: Path, train, events, tmp_path) -> None:
    launcher, micro, engine, stage = LAYOUTS[name]
    options = ("--per_device_train_batch_size", micro, "--dataloader_num_workers", 2)
    run = train(tmp_path / "run", *options, launcher=launcher)
    for ours, theirs in zip(events(run), events(reference), strict=True):
        assert ours.keys() - {"mfu"} == theirs.keys() - {"mfu"}
        for key, tolerance in (("loss", 1e-5), ("eval_loss", 1e-5), ("learning_rate", 0), ("tokens", 0)):
            assert ours.get(key) == pytest.approx(theirs.get(key), abs=tolerance), (ours["step"], key)
        assert ours.get("grad_norm", 0.0) == pytest.approx(theirs.get("grad_norm", 0.0), rel=1e-4)
    final, expected = weights(run), weights(reference)
    assert final.keys() == expected.keys()
    assert all(torch.allclose(weight, expected[key], atol=1e-4) for key, weight in final.items())
    texts = [(each / "samples.jsonl").read_text(encoding="utf-8").split("\n")[0] for each in (run, reference)]
    assert texts[0] == texts[1]
    if name == "8x1":
        assert losses(run) == losses(reference) and len(losses(run)) == 8 + 3
        assert all(torch.equal(weight, expected[key]) for key, weight in final.items())  # the runs are bit-identical

    processes = launcher[1] if len(launcher) == 2 else 1
    facts = dict.fromkeys(("weights", "matrix_products", "master_weights", "gradient_sums"), "float32")
    facts |= {"engine": engine, "zero_stage": stage, "processes": processes, "clip": 1.0, "compiled": False}
    facts |= {"optimizer": "AdamW"}
    facts |= {"rows_per_pass": micro, "accumulation_steps": 8 // micro // processes} if stage else {}
    assert facts.items() <= engine_of(run).items()


def test_zero1_on_two_processes_is_one_process(train, events, tmp_path: Path) -> None:
    """Also if it resumes in the second epoch, and averages its weights."""
    options = ("--tokens_per_step", 2048, "--ema_steps", 3, "--max_steps", 28, "--eval_steps", 14)
    straight = train(tmp_path / "straight", *options, "--per_device_train_batch_size", 64)
    run, zero = tmp_path / "run", (*options, "--per_device_train_batch_size", 16)
    for stop in (25, 0):
        train(run, *zero, "--stop_at_step", stop, launcher=("launch", 2))
    for key in ("loss", "eval_loss", "eval_EMA_loss"):
        ours, theirs = ({line["step"]: line[key] for line in events(each) if key in line} for each in (run, straight))
        assert theirs == pytest.approx({step: ours[step] for step in theirs}, abs=1e-5) and len(theirs) >= 2, key
    final, expected = weights(run), weights(straight)
    assert all(torch.allclose(weight, expected[key], atol=1e-4) for key, weight in final.items())


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "bf16"), [(("python",), "false"), (("torchrun", 2), "false"), *IN_BF16], ids=str)
def test_a_resumed_run_is_the_straight_one(launcher, bf16: str, train, tmp_path: Path) -> None:
    options = ("--bf16", bf16, "--per_device_train_batch_size", 4, "--dropout", 0.1, "--dataloader_num_workers", 2)
    # Saves in the background do not change results either.
    straight = train(tmp_path / "straight", *options, "--background_save", "false", launcher=launcher)
    run = train(tmp_path / "run", *options, "--stop_at_step", 3, launcher=launcher)
    told = status(run)
    assert (told["state"], told["step"], told["tokens"]) == ("stopped", 3, 3 * 256)
    assert not (run / "final").exists() and (run / "checkpoint-3" / "manifest.json").exists()
    saved = load_file(run / "checkpoint-3" / "model.safetensors")
    assert saved["transformer.wte.weight"].shape == (320, 32)  # the complete weight, even if it is sharded
    train(run, *options, launcher=launcher)
    assert engine_of(run)["matrix_products"] == ("bfloat16" if bf16 == "true" else "float32")
    finals = [weights(each) for each in (run, straight)]
    ours, theirs = (set(losses(each)) for each in (run, straight))
    assert len(theirs) == 8 + 3 and len(ours - theirs) == 1 and theirs < ours  # it was also validated at the stop
    assert all(torch.equal(weight, finals[1][name]) for name, weight in finals[0].items())


@pytest.mark.parametrize("launcher", [("python",), ("launch", 1), ("zero2", 2), ("zero3", 2), ("fsdp2", 2)], ids=str)
def test_fine_tuning_starts_from_weights_that_are_not_rounded(launcher, reference: Path, train, tmp_path) -> None:
    options = ("--init_from", reference / "final", "--bf16", "true", "--max_steps", 1, "--learning_rate", 1e-12)
    options = (*options, "--per_device_train_batch_size", 4, "--warmup_steps", 0, "--weight_decay", 0)
    run = train(tmp_path / "run", *options, launcher=launcher)
    ours, theirs = weights(run), weights(reference)
    # bf16 has 8 significant bits: rounded weights are off by up to 2e-3 relative.
    assert all(torch.allclose(weight, theirs[name], rtol=0, atol=1e-8) for name, weight in ours.items())


@pytest.mark.slow
def test_bf16_under_zero1_is_bf16_on_one_process(train, events, tmp_path: Path) -> None:
    """DeepSpeed's engine of GPUs trains as autocast does, on one process and on two."""
    layouts = {"zero1-1x8": (("launch", 1), 8), "zero1-2x4": (("launch", 2), 4), "zero1-2x2x2": (("launch", 2), 2)}
    runs = {}
    for name, (launcher, micro) in (layouts | {"autocast": (("python",), 8)}).items():
        options = ("--bf16", "true", "--per_device_train_batch_size", micro)
        runs[name] = train(tmp_path / name, *options, launcher=launcher)
    engines = {name: engine_of(run) for name, run in runs.items()}
    assert all(engine["matrix_products"] == "bfloat16" for engine in engines.values())
    assert all(engines[name]["zero_optimizer"] == "BF16_Optimizer" for name in engines if name != "autocast")
    # Measured: up to 9e-4 from autocast and 5e-4 among layouts, whose gradients are summed in bf16. Equal weights give
    # the losses of step 1. The norm also shows a wrong scale, which AdamW would hide.
    one, *others = map(losses, runs.values())
    for other in others:
        assert [entry[:2] for entry in other] == [entry[:2] for entry in one]
        assert [loss for *_, loss in other] == pytest.approx([loss for *_, loss in one], abs=2e-3)
        assert [loss for *_, loss in other[:2]] == pytest.approx([loss for *_, loss in one[:2]], abs=1e-4)
    norms = [[event["grad_norm"] for event in events(run) if "grad_norm" in event] for run in runs.values()]
    assert all(norm == pytest.approx(norms[0], rel=1e-2) for norm in norms)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [("launch", 2), ("zero3", 2), ("torchrun", 2), ("fsdp2", 2)], ids=str)
def test_the_gradient_norm_of_a_large_embedding(launcher, train, events, corpus, real_data: Path, tmp_path) -> None:
    """GPT-2's vocabulary has the same gradient norm on one and two processes."""
    # On a CPU, torch's own fp32 norm of the embedding's 6.4M gradients is up to 7e-4 too small.
    files = [str(path) for path in corpus]
    data = {"data_files": files, "tokenizer": str(real_data / "gpt2"), "sequence_length": 32, "split": "hash"}
    prepare(DataArguments(**data, validation_fraction=0.1, dataset_dir=str(tmp_path / "data")))
    options = ("--dataset_dir", tmp_path / "data", "--n_embd", 128, "--max_steps", 4, "--eval_strategy", "no")
    norms = []
    for name, micro in ((("python",), 8), (launcher, 4)):
        run = train(tmp_path / str(micro), *options, "--per_device_train_batch_size", micro, launcher=name)
        norms.append([event["grad_norm"] for event in events(run) if "grad_norm" in event])
    one, two = norms
    assert len(one) == 4 and two == pytest.approx(one, rel=1e-6)
