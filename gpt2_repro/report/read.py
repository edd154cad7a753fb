"""Read a run directory, finished or not."""

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
LARGEST = 1e30  # matplotlib cannot draw larger numbers


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run has written so far; the fields of missing files are empty."""

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
        """The validations that scored HellaSwag."""
        return [row for row in self.validation if is_number(row.get("hellaswag_acc"))]

    @property
    def accounts(self) -> dict[str, float]:
        """Seconds by account."""
        return {name: value for name, value in mapping(self.status.get("accounts")).items() if is_number(value)}

    @property
    def usd_per_hour(self) -> float:
        """The price of the machine, 0 if unknown."""
        price = self.environment.get("usd_per_hour")
        return price if is_number(price) else 0.0

    @property
    def non_finite_steps(self) -> list[int]:
        """The steps whose training loss was not finite."""
        return [row["step"] for row in self.training if not is_number(row["loss"])]

    @property
    def further_sets(self) -> list[str]:
        """The names of the validation sets besides the main one, from the keys `eval_<set>_loss`."""
        keys = dict.fromkeys(key for row in self.validation for key in row)
        return [key[len("eval_") : -len("_loss")] for key in keys if re.fullmatch(r"eval_.+_loss", key)]

    def missing(self) -> dict[str, str]:
        """Return a sentence for each part of the report that the run has not written yet."""
        reasons = {
            "training": (self.training, "No training step is logged yet (metrics.jsonl)."),
            "validation": (self.validation, "No validation loss is logged yet (metrics.jsonl)."),
            "samples": (self.samples, "No samples are written yet (samples.jsonl)."),
            "evaluation": (self.comparison, f"Not evaluated yet: bash evaluate.sh {self.path}"),
            "recipe": (self.recipe_text, "There is no recipe.yaml."),
            "environment": (self.environment, "There is no environment.json."),
            "status": (self.status, "There is no run_status.json."),
        }
        return {part: sentence for part, (value, sentence) in reasons.items() if not value}


def read_run(path: Path) -> Run:
    """Read the run directory `path`. Raises UserError with a hint if it is not one."""
    if not is_run(path):
        raise UserError(_no_run(path))
    events, broken_lines = _read_events(path / "metrics.jsonl")
    samples, _ = _read_events(path / "samples.jsonl")
    recipe_file = path / "recipe.yaml"
    with reading(recipe_file):
        recipe_text = recipe_file.read_text() if recipe_file.is_file() else ""
        recipe = yaml.safe_load(recipe_text)
    return Run(
        path=path,
        recipe_text=recipe_text,
        recipe=mapping(recipe),
        environment=_read_object(path / "environment.json"),
        status=_read_object(path / "run_status.json"),
        training=_last_per_step(row for row in events if "loss" in row),
        validation=_last_per_step(row for row in events if any(key.startswith("eval_") for key in row)),
        samples=_samples(samples),
        comparison=_read_object(path / COMPARISON),
        diagnosis=_read_object(path / DIAGNOSIS),
        broken_lines=broken_lines,
    )


def is_run(path: Path) -> bool:
    """Return whether `path` is a run directory."""
    return any((path / name).is_file() for name in RECORD_FILES)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST < value < LARGEST


def mapping(value: object) -> dict[str, Any]:
    """Return `value` if it is a mapping, else {}."""
    return dict(value) if isinstance(value, Mapping) else {}


def values(rows: Sequence[Row], key: str) -> list[float]:
    """Return the finite values of `key`."""
    return [row[key] for row in rows if is_number(row.get(key))]


def points(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """Return the tokens at which `key` was measured, and its values, where both are finite."""
    placed = [row for row in rows if is_number(row.get("tokens")) and is_number(row.get(key))]
    return values(placed, "tokens"), values(placed, key)


def _no_run(path: Path) -> str:
    """Return the message for a path that is not a run directory, with the nearest one."""
    what = "is not a run directory (it has no metrics.jsonl)" if path.exists() else "does not exist"
    places = [place for place in (path, path.parent, Path("runs")) if place.is_dir()]
    near = [*path.parents, *(run for place in places for run in place.iterdir())]
    runs = {str(run) for run in near if is_run(run)}
    hint = did_you_mean(str(path), runs) if runs else "pass the --output_dir of a train.py run, such as runs/demo"
    return f"{path} {what}: {hint}"


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
    """Return the samples with a step and a text, the last one for each step and prompt."""
    texts: dict[tuple[float, str], Row] = {}
    for row in rows:
        if is_number(row.get("step")) and isinstance(row.get("text"), str):
            prompt = row.get("prompt")
            sample = row | {"prompt": prompt if isinstance(prompt, str) else ""}
            texts[sample["step"], sample["prompt"]] = sample
    return list(texts.values())


def _read_events(path: Path) -> tuple[list[Row], int]:
    """Return the objects of a JSON-lines file, and how many lines before the last are broken.

    A killed run leaves a torn last line. A run resumed from it may have continued that line.
    """
    lines = [line for line in read_lines(path) if line]
    events = [parse_event(line) for line in lines]
    return [event for event in events if event is not None], events[:-1].count(None)


def _last_per_step(rows: Iterable[Row]) -> list[Row]:
    """Return one row per step in order. A resumed run repeats steps; the later values win."""
    merged: dict[int, Row] = {}
    for row in rows:
        if is_number(row.get("step")):
            merged[row["step"]] = merged.get(row["step"], {}) | row
    return [merged[step] for step in sorted(merged)]
