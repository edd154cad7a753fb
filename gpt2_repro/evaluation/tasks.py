"""Task files that let lm-evaluation-harness read local jsonl files, without a network and without code of ours.

A file includes the stock task and replaces its data. `lm_eval run --include_path <folder>` reads the same files.
"""

import dataclasses
import difflib
import importlib.util
import json
import logging
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.evaluation.documents import cut_passages, documents_to_score, read_documents


logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LocalTask:
    """A task that can run from a local file."""

    stock: str  # the file of lm_eval/tasks that it includes
    split: str
    files: tuple[str, ...]  # what --local_data may hold for it; the first that is there is used


DOCUMENT_FILES = ("validation.jsonl", "text/validation.jsonl")
STOCK_TASKS = {
    "lambada_openai": LocalTask(
        "lambada/lambada_openai.yaml", "test", ("lambada_openai.jsonl", "lambada/lambada_test.jsonl")
    ),
    "hellaswag": LocalTask(
        "hellaswag/hellaswag.yaml",
        "validation",
        ("hellaswag.jsonl", "hellaswag/hellaswag_val.jsonl", "hellaswag/hellaswag_val.jsonl.gz"),
    ),
    "wikitext": LocalTask(
        "wikitext/wikitext.yaml",
        "test",
        ("wikitext.jsonl", "wikitext/wikitext2_test_pages.jsonl", "wikitext/wikitext2_validation_pages.jsonl"),
    ),
}
# Made from the documents of validation.jsonl, {"text": document} a line, which prepare_data.py writes.
OWN_TASKS = {
    "last_word": LocalTask("lambada/lambada_openai.yaml", "test", DOCUMENT_FILES),
    "document_perplexity": LocalTask("wikitext/wikitext.yaml", "test", DOCUMENT_FILES),
}
LOCAL_TASKS = STOCK_TASKS | OWN_TASKS


def find_local_files(local_data: Path, tasks: Iterable[str]) -> dict[str, Path]:
    """The file in `local_data` of each task that has one. Raises UserError where none has."""
    if not local_data.is_dir():
        raise UserError(f"--local_data {local_data} is no folder: name one that holds task data as jsonl files")
    wanted = {task: LOCAL_TASKS[task].files for task in tasks if task in LOCAL_TASKS}
    found = {
        task: next(path for name in names if (path := local_data / name).is_file())
        for task, names in wanted.items()
        if any((local_data / name).is_file() for name in names)
    }
    if not found:
        names = sorted({files[0] for files in wanted.values()}) or ["a file for any of these tasks"]
        raise UserError(
            f"--local_data {local_data} holds no data for {', '.join(tasks)}: put {', '.join(names)} there"
        )
    return found


def check_tasks(tasks: Iterable[str], local: Collection[str]) -> None:
    """Raise UserError for a task that neither the `local` files nor lm-evaluation-harness can run."""
    missing = [task for task in tasks if task not in local]
    for task in missing:
        if task in OWN_TASKS:
            raise UserError(
                f"the task {task} needs validation.jsonl: type --local_data DIR, the folder that prepare_data.py "
                "wrote with --validation_text"
            )
    if all(task in STOCK_TASKS for task in missing):
        return
    known = stock_task_names() | LOCAL_TASKS.keys()
    for task in missing:
        if task not in known:
            near = difflib.get_close_matches(task, known, n=1)
            raise UserError(f"there is no task {task!r}: {did_you_mean(task, near or LOCAL_TASKS)}")


def stock_task_names() -> set[str]:
    """Tasks, groups and tags of the installed lm-evaluation-harness, read from its files in a second.

    Its own TaskManager parses all of them as YAML, which takes ten.
    """
    pattern = re.compile(r"^(?:task|group|tag):[ \t]*[\"']?([\w.+-]+)", re.MULTILINE)
    return {
        name
        for path in _stock_folder().rglob("*.yaml")
        for name in pattern.findall(path.read_text(encoding="utf-8", errors="replace"))
    }


def write_task_files(local_data: Path, output: Path, tasks: Sequence[str]) -> None:
    """Write one task file into the folder `output` for each of the tasks that `local_data` has data for."""
    files = find_local_files(local_data, tasks)
    output.mkdir(parents=True, exist_ok=True)
    for stale in output.glob("*.yaml"):
        stale.unlink()
    for task, source in files.items():
        logger.info("%s reads %s", task, source)
        data = output / f"{task}.jsonl" if task in OWN_TASKS else source
        changes: dict[str, Any] = {}
        if task == "last_word":
            changes = {"tag": None, "metadata": {"version": 1.0, "source": str(source)}}
            _write_lines(data, "text", cut_passages(read_documents(source)))
        elif task == "document_perplexity":
            # Stock wikitext counts the words and bytes of `page` and undoes WikiText's tokenization for the model.
            changes = {"doc_to_target": "page", "metadata": {"version": 1.0, "source": str(source)}}
            _write_lines(data, "page", documents_to_score(read_documents(source)))
        split = LOCAL_TASKS[task].split
        definition = {
            "include": str(_stock_folder() / LOCAL_TASKS[task].stock),
            "task": task,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(data.resolve())}},
            # Stock tasks read their training split for few-shot examples, which these zero-shot tasks never use.
            "training_split": None,
            "validation_split": None,
            "test_split": None,
            f"{split}_split": split,
        }
        (output / f"{task}.yaml").write_text(yaml.safe_dump(definition | changes, sort_keys=False, width=1000))


def _write_lines(path: Path, column: str, texts: Sequence[str]) -> None:
    if not texts:
        raise UserError(f"the validation documents are too short for {path.stem}: leave it out of --tasks")
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts), encoding="utf-8")


def _stock_folder() -> Path:
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("lm-evaluation-harness is not installed: type pip install -r requirements.txt")
    return Path(next(iter(spec.submodule_search_locations))) / "tasks"
