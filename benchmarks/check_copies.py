"""Check that the files of a save in the background have the bytes that the tensors had when the copy began.

python benchmarks/gpu.py --parts train --check_copies
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpt2_repro.checkpoints.saving import CheckpointSaver
from gpt2_repro.checkpoints.staged_saves import StagingMemory
from gpt2_repro.checkpoints.writer import Done, Job, Save


class Source(NamedTuple):
    """A tensor that is copied to the memory of a save."""

    start: int  # in the memory
    size: int
    sha256: str


def hash_sources(memory: StagingMemory) -> list[Source]:
    """Hash all tensors whose copy has not begun."""
    begin = torch.frombuffer(memory.view, dtype=torch.uint8).data_ptr()
    sources: list[Source] = []
    for target, tensor in memory._copies:
        content = tensor.cpu().numpy()
        digest = hashlib.sha256(memoryview(content)).hexdigest()
        sources.append(Source(target.data_ptr() - begin, tensor.numel(), digest))
    return sources


def differences(sources: list[Source], save: Save) -> list[str]:
    """Return the places in the files of a complete save whose bytes differ from their source."""
    differing: list[str] = []
    checked = 0
    for name, entry in save.files.items():
        path = Path(save.target, name)
        with path.open("rb") as file:
            for source in sources:
                position = source.start - entry["start"]
                if not 0 <= position < entry["bytes"]:
                    continue
                file.seek(position)
                content = file.read(source.size)
                checked += 1
                if hashlib.sha256(content).hexdigest() != source.sha256:
                    differing.append(f"{name}, bytes {position} to {position + source.size}")
    if checked < len(sources):
        differing.append(f"{len(sources) - checked} tensors that are in no file")
    return differing


def install(results: Path) -> None:
    """Check each save of rank 0. Append a line per save to `results`."""
    begin = StagingMemory.begin
    report = CheckpointSaver._report
    hashed: list[list[Source]] = []

    def begin_checked(self: StagingMemory, then: Callable[[], None]) -> None:
        hashed.append(hash_sources(self))
        begin(self, then)

    def report_checked(self: CheckpointSaver, job: Job, done: Done) -> None:
        report(self, job, done)
        if job.save is None or self.memory is None:
            return
        sources = hashed.pop(0)
        if job.rank:
            return  # rank 0 may not have renamed the folder
        differing = differences(sources, job.save)
        line: dict[str, Any] = {
            "checkpoint": Path(job.save.target).name,
            "tensors": len(sources),
            "megabytes": round(sum(source.size for source in sources) / 1e6, 1),
            "differing": differing,
        }
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    StagingMemory.begin = begin_checked  # type: ignore[method-assign]
    CheckpointSaver._report = report_checked  # type: ignore[method-assign]
