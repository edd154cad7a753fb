"""Read the tasks of DCLM's CORE (arXiv:2406.11794) from the evaluation bundle, and write them for lm-eval.

CORE is the mean of the centred accuracies of 22 tasks: 0 for guessing, 1 for an accuracy of 100 %. Prompts, few-shot
examples and scoring are those of nanochat/core_eval.py (at 92d63d4).
"""

import csv
import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.evaluation.scores import Metric
from gpt2_repro.evaluation.statistics import MEAN
from gpt2_repro.files import read_json_lines, read_table, sha256_of


PREFIX = "core_"  # of the names of the tasks
URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
# As other projects have recorded it, in June 2026 and before.
SHA256 = "90a7c19e28ee7a52b4f6e1f87658deb9fde7f63deba2379045bdb1fe9ea5d200"
SHUFFLE, EXAMPLES = 1337, 1234  # seeds of the order of the items, and of the examples of the first item
DEFINITIONS: dict[str, dict[str, Any]] = read_table(__file__, "core_definitions.yaml")


class CoreTask(NamedTuple):
    """A task of the bundle.

    Args:
        kind: a key of DEFINITIONS.
        examples: number of solved items before each item.
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
        from datasets import DownloadManager

        fix, manager = "Unpack it yourself, and pass the folder with core.yaml as --local_data.", DownloadManager()
        try:
            archive = Path(manager.download(URL))
            if (sha256 := sha256_of(archive)) != SHA256:
                raise UserError(f"{URL} has changed (sha256 {sha256}), so scores could differ. {fix}")
            folder = Path(manager.extract(str(archive)))
        except OSError as error:
            raise UserError(f"{URL} cannot be downloaded ({in_a_line(error)}). {fix}") from None
    return folder / "eval_bundle" if (folder / "eval_bundle").is_dir() else folder


def read_bundle(folder: Path) -> list[CoreTask]:
    """Return the tasks of an unpacked evaluation bundle. Raises UserError if core.yaml does not fit."""
    try:
        listed = yaml.safe_load((folder / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]
        with (folder / "eval_meta_data.csv").open(encoding="utf-8") as file:
            guessing = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in csv.DictReader(file)}
        tasks = []
        for task in listed:
            data, delimiter = folder / "eval_data" / task["dataset_uri"], task.get("continuation_delimiter", " ")
            name, kind, examples = task["label"], task["icl_task_type"], task["num_fewshot"][0]
            tasks.append(CoreTask(PREFIX + name, kind, data, examples, delimiter, guessing[name]))
        return tasks
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError) as error:
        problem = f"{folder} is not DCLM's evaluation bundle, because core.yaml or eval_meta_data.csv cannot be read"
        raise UserError(f"{problem} ({type(error).__name__}: {error}). Unpack {URL} there.") from None


def rows_of(task: CoreTask) -> list[dict[str, Any]]:
    """Return the items of a task in the order of scoring, with their examples in the context and alone (`shown`)."""
    items = [item for _, item in read_json_lines(task.data)]
    random.Random(SHUFFLE).shuffle(items)
    solved = [_solved(_row(item, "", task)) for item in items]
    rows = []
    for number, item in enumerate(items):
        others = [*range(number), *range(number + 1, len(items))]
        chosen = random.Random(EXAMPLES + number).sample(others, task.examples)
        examples = "".join(f"{solved[index]}\n\n" for index in chosen)
        rows.append(_row(item, examples, task) | {"shown": examples})
    return rows


def _solved(row: Mapping[str, Any]) -> str:
    option = row["options"][row["gold"]] if "options" in row else ""
    return f"{row.get('context', '')}{option}{row.get('continuation', '')}"


def _row(item: Mapping[str, Any], examples: str, task: CoreTask) -> dict[str, Any]:
    if task.kind == "multiple_choice":
        options = [task.delimiter + choice for choice in item["choices"]]
        return {"context": examples + item["query"], "options": options, "gold": item["gold"]}
    if task.kind == "schema":
        options = [examples + context for context in item["context_options"]]
        return {"options": options, "continuation": task.delimiter + item["continuation"], "gold": item["gold"]}
    whole = f"{examples}{item['context'].strip()}{task.delimiter}"
    return {"context": whole.strip(), "continuation": whole[len(whole.rstrip()) :] + item["continuation"]}


def definition_of(task: CoreTask) -> dict[str, Any]:
    """Return lm-eval's definition of a task, without its data."""
    return dict(DEFINITIONS[task.kind])


def core_score(metrics: Sequence[Metric], bundle: Sequence[CoreTask]) -> list[Metric]:
    """Return CORE, the mean of the centred accuracies, or [] without the bundle."""
    scored = {metric.task: metric for metric in metrics}
    if not bundle:
        return []
    parts = [(scored[task.name].array(), 1 - task.guessing) for task in bundle]
    total = sum(len(right) for right, _ in parts)
    mean = np.mean([1 - (1 - right.mean()) / above for right, above in parts])
    # One value per document. They spread as the answers of a task spread around its own mean, so that their standard
    # error is sqrt(sum of s^2) / tasks, where s is the standard error of a task.
    values: list[float] = []
    for right, above in parts:
        scale = math.sqrt(total * (total - 1) / len(right) / max(1, len(right) - 1)) / above / len(parts)
        values += (mean + scale * (right - right.mean())).tolist()
    documents = [name for task in bundle for name in scored[task.name].documents]
    core = Metric("core", "centred", None, None, True, MEAN, version=1.0, data=str(bundle[0].data.parents[1]))
    core = core.over(values, documents, num_documents=total)
    return [core if all(len(right) > 1 for right, _ in parts) else dataclasses.replace(core, stderr=None)]
