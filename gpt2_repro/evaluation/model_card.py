"""Write the model card: architecture, data, recipe, evaluation, use and limits."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gpt2_repro.evaluation.comparison import (
    CLEAN,
    UNTRAINED,
    ComparedModel,
    Comparison,
    ComparisonRow,
    Difference,
    Score,
    TaskDetails,
)
from gpt2_repro.evaluation.output import render
from gpt2_repro.evaluation.references import DOCUMENTS
from gpt2_repro.evaluation.scores import BITS
from gpt2_repro.evaluation.tasks import LOCAL_TASKS, local_task
from gpt2_repro.files import from_json, read_object
from gpt2_repro.model.checkpoint import HUB_ID
from gpt2_repro.run_record.environment import TrainingRecord
from gpt2_repro.run_record.layout import COMPARISON, ENVIRONMENT, EVALUATION_FOLDER, RECIPE
from gpt2_repro.text import Cell, Table


OURS = "this model"  # heading of its column
SHOWN_FILES = 3  # of each list of files of the Hub


@dataclasses.dataclass(frozen=True)
class Results:
    """The scores of one model in a comparison.

    Args:
        column: the name of the model in the comparison, or of the mean over seeds that contains it.
        seed: the position of the model among the seeds of the column, None if the column is this model alone.
    """

    comparison: Comparison
    column: ComparedModel
    seed: int | None = None

    def own_score(self, row: ComparisonRow) -> Score | None:
        """Return this model's own score, or None if it is unknown."""
        score = row.values.get(self.column.name)
        if score is None or score.value is None:
            return None
        if self.seed is None:
            return score
        if len(score.seeds) != len(self.column.seeds):
            return None
        return Score(score.seeds[self.seed])

    @property
    def rows(self) -> list[ComparisonRow]:
        """The rows in which this model has a score."""
        return [row for row in self.comparison.rows if self.own_score(row) is not None]


def find_results(folder: Path, revision: str) -> Results | None:
    """Return the scores of a model of a run, or None. Smoke tests are omitted.

    The model may be in the comparison of its run, in the scores of its checkpoint by --follow, or in the comparison of
    another run with other seeds.

    Args:
        folder: the model's final/ or checkpoint-N/ in the run directory.
        revision: the model's hash (see `models.fingerprint`).
    """
    run = folder.absolute().parent
    by_follow = run / EVALUATION_FOLDER / folder.name / Path(COMPARISON).name
    of_other_runs = sorted(run.parent.glob(f"*/{COMPARISON}"))
    for path in (run / COMPARISON, by_follow, *of_other_runs):
        comparison = from_json(Comparison, read_object(path), default=Comparison(rows=[]))
        if comparison.limit is not None:
            continue
        for column in comparison.models:
            if column.revision == revision:
                return Results(comparison, column)
            hashes = column.revision.split("+")  # see scores.join_seeds
            short = revision[: len(hashes[0])]
            if column.seeds and short in hashes:
                return Results(comparison, column, hashes.index(short))
    return None


def model_card(
    name: str,
    record: TrainingRecord,
    results: Results | None = None,
    *,
    license_id: str | None = None,
    repository: str | None = None,
) -> str:
    """Return the model card as Markdown with the metadata header of the Hub.

    Names of local files are not in the card.

    Args:
        name: the title of the card.
        license_id: the license of the weights. It does not follow from the license of the data.
        repository: the Hub id of the model. None: the code example loads the folder of the card.
    """
    start = record.environment.run_identity.get("init_from", "")
    header: dict[str, Any] = {}
    if license_id:
        header["license"] = license_id
    header["library_name"] = "transformers"
    header["pipeline_tag"] = "text-generation"
    header.update(_origin(record))
    comparison: Comparison | None = None
    table = ""
    scored: list[str] = []
    if results is not None and results.rows:
        comparison = results.comparison
        table = _score_table(results).markdown()
        scored = _scored_documents(results)
        entries = _index_entries(results)
        if entries:
            header["model-index"] = [{"name": name, "results": entries}]
    card = render(
        "model_card.md.j2",
        name=name,
        repository=repository,
        header=yaml.safe_dump(header, sort_keys=False, allow_unicode=True),
        record=record,
        start=_public_start(start),
        source=json.dumps(_public_source(record.environment.data["source"])),
        comparison=comparison,
        table=table,
        scored=scored,
        deviations=deviation_table(_public_deviations(record)),
        recipe_file=RECIPE,
        environment_file=ENVIRONMENT,
    )
    # Absolute paths are shortened to their last part, because they are valid on one machine only.
    return re.sub(r"(?<![\w./-])/(?:[^\s/\"',=]+/)+", "", card)


