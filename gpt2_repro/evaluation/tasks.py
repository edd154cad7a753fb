"""Write lm-eval task files: stock tasks with local data, and the project's tasks."""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gpt2_repro.data.sources.base import TextForm
from gpt2_repro.data.sources.local_files import KINDS, kind_of, local_source
from gpt2_repro.data.sources.text_files import COMPRESSIONS
from gpt2_repro.errors import UserError, did_you_mean, in_a_line
from gpt2_repro.evaluation.core import CoreTask, definition_of, find_bundle, read_bundle, rows_of
from gpt2_repro.evaluation.passages import cut_passages, documents_to_score, read_documents
from gpt2_repro.evaluation.scores import BITS, COMPLETION
from gpt2_repro.files import read_json_lines, read_table
from gpt2_repro.hub import check_hub
from gpt2_repro.run_record import RunRecord


ENDINGS = 4  # of a HellaSwag item
LABELS = [*range(ENDINGS), *map(str, range(ENDINGS))]  # numbers in some copies of the data, strings in others
# Texts that the stock task joins with other texts, so each of them may be blank.
JOINED = ("activity_label", "ctx_a", "ctx_b", "support")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LocalTask:
    """A task that can read its data from a local file: an entry of tasks.yaml."""

    stock: str
    split: str
    files: list[str]
    columns: list[str]
    dataset: str | None = None
    title: str | None = None
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)


_TABLE = read_table(__file__, "tasks.yaml")
LOCAL_TASKS = {name: LocalTask(**row) for name, row in _TABLE.items()}
OWN_TASKS = ("last_word", "document_perplexity")  # made from validation documents
# Prefixes of tasks with a perplexity per document, whose standard error lm-eval would bootstrap for minutes.
# reading.py computes all standard errors of these tasks. The harness's JSON has "N/A".
OWN_STANDARD_ERRORS = ("lambada", "last_word")


def local_task(name: str) -> LocalTask | None:
    """Return how a task reads local files, or None if it cannot."""
    if name.startswith(BITS):
        name = "document_perplexity"
    return LOCAL_TASKS.get(name)


class TaskFiles(NamedTuple):
    """Tasks to score, with lm-eval's task files in a folder.

    Args:
        sources: the local data file of each task, None for a task that reads from the Hub.
        hashes: of the task files and their data (see `write_task_files`).
        of_core: the tasks of CORE.
    """

    sources: dict[str, Path | None]
    hashes: dict[str, str]
    folder: Path
    of_core: Sequence[CoreTask] = ()


def open_tasks(options: argparse.Namespace, names: list[str], run_directory: Path | None, folder: Path) -> TaskFiles:
    """Write task files to an empty folder, and load data from the Hub.

    Raises UserError for unknown tasks, and for tasks without a needed file.
    """
    of_core: list[CoreTask] = []
    local: dict[str, Path] = {}
    if options.suite == "core":
        of_core = read_bundle(find_bundle(options.local_data))
    if options.bits_per_byte:
        local = text_domains(options.bits_per_byte)
        if not options.tasks and not options.suite:
            names = []
    names = _with_completion(names)
    data = options.local_data or own_documents(run_directory, names)
    if names and data:
        local = find_local_files(data, names) | local
    for name in names:
        if name not in local:
            _check_task(name)
    local.update({task.name: task.data for task in of_core})
    tasks = dict.fromkeys(names) | local
    hashes = write_task_files(tasks, folder, of_core)
    fetch_data(tasks, folder)
    return TaskFiles(tasks, hashes, folder, of_core)


def _with_completion(names: Iterable[str]) -> list[str]:
    """Return names of tasks with HellaSwag in completion style after each HellaSwag."""
    tasks: list[str] = []
    for name in names:
        tasks.append(name)
        if name == "hellaswag":
            tasks.append(COMPLETION)
    return tasks


def _check_task(name: str) -> None:
    """Raise UserError if a task without a local file cannot be loaded from the Hub."""
    if name in OWN_TASKS:
        fix = "Pass --local_data DIR, where DIR is a folder that prepare_data.py --validation_text wrote."
        raise UserError(f"The task {name} needs the file validation.jsonl. {fix}")
    if name in LOCAL_TASKS:
        return
    stock = _stock_tasks().all_tasks
    if name not in stock:
        raise UserError(f"There is no task {name!r}. {did_you_mean(name, [*LOCAL_TASKS, *stock])}")


def text_domains(folder: Path) -> dict[str, Path]:
    """Return a task name for each text file and each folder of text files in a folder.

    Raises UserError if there are none, or if two of them have the same name without extension.
    """
    paths: list[Path] = []
    if folder.is_dir():
        paths = sorted(folder.glob("[!.]*"))
    if not paths:
        raise UserError(f"--bits_per_byte {folder} is not a folder with text files.")
    tasks: dict[str, Path] = {}
    for path in paths:
        task = BITS + _domain_name(path)
        if task in tasks:
            other = tasks[task].name
            raise UserError(f"{path} has the same name as {other}, apart from extension and symbols. Rename it.")
        tasks[task] = path
    return tasks


