"""Every task of every model, once: from the cache, on one device, or on all GPUs."""

import dataclasses
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from gpt2_repro.evaluation.cache import Cache, Entry
from gpt2_repro.evaluation.candidates import Candidate
from gpt2_repro.evaluation.harness import evaluate_model, fetch_data
from gpt2_repro.evaluation.launch import evaluate_launched
from gpt2_repro.evaluation.provenance import file_name
from gpt2_repro.evaluation.scores import TaskScores, read_scores
from gpt2_repro.files import write_whole


logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Way:
    """How models are scored: the same for all of a table.

    Args:
        definitions: what tells a task of `task_folder` from another of its name.
        max_length: window in tokens.
        limit: documents of each task; None for all.
    """

    tasks: list[str]
    task_folder: Path
    definitions: dict[str, str]
    max_length: int
    batch_size: int
    device: str
    limit: int | None
    seed: int

    def settings(self) -> dict[str, Any]:
        """What a score depends on besides its model, its task and the harness."""
        names = ("max_length", "batch_size", "seed", "device", "limit")
        return {name: getattr(self, name) for name in names}

    @property
    def num_gpus(self) -> int:
        """How many work side by side: all, unless one is named."""
        import torch

        found = torch.cuda.device_count() if self.device == "cuda" else 1
        return min(found, self.limit or found)  # the harness wants a document for each


def score(candidate: Candidate, way: Way, cache: Cache | None, output: Path) -> list[TaskScores]:
    """The scores of a model on all tasks. Each task is kept as soon as it is there, so a second start goes on."""
    scores: list[TaskScores] = []
    loaded: tuple[Any, Any] | None = None
    with tempfile.TemporaryDirectory(prefix="evaluation-") as scratch:
        for task in way.tasks:
            definition = way.definitions.get(task, "stock")
            entry = cache.read(candidate.revision, task, definition) if cache else None
            if entry is None:
                logger.info("%s: %s on %s", candidate.name, task, way.device)
                loaded = loaded or candidate.load()
                entry = _evaluate(candidate, loaded, way, task, Path(scratch))
                if cache:
                    cache.write(candidate.revision, task, definition, entry)
            else:
                logger.info("%s: %s is in the cache", candidate.name, task)
            write_whole(
                output / file_name(candidate.name) / f"{task}.json", json.dumps(entry.results, indent=2) + "\n"
            )
            scores += entry.scores
    return scores


def _evaluate(candidate: Candidate, loaded: tuple[Any, Any], way: Way, task: str, scratch: Path) -> Entry:
    model, tokenizer = loaded
    options: dict[str, Any] = dict(
        task_folder=way.task_folder,
        max_length=way.max_length,
        batch_size=way.batch_size,
        device=way.device,
        limit=way.limit,
        seed=way.seed,
    )
    if way.num_gpus > 1:
        fetch_data(task, way.task_folder)
        folder = candidate.folder(scratch)
        results, samples = evaluate_launched(folder, task=task, num_processes=way.num_gpus, **options)
    else:
        results, samples = evaluate_model(model, tokenizer, tasks=[task], **options)
    return Entry(results, read_scores(results, samples, tokenizer))
