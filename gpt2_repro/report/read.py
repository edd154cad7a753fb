"""A run folder as it lies on disk, finished or not. Everything that the report shows comes through here."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.files import parse_event, read_lines


RECORD_FILES = ("metrics.jsonl", "run_status.json", "environment.json", "recipe.yaml")
Row = dict[str, Any]
COMPARISON, DIAGNOSIS = "evaluation/comparison.json", "evaluation/diagnosis/diagnosis.json"
WRITERS = {"comparison.json": "bash evaluate.sh", "diagnosis.json": "python -m gpt2_repro.diagnose"}
LARGEST = 1e30  # what is larger is a slip, and matplotlib has no axis for it


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run has written so far; a file that is not there yet is empty here."""

    path: Path
    recipe_text: str
    recipe: dict[str, Any]
    environment: dict[str, Any]
    status: dict[str, Any]
    training: list[Row]  # one per step, in order
    validation: list[Row]
    samples: list[Row]
    comparison: dict[str, Any]
    diagnosis: dict[str, Any]
    broken_lines: int  # of metrics.jsonl, without a last one cut short by a kill

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def reference_losses(self) -> dict[str, float]:
        """Losses of count models on the validation text, in nats per token, by the model's name."""
        losses = mapping(mapping(self.environment.get("data")).get("reference_losses"))
        return {name: float(loss) for name, loss in losses.items() if is_number(loss)}

    @property
    def hellaswag(self) -> list[Row]:
        """The validations with which HellaSwag was scored."""
        return [row for row in self.validation if is_number(row.get("hellaswag_acc"))]

    @property
    def accounts(self) -> dict[str, float]:
        """Seconds by what they were for."""
        return {name: value for name, value in mapping(self.status.get("accounts")).items() if is_number(value)}

    @property
    def usd_per_hour(self) -> float:
        """What the machine costs, 0 where nobody has said so."""
        price = self.environment.get("usd_per_hour")
        return price if is_number(price) else 0.0

    @property
    def non_finite_steps(self) -> list[int]:
        """The steps whose training loss was no finite number."""
        return [row["step"] for row in self.training if not is_number(row["loss"])]

    @property
    def further_sets(self) -> list[str]:
        """The validation sets beside the main one, by the names of their losses: `eval_<set>_loss`."""
        keys = dict.fromkeys(key for row in self.validation for key in row)
        return [key[len("eval_") : -len("_loss")] for key in keys if re.fullmatch(r"eval_.+_loss", key)]

    def missing(self) -> dict[str, str]:
        """What is not there yet, by the part of the report that needs it, in a sentence."""
        final = self.path / "final"
        evaluate = f"Not evaluated yet: bash evaluate.sh {final}"
        reasons = {
            "training": (self.training, "No training step is logged yet (metrics.jsonl)."),
            "validation": (self.validation, "No validation loss is logged yet (metrics.jsonl)."),
            "samples": (self.samples, "No samples are written yet (samples.jsonl)."),
            "evaluation": (
                self.comparison.get("rows"),
                evaluate
                if final.is_dir()
                else "There is no final/ to evaluate; it is written when the last step is done.",
            ),
            "recipe": (self.recipe_text, "There is no recipe.yaml."),
            "environment": (self.environment, "There is no environment.json."),
            "status": (self.status, "There is no run_status.json."),
        }
        return {part: sentence for part, (value, sentence) in reasons.items() if not value}


def read_run(path: Path) -> Run:
    """Read the run folder `path`. Raises UserError, with what to type instead, where it is none."""
    if not is_run(path):
        raise UserError(_no_run(path))
    events, broken_lines = _read_lines(path / "metrics.jsonl")
    samples, _ = _read_lines(path / "samples.jsonl")
    recipe_file = path / "recipe.yaml"
    environment = _read_object(path / "environment.json")
    with reading(recipe_file):
        recipe_text = recipe_file.read_text() if recipe_file.is_file() else ""
        recipe = yaml.safe_load(recipe_text)
    return Run(
        path=path,
        recipe_text=recipe_text,
        recipe=mapping(recipe),
        environment=environment,
        status=_read_object(path / "run_status.json"),
        training=_last_per_step((row for row in events if "loss" in row), environment),
        validation=_last_per_step((row for row in events if any(key.startswith("eval_") for key in row)), environment),
        samples=_samples(samples),
        comparison=_read_object(path / COMPARISON),
        diagnosis=_read_object(path / DIAGNOSIS),
        broken_lines=broken_lines,
    )


