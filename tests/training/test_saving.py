"""Files are hashed on their way to the disk, and room is made before."""

import errno
import hashlib
import logging
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, modeling_utils

from gpt2_repro.errors import RunFailed
from gpt2_repro.training import saving
from gpt2_repro.training.checkpoints import checkpoints, defect, read_manifest
from gpt2_repro.training.hashing import hashed_saves
from gpt2_repro.training.saving import CheckpointSaver


def test_the_hash_of_a_save_is_the_files_and_the_file_loads(tmp_path: Path) -> None:
    state = {"m": torch.randn(1000, 70), "v": [torch.arange(5)] * 3, "step": 7}
    with hashed_saves(tmp_path / "staging") as written:
        (tmp_path / "staging" / "global_step7").mkdir(parents=True)
        torch.save(state, tmp_path / "staging" / "global_step7" / "shard.pt")
        torch.save(state, str(tmp_path / "staging" / "optimizer.pt"), _use_new_zipfile_serialization=True)
        torch.save(state, tmp_path / "elsewhere.pt")
        torch.save(state, tmp_path / "staging" / "training_args.bin")
    assert written.keys() == {"global_step7/shard.pt", "optimizer.pt"}
    for name, record in written.items():
        path = tmp_path / "staging" / name
        assert record == {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        assert torch.equal(torch.load(path, weights_only=True)["m"], state["m"])
    assert (tmp_path / "elsewhere.pt").is_file() and not (tmp_path / "staging" / "training_args.bin").exists()


def test_weights_are_hashed_too_and_are_the_file_that_transformers_writes(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=20, n_positions=8))
    staging = tmp_path / "staging"
    with hashed_saves(staging) as written:
        model.save_pretrained(staging)
        model.save_pretrained(tmp_path / "elsewhere")
    content = (tmp_path / "elsewhere" / "model.safetensors").read_bytes()
    assert (staging / "model.safetensors").read_bytes() == content
    assert written == {"model.safetensors": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}


def test_torch_is_as_before_however_it_ends(tmp_path: Path) -> None:
    original = torch.save
    with pytest.raises(ZeroDivisionError), hashed_saves(tmp_path):
        assert torch.save is not original and modeling_utils.safe_save_file is not save_file
        1 / 0  # noqa: B018
    assert torch.save is original and modeling_utils.safe_save_file is save_file


class Alone:
    """What a saver asks of accelerate, in one process."""

    is_main_process = True

    def wait_for_everyone(self) -> None: ...


@pytest.fixture
def saver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(saving, "broadcast_object_list", lambda objects: objects)
    monkeypatch.setattr(saving, "gather_object", lambda objects: objects)
    args = SimpleNamespace(keep_checkpoints=2, keep_every_steps=0, keep_best_checkpoint=False)
    made = CheckpointSaver(tmp_path, Alone(), args, expected=1000, alive=lambda: None)

    def save(step: int, stops: str | None = None) -> bool:
        def write() -> None:
            folder = made.staging / f"checkpoint-{step}"
            folder.mkdir(parents=True)
            torch.save({"step": step}, folder / "optimizer.pt")
            (folder / "config.json").write_text("{}")

        return made.save(step, write, lambda: {"trajectory": {"seed": 1}}, stops=stops)

    made.step = save
    return made


def test_a_save_is_sealed_published_and_rotated(saver, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert saver.step(1) and saver.step(2) and saver.step(3)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-2"]
    assert defect(tmp_path / "checkpoint-3", read_files=True) is None
    assert read_manifest(tmp_path / "checkpoint-3")["files"].keys() == {"optimizer.pt", "config.json"}
    assert f"saved {tmp_path}/checkpoint-3: " in caplog.text and saver.seconds > 0


Usage = namedtuple("Usage", ["total", "used", "free"])


def test_without_room_older_ones_go_and_then_the_save_is_left_out(
    saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver.step(1)
    saver.step(2)
    size = sum(path.stat().st_size for path in (tmp_path / "checkpoint-2").iterdir())
    quota = int(2.5 * size)
    taken = lambda: sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())  # noqa: E731
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: Usage(0, 0, quota - taken()))
    assert saver.step(3)
    assert "deleted 1 older checkpoints to make room" in caplog.text
    quota = size + 10
    assert not saver.step(4) and not saver.step(5)
    assert caplog.text.count("NOT SAVED at step") == 2
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3"]
    quota = 10**9
    assert saver.step(6)  # and the count begins anew
    quota = 0
    assert not saver.step(7) and not saver.step(8)
    with pytest.raises(RunFailed, match="three times in a row"):
        saver.step(9)
    assert defect(tmp_path / "checkpoint-6", read_files=True) is None
    quota = 10**9
    assert saver.step(10)
    quota = 0
    with pytest.raises(RunFailed, match="and the run stops: SIGTERM"):  # a stop that saved nothing is no clean one
        saver.step(11, stops="SIGTERM")


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "Disk quota exceeded"), "os"]
)
def test_a_disk_that_is_full_after_all_ends_the_run_in_one_line(saver, error, tmp_path: Path, monkeypatch) -> None:
    saver.step(1)
    if error == "os":  # as safetensors says it
        error = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(saving.checkpoints, "seal", full)
    with pytest.raises(RunFailed, match="is full, checkpoint-2 could not be saved: .* same command again"):
        saver.step(2)
    assert not saver.staging.exists() and defect(tmp_path / "checkpoint-1", read_files=True) is None


def test_another_error_is_what_it_is(saver, monkeypatch) -> None:
    monkeypatch.setattr(saving.checkpoints, "seal", lambda *_, **__: {}["a mistake of ours"])
    with pytest.raises(KeyError):
        saver.step(1)


def test_a_rename_may_take_time_to_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CK9."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "manifest.json").write_text("{}")
    threading.Timer(0.3, lambda: shutil.move(tmp_path / "hidden", tmp_path / "seen")).start()
    began = time.monotonic()
    saving._wait_until_visible(tmp_path / "seen")
    assert time.monotonic() - began > 0.2
    monkeypatch.setattr(saving, "VISIBLE_WITHIN", 0.1)
    with pytest.raises(TimeoutError, match="cannot be seen from here"):
        saving._wait_until_visible(tmp_path / "never")
