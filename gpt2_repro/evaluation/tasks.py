"""Write lm-eval task files: stock tasks with local data, and the project's tasks.

To use these files with lm-eval directly, run `lm_eval run --include_path <folder>`.
"""

import dataclasses
import difflib
import functools
import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.evaluation.documents import cut_passages, documents_to_score, read_documents
from gpt2_repro.evaluation.scores import COMPLETION
from gpt2_repro.files import read_json_lines
from gpt2_repro.run_record import RunRecord


ENDINGS = 4  # of a HellaSwag item
LABELS = [*range(ENDINGS), *map(str, range(ENDINGS))]  # numbers in some copies of the data, strings in others
# Texts that the stock task joins with other texts, so each of them may be blank.
JOINED = ("activity_label", "ctx_a", "ctx_b")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LocalTask:
    """A task that can read its data from a local file.

    Args:
        stock: the stock task file that the new task file includes, as a path relative to lm_eval/tasks.
        files: possible paths of the data file, relative to --local_data. The first file that exists is used.
        columns: the keys that the task needs on each line of the file.
        changes: keys of the stock task to replace, with the new values.
    """

    stock: str
    split: str
    files: tuple[str, ...]
    columns: tuple[str, ...]
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)


LAMBADA, WIKITEXT, HELLASWAG = "lambada/lambada_openai.yaml", "wikitext/wikitext.yaml", "hellaswag/hellaswag.yaml"
HELLASWAG_FILES = ("hellaswag.jsonl", "hellaswag/hellaswag_val.jsonl", "hellaswag/hellaswag_val.jsonl.gz")
HELLASWAG_COLUMNS = ("activity_label", "ctx_a", "ctx_b", "endings", "label")
ORIGINAL_COLUMNS = ("ctx", "endings", "label")
WIKITEXT_FILES = ("wikitext.jsonl", "wikitext/wikitext2_test_pages.jsonl", "wikitext/wikitext2_validation_pages.jsonl")
DOCUMENT_FILES = ("validation.jsonl", "text/validation.jsonl")
# Tasks made from validation.jsonl, which prepare_data.py writes with {"text": document} on each line. Stock wikitext
# counts the words and bytes of `page`, but removes WikiText's tokenization from the text that the model gets.
OWN_VERSION = {"metadata": {"version": 1.0}}
OWN_TASKS = {
    "last_word": LocalTask(LAMBADA, "test", DOCUMENT_FILES, ("text",), {"tag": None, **OWN_VERSION}),
    "document_perplexity": LocalTask(
        WIKITEXT, "test", DOCUMENT_FILES, ("text",), {"doc_to_target": "page", **OWN_VERSION}
    ),
}
# HellaSwag as in llm.c and build-nanogpt: on the original text. The stock task rewrites it.
ORIGINAL_TEXT = {"tag": None, "process_docs": None, "doc_to_text": "{{ctx}}", "doc_to_choice": "endings"}
LOCAL_TASKS = {
    "lambada_openai": LocalTask(LAMBADA, "test", ("lambada_openai.jsonl", "lambada/lambada_test.jsonl"), ("text",)),
    "hellaswag": LocalTask(HELLASWAG, "validation", HELLASWAG_FILES, HELLASWAG_COLUMNS),
    COMPLETION: LocalTask(HELLASWAG, "validation", HELLASWAG_FILES, ORIGINAL_COLUMNS, ORIGINAL_TEXT),
    "wikitext": LocalTask(WIKITEXT, "test", WIKITEXT_FILES, ("page",)),
    **OWN_TASKS,
}
# Prefixes of tasks with a perplexity per document. The harness would bootstrap the standard error 100,000 times in
# Python, which takes minutes. scores.py computes all standard errors of these tasks. The harness's JSON has "N/A".
OWN_STANDARD_ERRORS = ("lambada", "last_word")


def with_completion(tasks: Iterable[str]) -> list[str]:
    """Return the names of the tasks, with hellaswag_completion added after hellaswag."""
    return [name for task in tasks for name in ((task, COMPLETION) if task == "hellaswag" else (task,))]


