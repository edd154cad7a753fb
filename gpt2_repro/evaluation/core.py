"""Read the tasks of DCLM's CORE (arXiv:2406.11794) from the evaluation bundle, and compute CORE from their scores.

CORE is the mean of the centred accuracies of 22 tasks: 0 for guessing, 1 for an accuracy of 100 %. Prompts, few-shot
examples and scoring are those of nanochat/core_eval.py (at 92d63d4).
"""

import csv
import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.evaluation.comparison import TaskDetails
from gpt2_repro.evaluation.scores import CORE, Metric
from gpt2_repro.evaluation.statistics import MEAN
from gpt2_repro.files import read_json_lines, sha256_of


CORE_TASK = "core_"  # begins the names of the tasks
BUNDLE = "eval_bundle"  # the folder in the archive
URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
# As other projects have recorded it, in June 2026 and before.
SHA256 = "90a7c19e28ee7a52b4f6e1f87658deb9fde7f63deba2379045bdb1fe9ea5d200"
VERSION = 1.0  # of the prompts
SHUFFLE_SEED = 1337  # of the order of the items
EXAMPLES_SEED = 1234  # of the examples of the first item
MULTIPLE_CHOICE = "multiple_choice"  # one context, several continuations
SCHEMA = "schema"  # several contexts, one continuation
COMPLETION = "language_modeling"  # one context and its continuation, which greedy decoding must give


@dataclasses.dataclass(frozen=True)
class CoreTask:
    """A task of the bundle.

    Args:
        kind: MULTIPLE_CHOICE, SCHEMA or COMPLETION.
        data: the file with its items.
        examples: number of solved items before each item.
        delimiter: the text between a context and its continuation.
        guessing: the accuracy of guessing, from 0 to 1.
    """

    name: str
    kind: str
    data: Path
    examples: int
    delimiter: str
    guessing: float


def find_bundle(folder: Path | None) -> Path:
    """Return the evaluation bundle in a folder, or a downloaded one if `folder` is None, or raise UserError."""
    if folder is None:
        folder = _download()
    inner = folder / BUNDLE
    if inner.is_dir():
        return inner
    return folder


def _download() -> Path:
    """Return the folder of the unpacked archive. `datasets` keeps both in its cache."""
    from datasets import DownloadManager

    manager = DownloadManager()
    fix = "Unpack it yourself, and pass the folder with core.yaml as --local_data."
    try:
        archive = Path(manager.download(URL))
        sha256 = sha256_of(archive)
        if sha256 != SHA256:
            raise UserError(f"{URL} has changed (sha256 {sha256}), so scores could differ. {fix}")
        return Path(manager.extract(str(archive)))
    except OSError as error:
        raise UserError(f"{URL} cannot be downloaded ({in_a_line(error)}). {fix}") from None


def read_bundle(folder: Path) -> list[CoreTask]:
    """Return the tasks of an unpacked evaluation bundle.

    Raises UserError if its tables cannot be read, or if a data file is missing.
    """
    try:
        listed = yaml.safe_load((folder / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]
        guessing = _accuracies_of_guessing(folder / "eval_meta_data.csv")
        tasks = [_task(entry, guessing, folder / "eval_data") for entry in listed]
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError) as error:
        problem = f"{folder} is not DCLM's evaluation bundle, because core.yaml or eval_meta_data.csv cannot be read"
        raise UserError(f"{problem} ({type(error).__name__}: {error}). Unpack {URL} there.") from None
    for task in tasks:
        if not task.data.is_file():
            raise UserError(f"{task.data} is missing. Unpack {URL} again.")
    return tasks


def _accuracies_of_guessing(table: Path) -> dict[str, float]:
    accuracies: dict[str, float] = {}
    with table.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            percent = float(row["Random baseline"])
            accuracies[row["Eval Task"]] = percent / 100
    return accuracies


def _task(entry: Mapping[str, Any], guessing: Mapping[str, float], data: Path) -> CoreTask:
    label = entry["label"]
    return CoreTask(
        name=CORE_TASK + label,
        kind=entry["icl_task_type"],
        data=data / entry["dataset_uri"],
        examples=entry["num_fewshot"][0],
        delimiter=entry.get("continuation_delimiter", " "),
        guessing=guessing[label],
    )