def _domain_name(path: Path) -> str:
    """Return a name without the extension of a text file, and without symbols, which lm-eval reads as a pattern."""
    name = path.name
    if path.is_file() and kind_of(path) in KINDS:
        if path.suffix in COMPRESSIONS:
            name = name.removesuffix(path.suffix)
        name = name[: -len(kind_of(path))]
    return re.sub(r"[^\w.-]+", "-", name)


def find_local_files(local_data: Path, tasks: Iterable[str]) -> dict[str, Path]:
    """Return the data file of each task that has one in the folder `local_data`.

    Raises UserError if `local_data` has no data file for any of the tasks.
    """
    paths: dict[str, Path] = {}
    expected: set[str] = set()
    for task in tasks:
        own = LOCAL_TASKS.get(task)
        if own is None:
            continue
        expected.add(Path(own.files[0]).name)
        path = _first_file(local_data, own)
        if path is not None:
            paths[task] = path
    if not paths:
        names = ", ".join(sorted(expected))
        raise UserError(f"--local_data {local_data} has no data for {', '.join(tasks)}. Expected: {names}.")
    return paths


def _first_file(folder: Path, task: LocalTask) -> Path | None:
    """Return the first possible data file of a task that exists in a folder."""
    for name in task.files:
        path = folder / name
        if path.is_file():
            return path
    return None


def read_columns(rows: Iterable[tuple[int, Any]], columns: Sequence[str], source: object) -> list[dict[str, Any]]:
    """Return the columns of numbered rows, or raise UserError if a row cannot be scored or there are none.

    `endings` must be four texts, and `label` the number of one of them. Most other columns are texts.
    """
    documents: list[dict[str, Any]] = []
    for number, row in rows:
        if not _has_columns(row, columns):
            needed = ", ".join(f"`{column}`" for column in columns)
            raise UserError(f"{source}, line {number}, cannot be scored. It must be a JSON object with {needed}.")
        # Labels of one kind, and no other columns: `datasets` fails if the values of a column differ in type.
        document = {column: row[column] for column in columns}
        if "label" in document:
            document["label"] = int(document["label"])
        documents.append(document)
    if not documents:
        raise UserError(f"{source} is empty. Save the documents of the task in it.")
    return documents


def _has_columns(row: Any, columns: Sequence[str]) -> bool:
    if not isinstance(row, Mapping):
        return False
    return all(_can_be_scored(column, row.get(column)) for column in columns)