def _origin(record: TrainingRecord) -> dict[str, Any]:
    """Return the Hub datasets and the base model, each only if it is known."""
    source = record.environment.data.get("source", {})
    start = record.environment.run_identity.get("init_from", "")
    repositories: set[str] = set()
    for part in source.get("sources", [source]):
        if "repository" in part:
            repositories.add(part["repository"])
    origin: dict[str, Any] = {}
    if repositories:
        origin["datasets"] = sorted(repositories)
    if _is_hub_id(start):
        origin["base_model"] = start.rstrip("/")
    return origin


def _is_hub_id(name: str) -> bool:
    is_file_name = "." in name and "/" not in name
    if is_file_name or name.startswith("runs/") or not HUB_ID.fullmatch(name):
        return False
    return not Path(name).exists()


def _public_start(start: str) -> str:
    """Return the initial weights for a sentence: a Hub id, or no name for a local model."""
    if not start:
        return ""
    if _is_hub_id(start):
        return f"`{start}`"
    return "a local model"


def _index_entries(results: Results) -> list[dict[str, Any]]:
    """Return the scores of complete public splits in the format that the Hub uses in model cards.

    Scores of local files are not among them, because the files may differ from the public ones.
    """
    entries: dict[str, dict[str, Any]] = {}
    for row in results.rows:
        details = results.comparison.task_details.get(row.task)
        score = results.own_score(row)
        if score is None or details is None or not _is_public_split(row, details):
            continue
        if row.task not in entries:
            task = LOCAL_TASKS[row.task]
            dataset = {"name": task.title, "type": task.dataset, "split": task.split}
            entries[row.task] = {
                "task": {"type": "text-generation"},
                "dataset": dataset,
                "metrics": [],
            }
        metric = {
            "type": row.metric,
            "name": row.metric,
            "value": round(score.value or 0.0, 4),
        }
        entries[row.task]["metrics"].append(metric)
    return list(entries.values())


def _is_public_split(row: ComparisonRow, details: TaskDetails) -> bool:
    """Return whether a row has the score of all documents of a split on the Hub."""
    task = LOCAL_TASKS.get(row.task)
    if task is None or task.dataset is None or row.metric.endswith(CLEAN):
        return False
    return details.data == task.dataset and details.documents == DOCUMENTS[row.task]


def _score_table(results: Results) -> Table:
    """Return the table of the scores of this model, of the mean over its seeds, and of the baseline."""
    comparison = results.comparison
    column = results.column
    headings = {column.name: OURS}
    if results.seed is not None:
        headings[column.name] = f"mean of {len(column.seeds)} seeds"
    for model in comparison.models:
        if model.name == comparison.baseline:
            headings.setdefault(model.name, _public_heading(model))
    tasks = _public_tasks(comparison)
    rows = []
    for row in results.rows:
        values: dict[str, Score] = {}
        for name, heading in headings.items():
            if name in row.values:
                values[heading] = row.values[name]
        own = results.own_score(row)
        if own is not None and OURS not in values:
            difference = _own_difference(own, row, comparison.baseline)
            values[OURS] = dataclasses.replace(own, difference=difference)
        rows.append(dataclasses.replace(row, task=tasks[row.task], values=values))
    shown = list(dict.fromkeys([OURS, *headings.values()]))
    baseline = headings.get(comparison.baseline or "")
    public = dataclasses.replace(comparison, rows=rows, baseline=baseline)
    return public.table({heading: heading for heading in shown})