def find_local_files(local_data: Path, tasks: Iterable[str]) -> dict[str, Path]:
    """Return the data file of each task that has one in the folder `local_data`.

    Raises UserError if `local_data` is not a folder, has no data file for any of the tasks, or has a file with a row
    that the task cannot score.
    """
    if not local_data.is_dir():
        fix = (
            f"Pass its folder: --local_data {local_data.parent}"
            if local_data.is_file()
            else "Pass a folder with jsonl files."
        )
        raise UserError(f"--local_data {local_data} is not a folder. {fix}")
    wanted = {task: LOCAL_TASKS[task].files for task in tasks if task in LOCAL_TASKS}
    paths = {task: [path for name in names if (path := local_data / name).is_file()] for task, names in wanted.items()}
    found = {task: there[0] for task, there in paths.items() if there}
    if not found:
        names = sorted({files[0] for files in wanted.values()}) or ["a file for any of these tasks"]
        others = [
            name for name, task in LOCAL_TASKS.items() if any((local_data / file).is_file() for file in task.files)
        ]
        fix = f"Add {', '.join(names)}" + (f", or pass --tasks {' '.join(others)}." if others else ".")
        raise UserError(f"--local_data {local_data} has no data for {', '.join(tasks)}. {fix}")
    for task, path in found.items():
        _read_data(task, path)
    return found


def fits(row: Any, columns: Iterable[str]) -> bool:
    """Return whether a row has a value that can be scored for each of the columns.

    `endings` must be four texts, and `label` the number of one of them. All other columns are texts.
    """
    return isinstance(row, Mapping) and all(_can_be_scored(column, row.get(column)) for column in columns)


def _can_be_scored(column: str, value: Any) -> bool:
    if column == "endings":
        return isinstance(value, list) and len(value) == ENDINGS and all(_can_be_scored("", text) for text in value)
    if column == "label":
        return value in LABELS
    return isinstance(value, str) and (column in JOINED or bool(value.strip()))


def own_documents(run: Path | None, tasks: Iterable[str]) -> Path | None:
    """Return a run's prepared folder if a task needs documents from this folder.

    The result is None if no task needs documents, or if the folder has no documents. Raises UserError if the folder
    was prepared again after the training.
    """
    if not run or not OWN_TASKS.keys() & set(tasks):
        return None
    record = RunRecord(run)
    name = record.recipe().get("data", {}).get("dataset_dir")
    if name and not Path(name).exists():
        fix = "If you moved the folder, pass its new path as --local_data. Otherwise pass other --tasks."
        needed = ", ".join(sorted(OWN_TASKS.keys() & set(tasks)))
        raise UserError(f"The documents of {needed} were in {name}, which does not exist. {fix}")
    if not name or not any(Path(name, file).is_file() for file in DOCUMENT_FILES):
        return None
    record.check_data(Path(name), "--local_data")
    return Path(name)


def check_names(tasks: Iterable[str]) -> None:
    """Raise UserError for unknown tasks."""
    for task in tasks:
        if task not in LOCAL_TASKS and task not in stock_task_names():
            fix = "Pass paths of checkpoints before --tasks." if Path(task).exists() else ""
            near = [name for name in LOCAL_TASKS if task in name]
            near = near or difflib.get_close_matches(task, stock_task_names() | LOCAL_TASKS.keys(), n=1)
            raise UserError(f"There is no task {task!r}. {fix or did_you_mean(task, near or LOCAL_TASKS)}")


def check_tasks(tasks: Iterable[str], local: Collection[str]) -> None:
    """Raise UserError for tasks that need a local data file but have none.

    Args:
        local: the names of the tasks that have a local data file.
    """
    for task in tasks:
        if task in OWN_TASKS and task not in local:
            fix = "Pass --local_data DIR, where DIR is a folder that prepare_data.py --validation_text wrote."
            raise UserError(f"The task {task} needs the file validation.jsonl. {fix}")


