"""A checkpoint of a run with --ema_steps also has the average of the weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.optim.simulation import average_of


AVERAGE = "model.average.safetensors"
OPTIONS = ("--ema_steps", 3, "--save_steps", 1, "--keep_checkpoints", 0, "--accept_any_hardware", "true")


def average_by_hand(run: Path, step: int) -> dict[str, Tensor]:
    """Return the average of the weights at a step, computed from the checkpoints of all steps until then."""
    saved = [load_file(run / f"checkpoint-{number}" / "model.safetensors") for number in range(1, step + 1)]
    return {name: average_of([weights[name].float() for weights in saved], 3) for name in saved[0]}


SLOW = pytest.mark.slow
LAYOUTS = [
    (("python",), "false"),
    (("launch", 2), "false"),  # ZeRO-1
    pytest.param(("torchrun", 2), "false", marks=SLOW),  # DDP
    pytest.param(("launch", 1), "true", marks=SLOW),
    pytest.param(("launch", 2), "true", marks=SLOW),
    pytest.param(("zero2", 2), "false", marks=SLOW),
]


@pytest.mark.parametrize(("layout", "bf16"), LAYOUTS, ids=str)
def test_each_checkpoint_has_the_average_by_hand(layout: tuple[object, ...], bf16: str, train, tmp_path: Path) -> None:
    options = (*OPTIONS, "--bf16", bf16, "--per_device_train_batch_size", 4)
    run = train(tmp_path / "run", *options, launcher=layout)
    # DeepSpeed saves weights that are rounded to bf16. The average is that of the fp32 master weights.
    tolerance = {"rtol": 2**-8, "atol": 1e-4} if bf16 == "true" else {"rtol": 0, "atol": 1e-6}
    for step in (1, 4, 8):
        found = load_file(run / f"checkpoint-{step}" / AVERAGE)
        expected = average_by_hand(run, step)
        assert found.keys() == expected.keys()
        for name, weight in found.items():
            assert weight.dtype == torch.float32
            torch.testing.assert_close(weight, expected[name], **tolerance)
    trained = load_file(run / "checkpoint-8" / "model.safetensors")
    assert not any(torch.equal(weight, trained[name].float()) for name, weight in found.items())
    final = load_file(run / "final" / "model.safetensors")
    assert all(torch.equal(weight, found[name][: len(weight)]) for name, weight in final.items())
