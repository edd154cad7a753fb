"""A save hashes files, deletes old checkpoints, and handles a full or slow disk."""

import errno
import hashlib
import json
import mmap
import os
import select
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._pytree import tree_flatten
from transformers import GPT2Config, GPT2LMHeadModel

from gpt2_repro.checkpoints import saving, writer
from gpt2_repro.checkpoints.manifest import defect, read_manifest, seal
from gpt2_repro.checkpoints.rotation import disk_faults_in_words
from gpt2_repro.checkpoints.saving import CheckpointSaver, SavingSettings
from gpt2_repro.checkpoints.staged_saves import StagedFiles, StagingMemory
from gpt2_repro.errors import RunFailed, UserError
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.layout import Rotation, checkpoints


SHARDS = ("global_step7/shard.pt", "optimizer.pt")


@pytest.mark.parametrize("memory_bytes", [None, 1, 1 << 20], ids=["written at once", "memory grows", "memory fits"])
def test_saved_files_are_hashed_and_unchanged(memory_bytes: int | None, tmp_path: Path) -> None:
    flat = torch.randn(10)
    state = {"m": torch.randn(1000, 700), "v": [torch.arange(5)] * 3, "views": (flat[:3], flat[2:]), "step": 7}
    state |= {"empty": torch.empty(0), "weight": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))}
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=20, n_positions=8))
    staging, elsewhere = tmp_path / "staging", tmp_path / "elsewhere"
    (staging / "global_step7").mkdir(parents=True)
    elsewhere.mkdir()
    memory = None if memory_bytes is None else StagingMemory(memory_bytes)
    staged = StagedFiles(staging, memory, lambda: None)
    for name in SHARDS:
        staged.save(state, staging / name)
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    staged.save_safetensors(weights, staging / "model.safetensors", {"format": "pt"})
    save_file(weights, elsewhere / "model.safetensors", {"format": "pt"})
    written = staged.files
    assert written.keys() == {*SHARDS, "model.safetensors"}
    if memory:
        assert not list(staging.rglob("*.pt")) and not list(staging.rglob("*.safetensors"))
        memory.begin(lambda: None)
        memory.wait()
        content = memoryview(mmap.mmap(memory.descriptor, 0))
        written = {name: writer._write_file(staging / name, entry, content, int) for name, entry in written.items()}
    for name, record in written.items():
        content = (staging / name).read_bytes()
        assert record == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    for name in SHARDS:
        loaded = torch.load(staging / name, weights_only=True)
        assert tree_flatten(loaded)[1] == tree_flatten(state)[1]
        assert all(map(torch.equal, *([*map(torch.as_tensor, tree_flatten(tree)[0])] for tree in (loaded, state))))
    assert (staging / "model.safetensors").read_bytes() == (elsewhere / "model.safetensors").read_bytes()


