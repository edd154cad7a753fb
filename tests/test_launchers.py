"""Two processes by each launcher file; ZeRO-1 as a user types it, the others forked, which takes fewer seconds."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gpt2_repro.batch_plan import plan_batches


GOLDEN = json.loads(Path(__file__).with_name("golden").joinpath("runs.json").read_text())["one"]


@pytest.mark.parametrize(
    "launcher", [(name, 2) for name in ("torchrun", "launch", "zero2", "zero3", "fsdp2")], ids=lambda its: its[0]
)
def test_two_processes_are_one(launcher, type_command, type_warm, tiny_recipe: Path, events, tmp_path: Path) -> None:
    """The losses and the final weights of one process, which tests/golden/ keeps."""
    words = ("train.py", tiny_recipe, "--per_device_train_batch_size", 4, "--output_dir", tmp_path / "run")
    done = (type_command if launcher[0] == "launch" else type_warm)(*launcher, *words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    logged = {f"step {event['step']} {key}": event[key] for event in events(tmp_path / "run") for key in event}
    assert {name: logged[name] for name in GOLDEN} == pytest.approx(GOLDEN, rel=1e-4)
    plan = plan_batches(tokens_per_step=256, sequence_length=32, micro_batch_size=4, num_processes=2, max_steps=8)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["plan"]["gradient_accumulation_steps"] == plan.gradient_accumulation_steps == 1
    assert environment["engine"]["processes"] == 2
    assert len(load_file(tmp_path / "run" / "final" / "model.safetensors")) == 28
