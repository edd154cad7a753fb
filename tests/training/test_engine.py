"""The training engine of GPUs computes the same with and without this project's changes to DeepSpeed and accelerate."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.training.bf16_steps import LIMIT, STEPS
from tests.training.by_hand import untrained


BAD = [3, 5]  # steps whose gradients are not finite
CLIPPED = [2, 6]


@pytest.fixture(scope="module")
def engines(type_warm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what bf16_steps.py writes, for DeepSpeed and for DeepSpeed with our changes."""
    folder = tmp_path_factory.mktemp("engines")
    results = {}
    for kind in ("stock", "ours"):
        path = folder / f"{kind}.pt"
        done = type_warm("python", "tests/training/bf16_steps.py", path, kind)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        results[kind] = torch.load(path)
    return results


def test_the_engine_of_gpus_updates_as_deepspeed_does(engines) -> None:
    """Finite gradients are added and clipped in the same way, bit for bit."""
    for step, (stock, ours) in enumerate(zip(engines["stock"]["steps"], engines["ours"]["steps"], strict=True), 1):
        for name, expected in stock["tensors"].items():
            if name == "norm":
                continue
            assert expected.isfinite().all() and torch.equal(ours["tensors"][name], expected), (step, name)
        norm, expected = ours["tensors"]["norm"], stock["tensors"]["norm"]
        assert norm.isfinite() == expected.isfinite() == (step not in BAD)
        if step not in BAD:
            assert norm == expected and (norm > LIMIT) == (step in CLIPPED)


def test_updates_that_are_not_finite_change_nothing(engines) -> None:
    steps = engines["ours"]["steps"]
    assert engines["ours"]["skipped"] == BAD
    for step in range(2, len(STEPS) + 1):
        before, after = (steps[index]["tensors"] for index in (step - 2, step - 1))
        for name in ("masters", "weights", "first moments", "second moments"):
            assert torch.equal(before[name], after[name]) == (step in BAD), (step, name)


def test_a_clipped_gradient_has_the_norm_of_the_limit(engines) -> None:
    for step in CLIPPED:
        before, after = (engines["ours"]["steps"][index]["tensors"]["first moments"] for index in (step - 2, step - 1))
        gradient = (after - 0.9 * before) / 0.1
        assert gradient.norm().item() == pytest.approx(LIMIT, rel=1e-3)


def test_the_changes_avoid_what_they_should(engines) -> None:
    """Otherwise DeepSpeed or accelerate no longer calls what is replaced, and steps are slower."""
    assert all(step["waits"] > 0 for step in engines["stock"]["steps"])
    assert all(step["waits"] == 0 for step in engines["ours"]["steps"])
    passes = sum(map(len, STEPS))
    assert engines["stock"]["calls"] == {"train": passes, "zero_grad": len(STEPS), "add": 4 * passes}
    assert engines["ours"]["calls"] == {"train": 0, "zero_grad": 0, "add": 4 * passes}


PATHS = [
    (("python",), "false"),
    (("launch", 1), "false"),
    (("launch", 1), "true"),
    (("ddp", 2), "false"),
    (("launch", 2), "true"),
]


def first_moments(checkpoint: Path) -> list[torch.Tensor]:
    """Return the first moments of AdamW in a checkpoint, of all processes."""
    shards = sorted(checkpoint.glob("global_step*/*optim_states.pt"))
    moments = []
    for path in shards or [checkpoint / "optimizer.pt"]:
        state = torch.load(path, weights_only=False)
        if shards:
            state = state["optimizer_state_dict"].get("base_optimizer_state", state["optimizer_state_dict"])
        moments += [entry["exp_avg"].float().flatten() for entry in state["state"].values()]
    return moments


@pytest.mark.parametrize(("layout", "bf16"), PATHS, ids=str)
def test_gradients_are_clipped_to_the_limit_of_the_recipe(layout, bf16: str, train, tmp_path: Path) -> None:
    """AdamW's first update is the same for any scale of the gradient, but its first moment is not."""
    options = ("--max_steps", 1, "--save_steps", 1, "--eval_strategy", "no", "--per_device_train_batch_size", 4)
    options += ("--max_grad_norm", 0.01, "--bf16", bf16, "--warmup_steps", 0, "--adam_beta1", 0.75)
    run = train(tmp_path / "run", *options, launcher=layout)
    moments = torch.cat(first_moments(run / "checkpoint-1"))
    assert moments.norm().item() == pytest.approx((1 - 0.75) * 0.01, rel=1e-3)


@pytest.mark.parametrize("layout", [("python",), ("launch", 1), ("ddp", 2)], ids=str)
def test_the_first_update_of_sgd_has_the_length_of_the_limit(layout, train, tmp_path: Path) -> None:
    options = ("--max_steps", 1, "--save_steps", 1, "--eval_strategy", "no", "--per_device_train_batch_size", 4)
    options += ("--max_grad_norm", 0.01, "--optim", "sgd", "--learning_rate", 0.5, "--warmup_steps", 0)
    run = train(tmp_path / "run", *options, "--weight_decay", 0, "--lr_scheduler_type", "constant", launcher=layout)
    before = untrained(run)
    after = load_file(run / "checkpoint-1" / "model.safetensors")
    changes = [after[name] - weight for name, weight in before.state_dict().items() if name in after]
    assert torch.cat([change.flatten() for change in changes]).norm().item() == pytest.approx(0.5 * 0.01, rel=1e-3)
