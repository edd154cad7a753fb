"""What a save copies in the background does not change before it is copied."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves


@pytest.fixture
def saved(type_warm, tiny_recipe: Path, tmp_path: Path) -> Callable[..., list[Path]]:
    """Return a function that trains with and without saves in the background, and returns both run directories.

    Copies in the background begin late, so that a step or a validation comes first if it does not wait.
    """

    def train(script: str, *options: object, layout: tuple[object, ...], **environment: str) -> list[Path]:
        runs = []
        for name, in_background in (("at once", "false"), ("later", "true")):
            run = tmp_path / name
            words = (*layout, script, tiny_recipe, "--output_dir", run, "--background_save", in_background)
            done = type_warm(*words, *options, SLOW_COPIES="1", **environment)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
            runs.append(run)
        return runs

    return train


def require_equal(run: Path, other: Path, checkpoint: str) -> None:
    """Compare all tensors of a checkpoint of two runs."""
    names = sorted(str(path.relative_to(run / checkpoint)) for path in (run / checkpoint).rglob("*.pt"))
    names = [name for name in names if "optim" in name or "model_states" in name]
    assert names
    for name in names:
        trees = [torch.load(each / checkpoint / name, weights_only=False) for each in (run, other)]
        leaves = [[leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)] for tree in trees]
        assert leaves[0] and all(map(torch.equal, *leaves)), name
    files = [path.name for path in (run / checkpoint).glob("*.safetensors")]
    assert "model.safetensors" in files
    for name in files:  # with --ema_steps, there are two
        weights, others = (load_file(each / checkpoint / name) for each in (run, other))
        assert weights.keys() == others.keys()
        assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


BRIEF = ("--max_steps", 3, "--save_steps", 2, "--warmup_steps", 0)


@pytest.mark.parametrize("layout", [("python",), ("launch", 1)], ids=str)
def test_the_next_step_waits(layout, saved) -> None:
    """Under DeepSpeed only the hook of the optimizer waits: the update comes before Trainer asks for the norm."""
    runs = saved("tests/training/gpu_train.py", *BRIEF, "--eval_strategy", "no", layout=layout)
    require_equal(*runs, "checkpoint-2")


def test_a_validation_of_the_average_waits(saved) -> None:
    """It exchanges the weights and their average."""
    options = (*BRIEF, "--ema_steps", 4, "--eval_steps", 2)
    runs = saved("tests/training/gpu_train.py", *options, layout=("python",))
    require_equal(*runs, "checkpoint-2")


def test_the_average_waits_if_an_update_is_skipped(saved) -> None:
    """After an overflow in fp16, an optimizer that is not fused and its hook are not called, but the average changes."""
    options = (*BRIEF, "--ema_steps", 4, "--eval_strategy", "no", "--precision", "fp16", "--optim", "adamw_torch")
    runs = saved("tests/training/fp16_train.py", *options, layout=("python",), OVERFLOW_AT="3")
    require_equal(*runs, "checkpoint-2")
