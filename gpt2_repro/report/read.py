"""Read the files of a run directory, whether the run has finished or not."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.evaluation.comparison import Comparison
from gpt2_repro.run_record import RunRecord, events
from gpt2_repro.run_record.checkpoint import suggest_run
from gpt2_repro.run_record.environment import Environment
from gpt2_repro.run_record.layout import COMPARISON, DIAGNOSIS, ENVIRONMENT, METRICS, RECIPE, SAMPLES, is_run
from gpt2_repro.run_record.status import RunStatus
from gpt2_repro.typed_json import is_number


Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """The data of one run. Fields that are read from a missing file are empty."""

    path: Path
    recipe_text: str
    recipe: dict[str, Any]
    environment: Environment
    status: RunStatus  # values missing in the status file come from the last training event and the batch plan
    training: list[Row]  # one row per step, in order
    validation: list[Row]
    samples: list[Row]
    comparison: Comparison | None
    diagnosis: dict[str, Any]
    broken_lines: int  # damaged lines of the metrics file; a last line that a kill cut short is not counted

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def total_tokens(self) -> int:
        """The number of tokens planned for the run, 0 if unknown."""
        return (self.status.max_steps or 0) * self.environment.plan.tokens_per_step

    @property
    def reference_losses(self) -> dict[str, float]:
        """Validation losses of n-gram models in nats per token, by the name of the model."""
        losses = mapping(self.environment.data.get("reference_losses"))
        return {name: float(loss) for name, loss in losses.items() if is_number(loss)}

    @property
    def validated(self) -> list[Row]:
        """The validation results that include the loss of the main validation set."""
        return [row for row in self.validation if is_number(row.get("eval_loss"))]

    @property
    def hellaswag(self) -> list[Row]:
        """The validation results that include a HellaSwag accuracy."""
        return [row for row in self.validation if is_number(row.get("hellaswag_acc"))]

    @property
    def non_finite_steps(self) -> list[int]:
        """The optimizer steps whose training loss was not finite."""
        return [row["step"] for row in self.training if not is_number(row["loss"])]

    @property
    def further_sets(self) -> list[str]:
        """The names of all validation sets except the main validation set."""
        keys = dict.fromkeys(key for row in self.validation for key in row)
        return [key[len("eval_") : -len("_loss")] for key in keys if re.fullmatch(r"eval_.+_loss", key)]

    def missing(self) -> dict[str, str]:
        """Return one sentence for each part of the report whose data is missing.

        The keys are the names of the parts, such as "training".
        """
        reasons = {
            "training": (self.training, f"No training step has been logged yet ({METRICS})."),
            "validation": (self.validation, f"No validation loss has been logged yet ({METRICS})."),
            "samples": (self.samples, f"No samples have been written yet ({SAMPLES})."),
            "evaluation": (self.comparison, f"Not evaluated yet. Run: bash evaluate.sh {self.path}"),
            "recipe": (self.recipe_text, f"The file {RECIPE} is missing."),
            "environment": (self.environment != Environment(), f"The file {ENVIRONMENT} is missing."),
            "lines": (
                not self.broken_lines,
                f"Damaged lines in {METRICS}: {self.broken_lines}. Losses may be missing.",
            ),
        }
        return {part: sentence for part, (value, sentence) in reasons.items() if not value}


def read_run(path: Path) -> Run:
    """Return the recorded data of the run directory `path`.

    Raises UserError if `path` is not a run directory, or if one of its files is damaged.
    """
    if not is_run(path):
        inside = next(filter(is_run, path.parents), None)
        fix = f"Pass {inside}." if inside else suggest_run(path)
        if path.suffix == ".html":
            fix = "Pass the name of the page as one word, directly after -o. Quote a name with spaces."
        fix = fix or "Pass the --output_dir of a train.py run, such as runs/demo."
        raise UserError(f"{path} is not a run directory. {fix}")
    record = RunRecord(path)
    if damaged := record.damaged():
        raise UserError(f"{damaged} is damaged. Repair or delete the file.")
    metrics, broken_lines = events.read(record.metrics)
    training = _last_per_step(row for row in metrics if "loss" in row)
    environment = record.environment()
    planned = {"state": "unknown", "max_steps": environment.plan.max_steps or None}
    last = RunStatus.from_json(planned | {key: training[-1].get(key) for key in ("step", "tokens") if training})
    written = {key: value for key, value in vars(record.status()).items() if value is not None}
    if not written.get("tokens"):  # the status of step 0. The log may be further.
        written.pop("step", None)
    return Run(
        path=path,
        recipe_text=record.recipe_text(),
        recipe=record.recipe(),
        environment=environment,
        status=dataclasses.replace(last, **written),
        training=training,
        validation=_last_per_step(row for row in metrics if any(key.startswith("eval_") for key in row)),
        samples=_samples(events.read(record.samples)[0]),
        comparison=_read(path / COMPARISON, Comparison.from_json),
        diagnosis=mapping(_read(path / DIAGNOSIS, json.loads)),
        broken_lines=broken_lines,
    )


def mapping(value: object) -> dict[str, Any]:
    """Return `value` as a dict if it is a mapping, else an empty dict."""
    return dict(value) if isinstance(value, Mapping) else {}


def values(rows: Sequence[Row], key: str) -> list[float]:
    """Return the finite values of `key` in a list of logged events, in order."""
    return [row[key] for row in rows if is_number(row.get(key))]


def points(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """Return the token counts and the values of `key`, as two lists of equal length.

    Events whose token count or value is missing or not finite are skipped.
    """
    placed = [row for row in rows if is_number(row.get("tokens")) and is_number(row.get(key))]
    return values(placed, "tokens"), values(placed, key)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise UserError if the code in the `with` block cannot parse the file `path`."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged ({in_a_line(error)}). Delete the file and repeat the command that wrote the file "
            "(train.py, evaluate.sh or gpt2_repro.diagnose)."
        ) from None


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    with reading(path):
        return parse(path.read_text(encoding="utf-8")) if path.is_file() else None


def _samples(rows: Iterable[Row]) -> list[Row]:
    """Return the last sample for each step and prompt."""
    texts: dict[tuple[float, str], Row] = {}
    for row in rows:
        if is_number(row.get("step")) and isinstance(row.get("text"), str):
            prompt = row.get("prompt")
            sample = row | {"prompt": prompt if isinstance(prompt, str) else ""}
            texts[sample["step"], sample["prompt"]] = sample
    return list(texts.values())


def _last_per_step(rows: Iterable[Row]) -> list[Row]:
    """Merge the logged events of each step into one event.

    Later values replace earlier values. The events are ordered by step.
    """
    merged: dict[int, Row] = {}
    for row in rows:
        if is_number(row.get("step")):
            # A resumed run logs some steps a second time. The later values are used.
            merged[row["step"]] = merged.get(row["step"], {}) | row
    return [merged[step] for step in sorted(merged)]
