"""Score every task of a model once: from the cache, on one device, or on all GPUs."""

import dataclasses
import hashlib
import json
import logging
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpt2_repro.evaluation.harness import EvaluationSettings, evaluate_launched, evaluate_model, fetch_data
from gpt2_repro.evaluation.models import EvaluatedModel
from gpt2_repro.evaluation.output import file_name
from gpt2_repro.evaluation.scores import Metric, TaskScores, read_scores
from gpt2_repro.files import read_object, write_whole


logger = logging.getLogger(__name__)

FOLDER = Path(".cache/evaluation")
READING = 1  # raised whenever scores.py reads something else from the same samples


@dataclasses.dataclass(frozen=True)
class Entry:
    """What is kept of a task: the harness's own results, and the scores that were read from them and its samples."""

    results: dict[str, Any]
    scores: list[TaskScores]


class Cache:
    """Entries by what they depend on; one file each, written whole.

    Args:
        settings: of every task: window, dtype, batch size, seed, limit.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.settings = settings | {"harness": version("lm_eval"), "reading": READING}

    def read(self, model: str, task: str, definition: str) -> Entry | None:
        """The entry of a model's fingerprint and a task, which `definition` tells apart from others of its name."""
        path, key = self._place(model, task, definition)
        if not path.is_file():
            self._name_other_versions(task, key)
            return None
        stored = read_object(path)
        if stored.get("key") != key:  # damaged
            return None
        scores = [
            TaskScores(**entry | {"metrics": [Metric(**metric) for metric in entry["metrics"]]})
            for entry in stored["scores"]
        ]
        return Entry(stored["results"], scores)

    def write(self, model: str, task: str, definition: str, entry: Entry) -> None:
        """Keep an entry."""
        path, key = self._place(model, task, definition)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"key": key, **dataclasses.asdict(entry)}))

    def _name_other_versions(self, task: str, key: dict[str, Any]) -> None:
        """Say that scores are there which another version of the harness gave: they are not put beside new ones."""
        rest = {name: value for name, value in key.items() if name != "harness"}
        for path in sorted(self.folder.glob(f"{task}-*.json")):
            stored = read_object(path).get("key", {})
            if {name: value for name, value in stored.items() if name != "harness"} == rest:
                logger.warning(
                    "%s was scored by lm_eval %s: scored again, for here it is %s and scores of two versions do not compare",
                    *(task, stored["harness"], key["harness"]),
                )

    def _place(self, model: str, task: str, definition: str) -> tuple[Path, dict[str, Any]]:
        key = self.settings | {"model": model, "task": task, "definition": definition}
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
        return self.folder / f"{task}-{name}.json", key


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
