"""`preflight --memory` with the real command, launcher included, on devices whose memory ends early."""

from pathlib import Path

import pytest

from gpt2_repro import machine
from gpt2_repro.preflight import __main__ as preflight


pytestmark = pytest.mark.faults
ROOT = Path(__file__).parents[2]
# train.py on a device that has room for one row a pass, and for two where only the inputs of blocks are kept.
LIMITED = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch, train
from gpt2_repro import entry
from gpt2_repro.training.trainer import PretrainingTrainer

original = PretrainingTrainer.training_step

def limited(self, model, inputs, *args, **kwargs):
    if len(inputs["input_ids"]) > (2 if self.args.activation_checkpointing else 1):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    return original(self, model, inputs, *args, **kwargs)

PretrainingTrainer.training_step = limited
entry.run(train.main)
"""


def test_what_fits_is_found_with_the_real_command(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "accelerate_configs").symlink_to(ROOT / "accelerate_configs")
    (tmp_path / "train.py").write_text(LIMITED)
    monkeypatch.setattr(machine, "REPOSITORY", tmp_path)
    with pytest.raises(SystemExit) as end:
        preflight.main([str(tiny_recipe), "--memory", "--per_device_train_batch_size", "2"])
    out, said = capsys.readouterr()
    assert not end.value.code and "✓ memory           fits: --per_device_train_batch_size 1\n" in out, said
    attempts = [line.strip() for line in said.splitlines() if line.startswith("  --per_device")]
    assert attempts == [
        "--per_device_train_batch_size 2: out of memory",
        "--per_device_train_batch_size 2 --activation_checkpointing: fits",
        "--per_device_train_batch_size 1: fits",
    ]
