"""Scores that are there already: of the same weights, on the same task, in the same way, by the same harness."""

import dataclasses
import hashlib
import json
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpt2_repro.evaluation.scores import Metric, TaskScores
from gpt2_repro.files import read_object, write_whole


logger = logging.getLogger(__name__)

FOLDER = Path(".cache/evaluation")
READING = 1  # raised whenever scores.py reads something else from the same samples


@dataclasses.dataclass(frozen=True)
class Entry:
    """What is kept of a task: the harness's own results, and the scores that were read from them and its samples."""

    results: dict[str, Any]
    scores: list[TaskScores]


def fingerprint(model: Any, tokenizer: Any) -> str:
    """The revision of a model: a hash of its weights, configuration and tokenizer, wherever they came from."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in ("_name_or_path", "dtype")}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().numpy().data)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update((backend.to_str() if backend else json.dumps(tokenizer.get_vocab(), sort_keys=True)).encode())
    return digest.hexdigest()


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