class Cudart:
    """The functions of CUDA that pin memory. CUDA keeps the last error of each thread."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.registered: set[int] = set()
        self.last_errors: dict[int, int] = {}  # by thread

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self.code:
            self.last_errors[threading.get_ident()] = self.code
        else:
            self.registered.add(address)
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        if address not in self.registered:
            self.last_errors[threading.get_ident()] = 713
            return 713
        self.registered.remove(address)
        return 0


@pytest.mark.parametrize("code", [0, 2])
def test_memory_that_cannot_be_pinned_leaves_no_error_behind(code: int, monkeypatch, caplog) -> None:
    """An error in the thread of the training would be raised by its next kernel."""
    cudart = Cudart(code)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    memory = StagingMemory(1)
    memory.clear()
    first = set(cudart.registered)
    memory.reserve(memory.size + 1)  # allocates and pins larger memory
    assert threading.get_ident() not in cudart.last_errors
    assert len(caplog.records) == (2 if code else 0)
    assert len(cudart.registered) == len(first) == (0 if code else 1)
    memory.view[memory.size - 1] = 7  # it can be used


@pytest.fixture
def saver(tmp_path: Path):
    sizes = {"total_bytes": 800, "own_bytes": 800}
    settings = SavingSettings(Rotation(keep=2))
    functions = {"alive": lambda: None, "prepare": lambda: None}
    made = CheckpointSaver(RunRecord(tmp_path), settings, device="cpu", **sizes, **functions)

    def write(folder: Path) -> tuple[dict, dict]:
        folder.mkdir(parents=True)
        staged = StagedFiles(folder, made.memory, made.alive)
        staged.save({"m": torch.ones(3)}, folder / "optimizer.pt")
        (folder / "config.json").write_text("{}", encoding="utf-8")
        return staged.files, {}

    made.step = lambda step, stops=None: made.save(step, write, stops=stops)
    return made


def test_save_is_published_or_skipped_without_space(saver, tmp_path: Path, monkeypatch) -> None:
    assert saver.step(1) and saver.step(2) and saver.step(3)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-2"]
    assert read_manifest(tmp_path / "checkpoint-3")["files"].keys() == {"optimizer.pt", "config.json"}

    size = sum(path.stat().st_size for path in (tmp_path / "checkpoint-2").iterdir())
    quota = int(2.5 * size)
    taken = lambda: sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())  # noqa: E731
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: SimpleNamespace(free=quota - taken()))
    assert saver.step(4)  # an older checkpoint was deleted to free space
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-3"]
    quota = size + 10
    saver.settings = SavingSettings(Rotation(keep=0))  # all
    assert not saver.step(5) and not saver.step(6)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-3"]
    quota = 10**9
    assert saver.step(7)  # the count of skipped saves starts again
    quota = 0
    with pytest.raises(UserError, match="more disk space"):
        saver.check_disk()
    pytest.raises(RunFailed, saver.step, 8, stops="SIGTERM").match("SIGTERM")  # a stop without a checkpoint
    assert not saver.step(8)
    pytest.raises(RunFailed, saver.step, 9)  # the third save in a row
    assert defect(tmp_path / "checkpoint-7", read_files=True) is None


@pytest.mark.parametrize(("device", "copies"), [("cpu", False), ("mps", False), ("cuda", True)])
def test_a_training_on_a_cpu_needs_memory_besides_the_copy(saver, device: str, copies: bool, monkeypatch) -> None:
    monkeypatch.setattr(saving, "available_memory", lambda: 2000)  # a checkpoint has 800 bytes
    saver.device = device
    saver._start_writer()
    saver.close()
    assert (saver.memory is not None) == copies


def test_a_rank_waits_for_the_writers_of_other_ranks(saver, monkeypatch) -> None:
    """Its watchdog is restarted as long as one of the other writers makes progress."""
    alive = saver.alive = Mock()
    sent, others = [], iter([2, 1, 1, 2, 0])
    monkeypatch.setattr(saving.ranks, "largest", lambda own: (sent.append(int(own)), max(own, next(others)))[1])
    saver.wait_for_writers()
    assert alive.call_count == 2 and sent == [0] * 5 and list(others) == []


def test_other_ranks_wait_for_the_own_writer(saver, monkeypatch) -> None:
    saver.alive = Mock()
    sent: list[int] = []
    replies = iter([{}, None, None, {"seconds": 1.0, "bytes": 0}])
    saver.writer = SimpleNamespace(reply=lambda seconds: next(replies))
    saver.jobs = [writer.Job("", Rotation(1), also=-1, trainer=1, rank=0, ranks=2)]
    monkeypatch.setattr(saving.ranks, "largest", lambda own: (sent.append(int(own)), own)[1])
    saver.wait_for_writers()
    assert sent == [2, 1, 0] and saver.alive.call_count == 2


@pytest.mark.parametrize("in_background", [True, False])
def test_a_checkpoint_that_disappears_after_its_save_does_not_end_the_run(
    in_background: bool, saver, tmp_path: Path, monkeypatch, caplog
) -> None:
    caplog.set_level("INFO")
    manifest = tmp_path / "checkpoint-1" / "manifest.json"
    size = 0

    def publish(staged: Path, target: Path) -> None:
        nonlocal size
        original(staged, target)
        size = sum(path.stat().st_size for path in target.iterdir() if path != manifest)
        manifest.unlink()

    if in_background:
        saver._start_writer()
        saver.step(1)
        saver.memory.wait()
        select.select([saver.writer.process.stdout], [], [])  # the reply
        size = sum(path.stat().st_size for path in manifest.parent.iterdir() if path != manifest)
        manifest.unlink()
        saver.poll(seconds=None)
    else:
        original = writer.publish
        monkeypatch.setattr(writer, "publish", publish)
        monkeypatch.setattr(saver, "finish", lambda: None)  # waits for the manifest
        saver.step(1)
    saver.close()
    assert saver.take_completed() == [1] and not saver.jobs
    saved = next(record for record in caplog.records if record.msg.startswith("saved"))
    assert f"{size / 1e6:,.1f}" in saved.args


def test_a_checkpoint_that_disappears_while_disk_space_is_checked(saver, tmp_path: Path, monkeypatch) -> None:
    """Another process moves it after it was found to be complete."""
    assert saver.step(1) and saver.step(2)
    found = saving.newest_checkpoint(tmp_path), saving.expendable(tmp_path, Rotation(keep=1))
    (tmp_path / "checkpoint-1").rename(tmp_path / "moved-1")
    (tmp_path / "checkpoint-2").rename(tmp_path / "moved-2")
    monkeypatch.setattr(saving, "newest_checkpoint", lambda run: found[0])
    monkeypatch.setattr(saving, "expendable", lambda run, rotation: found[1])
    assert saver._needed() == saving.SPARE * saver.total_bytes
    saver.check_disk()


def test_the_checkpoint_that_is_being_copied_is_not_deleted(saver, tmp_path: Path) -> None:
    saver.step(1)
    saver.copier = SimpleNamespace(job="checkpoint-1", poll=lambda: False, requeue=lambda: None)
    assert all(map(saver.step, (2, 3, 4)))
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-3", "checkpoint-1"]


def test_every_file_is_on_disk_before_the_checkpoint_has_its_name(saver, tmp_path: Path, monkeypatch) -> None:
    synced, original = [], os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        if synced[-1] != tmp_path.name:  # the last one, with the new name
            assert not (tmp_path / "checkpoint-1").exists()
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    saver.step(1)
    partial = next(name for name in synced if name.startswith(".manifest.json."))
    assert set(synced) == {"optimizer.pt", "config.json", partial, "checkpoint-1", tmp_path.name}
    assert synced.index("optimizer.pt") < synced.index(partial) < len(synced) - 1


def test_a_full_disk_or_memory_ends_the_run_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = tmp_path / "staging"
    for text, raised in (("No space left on device (os error 28)", RunFailed), ("a bug", RuntimeError)):
        staging.mkdir(exist_ok=True)
        with pytest.raises(raised), disk_faults_in_words(tmp_path, "checkpoint-2", staging):
            raise RuntimeError(f"I/O error: {text}")  # in the words of safetensors
        assert staging.exists() == (raised is RuntimeError)
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(RunFailed, match="memory"), disk_faults_in_words(tmp_path, "checkpoint-2", staging):
        StagingMemory(100)


def test_waiting_for_another_rank_restarts_the_watchdog_while_files_grow(saver, tmp_path: Path, monkeypatch) -> None:
    alive: list[int] = []
    saver.alive = lambda: alive.append(1)
    sizes = iter([10, 10, 20, 20, 20, 0])
    final = tmp_path / "final"

    def write(_: float) -> None:
        size = next(sizes)
        if size:
            (saver.staging / "shard").write_bytes(b"x" * size)
        else:
            seal(final, {}, step=2)

    saver.staging.mkdir()
    final.mkdir()
    seal(final, {}, step=1)  # of the run before it was extended
    monkeypatch.setattr(saving.time, "sleep", write)
    saver.wait_until(lambda: read_manifest(final).get("step") == 2)
    assert len(alive) == 2


def test_a_save_in_the_foreground_restarts_the_watchdog_for_each_piece(saver, monkeypatch) -> None:
    alive: list[int] = []
    saver.alive = lambda: alive.append(1)
    monkeypatch.setattr(writer, "PIECE", 100)
    saver.step(1)
    assert len(alive) > 5 and saver.paused == saver.seconds > 0


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_run_waits_until_its_last_save_is_copied(saver, fails: bool, monkeypatch) -> None:
    saver._start_writer()
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: time.sleep(0.2) or 1 / (not fails))
    saver.step(1)
    if fails:
        pytest.raises(ZeroDivisionError, saver.poll, seconds=None)
    saver.close()  # as after another error
    saver.writer.process.wait()
    assert (saver.paused >= 0.2) == (saver.run_directory / "checkpoint-1").exists() == (not fails)


@pytest.mark.parametrize("code", [0, 2])
def test_memory_for_copies_from_a_gpu_is_pinned(code: int, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    cuda = Mock(cudaHostRegister=Mock(return_value=code))
    replaced = {"is_initialized": lambda: True, "current_device": lambda: 1, "cudart": lambda: cuda}
    for name, function in (replaced | {"set_device": cuda.set_device}).items():
        monkeypatch.setattr(torch.cuda, name, function)
    memory = StagingMemory(1000)
    memory.clear()  # a thread has pinned it on the device of this process
    first = cuda.cudaHostRegister.call_args.args[0]
    memory.reserve(2 * memory.size)  # a larger checkpoint
    assert cuda.cudaHostUnregister.call_args == (None if code else call(first))
    assert cuda.cudaHostRegister.call_args.args[1] == memory.size and ("pinned" in caplog.text) == bool(code)
    pins = ["set_device", "cudaHostRegister"]
    assert [each[0] for each in cuda.mock_calls] == [*pins, *([] if code else ["cudaHostUnregister"]), *pins]


@pytest.mark.parametrize("launcher", [("python",), ("launch", 2)])
@pytest.mark.parametrize("background", ["true", "false"])
@pytest.mark.parametrize("stop", [0, 3])
def test_a_callback_sees_each_checkpoint_once_and_complete(
    stop: int, background: str, launcher, type_warm, tiny_recipe: Path, tmp_path: Path
) -> None:
    words = ("--output_dir", tmp_path / "run", "--save_steps", 1, "--keep_checkpoints", 1, "--stop_at_step", stop)
    words += ("--background_save", background, "--per_device_train_batch_size", 4)
    script = "tests/training/callback_train.py"
    done = type_warm(*launcher, script, tiny_recipe, *words, CALLS=str(tmp_path / "calls"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text(encoding="utf-8").splitlines()]
    assert all(call["complete"] for call in calls)
    last = stop or 8
    assert [(call["event"], call["step"]) for call in calls] == [
        *(("save", step) for step in range(1, last + 1)),
        ("end", last),
    ]
    assert [call["epoch"] for call in calls] == sorted(call["epoch"] for call in calls)
    assert len({call["epoch"] for call in calls}) == last
