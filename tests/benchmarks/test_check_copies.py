"""Copies of a save are compared with their sources."""

import mmap
from pathlib import Path

import pytest
import torch

from benchmarks.check_copies import differences, hash_sources
from gpt2_repro.checkpoints.staged_saves import StagedFiles, StagingMemory
from gpt2_repro.checkpoints.writer import Save, _write_file


@pytest.mark.parametrize("changed", ["nothing", "tensor during the copy", "file"])
def test_a_changed_byte_is_noticed(changed: str, tmp_path: Path) -> None:
    memory = StagingMemory(1 << 20)
    staged = StagedFiles(tmp_path, memory, lambda: None)
    state = {"moment": torch.arange(1000.0), "step": torch.tensor(7)}
    weights = {"weight": torch.ones(64, 3), "bias": torch.zeros(64)}
    staged.save(state, tmp_path / "state.pt")
    staged.save_safetensors(weights, tmp_path / "model.safetensors")
    sources = hash_sources(memory)
    assert len(sources) == 4
    if changed == "tensor during the copy":
        state["moment"][500] += 1
    memory.begin(lambda: None)
    memory.wait()
    content = memoryview(mmap.mmap(memory.descriptor, 0))
    for name, entry in staged.files.items():
        _write_file(tmp_path / name, entry, content, int)
    if changed == "file":
        path = tmp_path / "model.safetensors"
        written = bytearray(path.read_bytes())
        written[-1] ^= 1
        path.write_bytes(written)
    found = differences(sources, Save(str(tmp_path), str(tmp_path), staged.files, {}))
    expected = {"nothing": [], "tensor during the copy": ["state.pt"], "file": ["model.safetensors"]}
    assert [text.partition(",")[0] for text in found] == expected[changed]