def definition_of(task: CoreTask) -> dict[str, Any]:
    """Return lm-eval's definition of a task, without its data. It reads the rows of `rows_of`."""
    definition: dict[str, Any] = {
        "output_type": "multiple_choice",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": VERSION},
    }
    if task.kind == MULTIPLE_CHOICE:
        definition["doc_to_text"] = "context"
        definition["doc_to_choice"] = "options"
        definition["doc_to_target"] = "gold"
    elif task.kind == SCHEMA:
        # lm-eval's form for several contexts: the text is the number of the right one.
        definition["doc_to_text"] = "gold"
        definition["doc_to_choice"] = "options"
        definition["doc_to_target"] = "continuation"
    else:
        definition["output_type"] = "loglikelihood"
        definition["doc_to_text"] = "context"
        definition["doc_to_target"] = "continuation"
    return definition


def rows_of(task: CoreTask) -> list[dict[str, Any]]:
    """Return the items of a task in the order of scoring, with examples in front of each.

    The column `shown` has the examples alone.
    """
    items = [item for _, item in read_json_lines(task.data)]
    random.Random(SHUFFLE_SEED).shuffle(items)
    solved = [_solved(item, task) for item in items]
    rows: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        others = [*range(number), *range(number + 1, len(items))]
        generator = random.Random(EXAMPLES_SEED + number)
        chosen = generator.sample(others, task.examples)
        examples = "".join(f"{solved[index]}\n\n" for index in chosen)
        row = _row(item, examples, task)
        row["shown"] = examples
        rows.append(row)
    return rows


def _row(item: Mapping[str, Any], examples: str, task: CoreTask) -> dict[str, Any]:
    if task.kind == MULTIPLE_CHOICE:
        options = [task.delimiter + choice for choice in item["choices"]]
        return {"context": examples + item["query"], "options": options, "gold": item["gold"]}
    if task.kind == SCHEMA:
        contexts = [examples + context for context in item["context_options"]]
        return {"options": contexts, "continuation": task.delimiter + item["continuation"], "gold": item["gold"]}
    # White space between a context and its continuation belongs to the continuation, as in the training text.
    context = f"{examples}{item['context'].strip()}{task.delimiter}"
    space = context[len(context.rstrip()) :]
    return {"context": context.strip(), "continuation": space + item["continuation"]}


def _solved(item: Mapping[str, Any], task: CoreTask) -> str:
    """Return an item with its right answer."""
    row = _row(item, "", task)
    if task.kind == MULTIPLE_CHOICE:
        return str(row["context"] + row["options"][row["gold"]])
    if task.kind == SCHEMA:
        return str(row["options"][row["gold"]] + row["continuation"])
    return str(row["context"] + row["continuation"])


def core_score(metrics: Sequence[Metric], tasks: Sequence[CoreTask]) -> list[Metric]:
    """Return CORE, the mean of the centred accuracies of `tasks`, or [] without tasks."""
    if not tasks:
        return []
    scored = {metric.task: metric for metric in metrics}
    right_of = [scored[task.name].array() for task in tasks]
    ranges = [1 - task.guessing for task in tasks]  # from guessing to 100 %
    centred: list[float] = []
    for right, span in zip(right_of, ranges, strict=True):
        wrong = 1 - float(right.mean())
        centred.append(1 - wrong / span)
    core = float(np.mean(centred))
    documents: list[str] = []
    for task in tasks:
        documents += scored[task.name].documents

    # One value per document. The values spread as the answers of a task spread around its own mean, so that their
    # standard error is sqrt(sum of e^2) / tasks, where e is the standard error of a task's centred accuracy. The
    # tasks are fixed, so their differences are no error.
    total = len(documents)
    values: list[float] = []
    for right, span in zip(right_of, ranges, strict=True):
        size = len(right)
        variance_ratio = total * (total - 1) / size / max(1, size - 1)  # of the means over `size` and `total` values
        weight = math.sqrt(variance_ratio) / span / len(tasks)
        deviations = right - right.mean()
        values += (core + weight * deviations).tolist()
    bundle = tasks[0].data.parents[1]
    details = TaskDetails(version=VERSION, documents=total, data=str(bundle))
    metric = Metric(CORE, "centred", None, None, True, MEAN, details=details).over(values, documents)
    if any(len(right) == 1 for right in right_of):  # such as a smoke test with --limit 1
        metric = dataclasses.replace(metric, stderr=None)
    return [metric]