def is_run(path: Path) -> bool:
    """Whether a run has written its record into `path`."""
    return any((path / name).is_file() for name in RECORD_FILES)


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a finite number; a null or NaN in the record is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST < value < LARGEST


def mapping(value: object) -> dict[str, Any]:
    """`value` where it is a mapping, otherwise an empty one: a part of the record that is not there."""
    return dict(value) if isinstance(value, Mapping) else {}


def values(rows: Sequence[Row], key: str) -> list[float]:
    """The finite values of `key`."""
    return [row[key] for row in rows if is_number(row.get(key))]


def points(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """The finite values of `key` behind the tokens at which they were measured."""
    placed = [row for row in rows if is_number(row.get("tokens")) and is_number(row.get(key))]
    return values(placed, "tokens"), values(placed, key)


def _no_run(path: Path) -> str:
    """The message for a path that is no run: the run that it lies in, or the nearest one there is."""
    what = "is no run folder (it holds no metrics.jsonl)" if path.exists() else "is not there"
    around = next((parent for parent in path.parents if is_run(parent)), None)
    if around:
        return f"{path} {what}, but it lies in one: python -m gpt2_repro.report {around}"
    places = (path, path.parent, Path("runs"))
    runs = {str(run) for place in places if place.is_dir() for run in place.iterdir() if is_run(run)}
    if not runs:
        return f"{path} {what}: name the --output_dir of a train.py run, as in python -m gpt2_repro.report runs/demo"
    return f"{path} {what}: {did_you_mean(str(path), runs)}"


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise UserError if the block cannot read the file or misses something in it."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        command = WRITERS.get(path.name)
        fix = f"write it again with {command}" if command else "repair it"
        raise UserError(f"{path} is damaged: {fix}, or delete it ({' '.join(str(error).split())})") from None


def _read_object(path: Path) -> dict[str, Any]:
    with reading(path):
        return mapping(json.loads(path.read_text())) if path.is_file() else {}


def _samples(rows: Iterable[Row]) -> list[Row]:
    """Those that say at which step they were written, and what; the last of a step and a prompt."""
    texts: dict[tuple[float, str], Row] = {}
    for row in rows:
        if is_number(row.get("step")) and isinstance(row.get("text"), str):
            prompt = row.get("prompt")
            sample = row | {"prompt": prompt if isinstance(prompt, str) else ""}
            texts[sample["step"], sample["prompt"]] = sample
    return list(texts.values())


def _read_lines(path: Path) -> tuple[list[Row], int]:
    """The objects of a JSON-lines file and how many lines before the last are broken.

    A killed run leaves a last line cut short, and one resumed from it may have written on in that same line.
    """
    lines = read_lines(path)
    rows, broken = [], []
    for number, line in enumerate(lines, start=1):
        if (event := parse_event(line)) is not None:
            rows.append(event)
        elif line:
            broken.append(number)
    return rows, sum(number < len(lines) for number in broken)


def _last_per_step(rows: Iterable[Row], environment: Row) -> list[Row]:
    """One row per step, in order: a resumed run repeats steps, and what it wrote last is what happened.

    A row that does not say its tokens has those that the plan in `environment` gives its step.
    """
    merged: dict[int, Row] = {}
    for row in rows:
        if is_number(row.get("step")):
            merged[row["step"]] = merged.get(row["step"], {}) | row
    tokens_per_step = mapping(environment.get("plan")).get("tokens_per_step")
    planned = tokens_per_step if is_number(tokens_per_step) else 0
    return [({"tokens": step * planned} if planned else {}) | merged[step] for step in sorted(merged)]