def _can_be_scored(column: str, value: Any) -> bool:
    if column == "endings":
        if not isinstance(value, list) or len(value) != ENDINGS:
            return False
        return all(_is_text(text) for text in value)
    if column == "label":
        return value in LABELS
    if column == "choices":
        if not isinstance(value, dict):
            return False
        return isinstance(value.get("text"), list) and isinstance(value.get("label"), list)
    if column in JOINED:
        return isinstance(value, str)
    return _is_text(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def own_documents(run_directory: Path | None, tasks: Iterable[str]) -> Path | None:
    """Return the run's prepared folder if a task needs its documents and it has them."""
    own = [task for task in tasks if task in OWN_TASKS]
    if run_directory is None or not own:
        return None
    folder = RunRecord(run_directory).data_folder("--local_data")
    if folder is None or _first_file(folder, LOCAL_TASKS[own[0]]) is None:
        return None
    return folder


def choose_index(task_folder: Path, task: str) -> Any:
    """Return lm-eval's index for a task: of `task_folder` if it has the task."""
    from gpt2_repro.evaluation.task_index import TaskIndex

    if (task_folder / f"{task}.yaml").is_file():
        return TaskIndex(include_path=str(task_folder), include_defaults=False)
    return _stock_tasks()


@functools.cache
def _stock_tasks() -> Any:
    from gpt2_repro.evaluation.task_index import TaskIndex

    return TaskIndex()  # reading 14,000 stock tasks takes ten seconds


def load_task(task: str, folder: Path) -> list[Any]:
    """Return lm-eval's tasks of a name, with their data. Raises UserError if the data cannot be loaded."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with one_line_errors(task):
        index = choose_index(folder, task)
        loaded = index.load([task])
        return list(loaded["tasks"].values())


def fetch_data(tasks: Mapping[str, Path | None], folder: Path) -> None:
    """Load data from the Hub into the cache, before models are scored for hours.

    Raises UserError if the data of a task is missing.
    """
    for task, source in tasks.items():
        if source is None:
            check_hub()
            load_task(task, folder)


@contextlib.contextmanager
def one_line_errors(task: str) -> Iterator[None]:
    """Convert lm-eval's errors to UserError."""
    from datasets.exceptions import DatasetsError

    try:
        with contextlib.redirect_stdout(sys.stderr):  # for the harness's progress, because stdout is for the table
            yield
    except (ConnectionError, DatasetsError) as error:
        own = local_task(task)
        if own is None:
            fix = f"Check the network, or remove {task} from --tasks."
        else:
            fix = f"Pass a folder with {own.files[0]} as --local_data."
        raise UserError(f"Cannot load the data of {task} ({in_a_line(error)}). {fix}") from None


def write_task_files(
    tasks: Mapping[str, Path | None], output: Path, of_core: Sequence[CoreTask] = ()
) -> dict[str, str]:
    """Write lm-eval task files for `tasks`, and a copy of the local data.

    Args:
        tasks: the local data file of each task, None for data on the Hub. No task file is written for a task that
            lm-eval loads as it is.
        output: a folder that no other process uses.
        of_core: those of the tasks that are tasks of CORE.

    Returns a hash of each task's definition and local data.
    """
    output.mkdir(parents=True, exist_ok=True)
    core_tasks = {task.name: task for task in of_core}
    hashes: dict[str, str] = {}
    for name, source in tasks.items():
        task = local_task(name)
        if name in core_tasks:
            definition = definition_of(core_tasks[name])
            hashes[name] = _write_task(name, definition, "test", source, rows_of(core_tasks[name]), output)
        elif task is not None and source:
            rows = _read_data(name, task.columns, source)
            hashes[name] = _write_task(name, _changed(task), task.split, source, rows, output)
        elif task is not None and task.dataset:
            hashes[name] = _write_task(name, _changed(task), task.split, None, (), output)
        # Without a task file, lm-eval's own task is used.
    return hashes


def _changed(task: LocalTask) -> dict[str, Any]:
    return {"include": task.stock, **task.changes}


def _write_task(
    name: str,
    definition: dict[str, Any],
    split: str,
    source: Path | None,
    rows: Iterable[Mapping[str, Any]],
    output: Path,
) -> str:
    """Write a task file for lm-eval, and the rows if they come from the local file `source`.

    Returns a hash of both.
    """
    import lm_eval

    definition["task"] = name
    digest = hashlib.sha256(json.dumps(definition, sort_keys=True).encode())
    if "include" in definition:
        definition["include"] = str(Path(lm_eval.__file__).parent / "tasks" / definition["include"])
    if source:
        logger.info("Data of task %s: %s", name, source)
        lines: list[str] = []
        for row in rows:
            lines.append(json.dumps(row) + "\n")
        content = "".join(lines).encode()
        # Hash the copy's content, because the original may change before lm-eval reads the copy. The copy's name
        # depends on this content: `datasets` caches by path and modification time, which `cp -p` does not change.
        digest.update(content)
        version = hashlib.sha256(content).hexdigest()[:20]
        data = output / f"{name}-{version}.jsonl"
        data.write_bytes(content)
        keys = _local_data(split, data.resolve(), cache=output.resolve() / "datasets")
        definition.update(keys)
    text = yaml.safe_dump(definition, sort_keys=False, width=1000)
    (output / f"{name}.yaml").write_text(text, encoding="utf-8")
    return digest.hexdigest()


def _local_data(split: str, data: Path, cache: Path) -> dict[str, Any]:
    """Return the keys of a task file with which lm-eval reads a split from a local file."""
    arguments = {"data_files": {split: str(data)}, "cache_dir": str(cache)}
    keys: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": arguments,
        # Stock tasks read their training split for few-shot examples. These zero-shot tasks do not need them.
        "training_split": None,
        "validation_split": None,
        "test_split": None,
    }
    keys[f"{split}_split"] = split
    return keys


def _read_data(name: str, columns: Sequence[str], source: Path) -> list[dict[str, Any]]:
    """Return a task's rows from a data file or documents, or raise UserError."""
    if name.startswith(BITS):
        return _read_texts(name, source)
    if name == "document_perplexity":
        documents = documents_to_score(read_documents(source))
        return [{"page": document} for document in documents]
    if name == "last_word":
        passages = cut_passages(read_documents(source))
        if not passages:
            raise UserError(f"The validation documents have too few words for {name}. Remove {name} from --tasks.")
        return [{"text": passage} for passage in passages]
    return read_columns(read_json_lines(source), columns, source)


def _read_texts(name: str, source: Path) -> list[dict[str, Any]]:
    """Return the documents of a text file or a folder of text files as rows, or raise UserError."""
    pages: list[dict[str, Any]] = []
    bad: list[str] = []
    form = TextForm(drops_front_matter=True)  # as the preparation by default
    local = local_source(name, [str(source)], form, split="all")
    for file in local.files:
        for part in file.parts():
            for batch in part.read():
                bad += batch.bad
                for text in batch.documents:
                    if text.strip():
                        pages.append({"page": text})
    if bad:
        raise UserError(f"{len(bad):,} files or rows cannot be scored. The first: {bad[0]}. Repair or remove them.")
    return read_columns(enumerate(pages, start=1), ["page"], source)