@functools.cache
def stock_task_names() -> set[str]:
    """Return the names of all tasks, groups and tags of lm-evaluation-harness."""
    # Searching the text takes a second. TaskManager parses all files as YAML, which takes ten seconds.
    pattern = re.compile(r"^(?:task|group|tag):[ \t]*[\"']?([\w.+-]+)", re.MULTILINE)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in _stock_folder().rglob("*.yaml")]
    return {name for text in texts for name in pattern.findall(text)}


def write_task_files(local: Mapping[str, Path], output: Path, tasks: Iterable[str]) -> dict[str, str]:
    """Write lm-eval task files for `tasks`, and a copy of the local data.

    Args:
        local: the data files found by `find_local_files`. The data of other tasks is loaded from the Hub.
        output: an empty folder that no other process uses.
        tasks: names of the tasks to score. For tasks that are not in LOCAL_TASKS, no task file is written.

    Returns a hash of each task's definition and local data.
    """
    output.mkdir(parents=True, exist_ok=True)
    hashes = {}
    for name, task in [(name, LOCAL_TASKS[name]) for name in tasks if name in LOCAL_TASKS]:
        changes = {"task": name, **task.changes}
        digest = hashlib.sha256(f"{task.stock} {sorted(changes.items())}".encode())
        definition: dict[str, Any] = {"include": str(_stock_folder() / task.stock), **changes}
        if source := local.get(name):
            logger.info("Data of task %s: %s", name, source)
            content = "".join(json.dumps(row) + "\n" for row in _read_data(name, source)).encode()
            # Hash the copy's content, because the original may change before lm-eval reads the copy. The copy's name
            # depends on this content: `datasets` caches by path and modification time, which `cp -p` does not change.
            digest.update(content)
            data = output / f"{name}-{hashlib.sha256(content).hexdigest()[:20]}.jsonl"
            data.write_bytes(content)
            cache = str(output.resolve() / "datasets")
            definition |= {
                "dataset_path": "json",
                "dataset_name": None,
                "dataset_kwargs": {"data_files": {task.split: str(data.resolve())}, "cache_dir": cache},
                # Stock tasks read their training split for few-shot examples. These zero-shot tasks do not need them.
                **dict.fromkeys(("training_split", "validation_split", "test_split")),
                f"{task.split}_split": task.split,
            }
        (output / f"{name}.yaml").write_text(yaml.safe_dump(definition, sort_keys=False, width=1000), encoding="utf-8")
        hashes[name] = digest.hexdigest()
    return hashes


def _read_data(name: str, source: Path) -> list[dict[str, Any]]:
    """Return the rows of a task's data file, with the columns of the task only.

    The rows of a task of OWN_TASKS are made from the documents in the file.

    Raises UserError if the file has no rows, or a row that the task cannot score.
    """
    task, rows = LOCAL_TASKS[name], []
    if name in OWN_TASKS:
        documents = read_documents(source)
        words = name == "last_word"
        column, texts = ("text", cut_passages(documents)) if words else ("page", documents_to_score(documents))
        if not texts:
            raise UserError(f"The validation documents are too short for {name}. Remove {name} from --tasks.")
        return [{column: text} for text in texts]
    for number, row in read_json_lines(source):
        if not fits(row, task.columns):
            needed = ", ".join(f"`{column}`" for column in task.columns)
            choice = f" There must be {ENDINGS} endings, and a label from 0 to {ENDINGS - 1}."
            raise UserError(
                f"{source}, line {number}, cannot be scored. The line must be a JSON object with a value for "
                f"{needed}.{choice if 'label' in task.columns else ''}"
            )
        # Labels of one kind, and no other columns: `datasets` fails if the values of a column differ in type.
        rows.append({column: int(row[column]) if column == "label" else row[column] for column in task.columns})
    if not rows:
        raise UserError(f"{source} is empty. Save the documents of the task in it, one JSON object per line.")
    return rows


def _stock_folder() -> Path:
    import lm_eval

    return Path(lm_eval.__file__).parent / "tasks"
