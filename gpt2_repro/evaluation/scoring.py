"""Score every task of a model once: from the cache, on one device, or on all GPUs."""

import dataclasses
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from gpt2_repro.evaluation.cache import Cache, Entry
from gpt2_repro.evaluation.harness import EvaluationSettings, evaluate_model, fetch_data
from gpt2_repro.evaluation.launch import evaluate_launched
from gpt2_repro.evaluation.loaded_model import EvaluatedModel
from gpt2_repro.evaluation.provenance import file_name
from gpt2_repro.evaluation.scores import TaskScores, read_scores
from gpt2_repro.files import write_whole


logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Tasks, and the settings that are the same for all models of a table.

    Args:
        definitions: a hash per task of `task_folder`, which also covers the data.
    """

    tasks: list[str]
    task_folder: Path
    definitions: dict[str, str]
    settings: EvaluationSettings


def score(candidate: EvaluatedModel, benchmark: Benchmark, cache: Cache | None, output: Path) -> list[TaskScores]:
    """Score a model on all tasks. Each task is cached at once, so that a second start continues with the next one."""
    scores: list[TaskScores] = []
    loaded: tuple[Any, Any] | None = None
    with tempfile.TemporaryDirectory(prefix="evaluation-") as scratch:
        for task in benchmark.tasks:
            definition = benchmark.definitions.get(task, "stock")
            entry = cache.read(candidate.revision, task, definition) if cache else None
            if entry is None:
                logger.info("%s: %s on %s", candidate.name, task, benchmark.settings.device)
                loaded = loaded or candidate.load()
                entry = _evaluate(candidate, loaded, task, benchmark, Path(scratch))
                if cache:
                    cache.write(candidate.revision, task, definition, entry)
            else:
                logger.info("%s: %s is in the cache", candidate.name, task)
            write_whole(
                output / file_name(candidate.name) / f"{task}.json", json.dumps(entry.results, indent=2) + "\n"
            )
            scores += entry.scores
    return scores


def _evaluate(
    candidate: EvaluatedModel, loaded: tuple[Any, Any], task: str, benchmark: Benchmark, scratch: Path
) -> Entry:
    num_processes = count_processes(benchmark.settings)
    if num_processes > 1:
        fetch_data(task, benchmark.task_folder)
        model = candidate.folder(scratch)
        found = evaluate_launched(model, task, benchmark.settings, benchmark.task_folder, num_processes=num_processes)
    else:
        found = evaluate_model(*loaded, task, benchmark.settings, benchmark.task_folder)
    return Entry(found[0], read_scores(*found, tokenizer=loaded[1]))


def count_processes(settings: EvaluationSettings) -> int:
    """Return the number of processes: one per GPU if the device is "cuda", otherwise one."""
    import torch

    found = torch.cuda.device_count() if settings.device == "cuda" else 1
    return min(found, settings.limit or found)  # the harness needs a document per process