def _own_difference(own: Score, row: ComparisonRow, baseline: str | None) -> Difference | None:
    base = row.values.get(baseline or "")
    if own.value is None or base is None or base.value is None:
        return None
    return Difference(own.value - base.value)


def _public_heading(model: ComparedModel) -> str:
    """Return a heading for a baseline, which does not call a local model by a name of the Hub."""
    if model.source == UNTRAINED:
        return UNTRAINED
    if model.is_local is None:
        return "baseline"
    if model.is_local:
        return "baseline (a local model)"
    return model.source.rstrip("/")


def _public_tasks(comparison: Comparison) -> dict[str, str]:
    """Return the names of the tasks in the card. A task of a local text is named after the text."""
    names: dict[str, str] = {}
    texts = 0
    for task in dict.fromkeys(row.task for row in comparison.rows):
        if task.startswith(BITS):
            texts += 1
            names[task] = f"local text {texts}"
        else:
            names[task] = task
    return names


def _scored_documents(results: Results) -> list[str]:
    """Return one sentence for each task: how many documents of which data were scored."""
    tasks = _public_tasks(results.comparison)
    sentences = []
    for task, details in results.comparison.task_details.items():
        if task not in tasks:
            continue
        count = "an unknown number of"
        if details.documents is not None:
            count = f"{details.documents:,}"
        sentences.append(f"{tasks[task]}: {count} documents of {_public_data(task, details)}")
    return sentences


def _public_data(task: str, details: TaskDetails) -> str:
    """Return the Hub id of a task's data, or that the data were local files."""
    own = local_task(task)
    if details.data is None:
        return "a group of tasks"
    if own is not None and details.data != own.dataset:
        return "local files"
    if own is not None and details.documents == DOCUMENTS.get(task):
        return f"{details.data} on the Hub, the complete split `{own.split}`"
    return f"{details.data} on the Hub"


def _public_source(value: Any) -> Any:
    """Return a data source's description, with the number of local files instead of their names."""
    if isinstance(value, list):
        return [_public_source(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    public = {key: _public_source(part) for key, part in value.items()}
    files = value.get("files", [])
    if "sources" in value:
        public.pop("name", None)  # it has the names of all sources
    if files and isinstance(files[0], Mapping):
        for key in ("name", "files", "unused_files"):
            public.pop(key, None)
        num_bytes = sum(file.get("bytes", 0) for file in files)
        return {"local files": len(files), "bytes": num_bytes, **public}
    if len(files) > SHOWN_FILES:
        public["files"] = [*files[:SHOWN_FILES], f"and {len(files) - SHOWN_FILES} more"]
    return public


def _public_deviations(record: TrainingRecord) -> list[Mapping[str, str]]:
    """Return the training settings that differ from recipes/gpt2_124m.yaml, without names of local files."""
    source = record.environment.data["source"]
    public: list[Mapping[str, str]] = []
    for deviation in record.environment.deviations or ():
        is_local = False
        if deviation["field"] == "data.source":
            is_local = "local files" in json.dumps(_public_source(source))
        elif deviation["field"] in ("data.tokenizer", "model.init_from"):
            is_local = _may_be_path(deviation["run"])
        if is_local:
            deviation = {**deviation, "run": "local files"}
        public.append(deviation)
    return public


def _may_be_path(name: str) -> bool:
    if Path(name).exists():
        return True
    looks_like_path = "/" in name or "." in name
    return looks_like_path and not _is_hub_id(name)


def deviation_table(deviations: Sequence[Mapping[str, str]] | None) -> Table:
    """Return a table of the training settings that differ from recipes/gpt2_124m.yaml."""
    rows: list[list[Cell]] = []
    for deviation in deviations or ():
        if deviation["field"] == "data.data_files":
            continue  # its paths are valid on one machine only
        cells: list[Cell] = []
        for column in ("field", "run", "recipe"):
            text = deviation[column].replace("|", "/")
            cells.append(Cell(text))
        rows.append(cells)
    return Table(["field", "this run", "recipe"], rows)
