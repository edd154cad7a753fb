"""Read the files of a run directory, whether the run has finished or not."""

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.evaluation.comparison import NO_SCORE, Comparison, diagnosis_tables
from gpt2_repro.evaluation.references import HELLASWAG_ITEMS, SHARDS, baseline_of, published_loss
from gpt2_repro.launchers import EVALUATE
from gpt2_repro.model.checkpoint import suggest_run
from gpt2_repro.planning.compute_optimal import FINEWEB, expected_loss, is_fitted
from gpt2_repro.run_record import RunRecord, events, layout
from gpt2_repro.run_record.environment import Environment
from gpt2_repro.run_record.status import RunStatus
from gpt2_repro.text import Table, count


SAME = {"word_perplexity", "byte_perplexity", "nats_per_token"}  # metrics that follow from bits_per_byte
SILENT_SECONDS = 900  # a running run without a status update for this long hangs, or its machine is gone
Row = dict[str, float]  # the numbers of one step; NaN for a value that is not finite or not a number
Content = TypeVar("Content")


class Run:
    """The data of one run directory. Values that are read from a missing file are empty.

    Raises UserError if a file is damaged.
    """

    def __init__(self, path: Path) -> None:
        if not layout.is_run(path):
            problem = f"{path} is not a run directory, the --output_dir of train.py. {suggest_run(path)}"
            raise UserError(problem.strip())
        record = RunRecord(path)
        damaged = record.damaged()
        if damaged:
            raise UserError(f"{damaged} is damaged. Repair or delete the file.")
        self.path = path
        self.name = path.resolve().name
        self.recipe = record.recipe()
        self.recipe_text = record.recipe_text()
        self.environment = record.environment()
        self.environment_text = _read(path / layout.ENVIRONMENT, str) or ""
        # The GPT-2 model whose size is nearest to the run's active parameters.
        parameters = self.environment.active_parameters or self.environment.parameters
        self.baseline = baseline_of(parameters)
        # A last line that a kill cut short is not counted as broken.
        metrics, self.broken_lines = events.read(record.metrics)
        logged_steps = [event for event in metrics if "loss" in event]
        self.training = _last_per_step(logged_steps)  # one row per step, in order
        self.non_finite_steps = [int(row["step"]) for row in self.training if math.isnan(row["loss"])]
        validations = [event for event in metrics if _is_validation(event)]
        self.validation = _last_per_step(validations)
        self.further_sets = _further_sets(self.validation)
        self.samples = _samples(record)
        self.comparison = _comparison(path)
        self.followed = _followed(path)
        self.diagnosis = _read(path / layout.DIAGNOSIS, _diagnosis) or {}
        self.status = _status(record, self.training, self.environment)
        self.process = record.process()
        self.holder = record.holder()  # the process and its machine
        identity = self.environment.run_identity
        seed = identity.get("seed")
        data_seed = identity.get("data_seed")
        if data_seed is None:
            data_seed = seed
        self.seed_pair = (seed, data_seed)
        # The same for all runs that differ only in the seed.
        self.setting = str(path)
        settings = {key: value for key, value in identity.items() if not key.endswith("seed")}
        if settings:
            self.setting = json.dumps([settings, self.status.step], sort_keys=True)

    @property
    def is_silent(self) -> bool:
        """Whether a running run has not updated its status for a long time: it hangs, or its machine is gone."""
        return self.status.state == "running" and SILENT_SECONDS < self.status.age() < math.inf

    @property
    def is_live(self) -> bool:
        """Whether the run is training now."""
        return self.status.state == "running" and not self.is_silent

    @property
    def reference_losses(self) -> dict[str, float]:
        """Losses on the validation set in nats per token, of n-gram models and of GPT-2.

        GPT-2's published loss is included only if the run validates on the same tokens.
        """
        data = self.environment.data
        losses = numbers_in(data.get("reference_losses", {}))
        tokens = last_value(self.validation, "eval_tokens") or 0
        published = published_loss(self.baseline, data.get("request", {}), tokens)
        if published is not None:
            losses[self.baseline.name] = published
        return losses

    @property
    def expected(self) -> tuple[float, str] | None:
        """The expected last loss of a run on FineWeb with GPT-2's tokenizer, and a note. None for other runs."""
        request = self.environment.data.get("request", {})
        source = str(request.get("source"))
        text = SHARDS.get(source, {}).get("text")
        is_fineweb = text == "fineweb" or source.startswith(f"{FINEWEB}:")
        is_mixture = "mixture" in self.environment.data
        if not is_fineweb or is_mixture or request.get("tokenizer") != "openai-community/gpt2":
            return None
        plan = self.environment.plan
        parameters = self.environment.parameters
        tokens = plan.max_steps * plan.tokens_per_step
        if not parameters or not tokens:
            return None
        note = f"estimate of --budget for {count(tokens)} tokens"
        if not is_fitted(parameters, tokens):
            note += ", far from the runs that were fitted"
        return expected_loss(parameters, tokens), note

    @property
    def reference_scores(self) -> dict[str, float]:
        """HellaSwag accuracies of the GPT-2 and the GPT-3 of the nearest size, if comparable."""
        if last_value(self.validation, "hellaswag_items") != HELLASWAG_ITEMS:
            return {}
        gpt2 = self.baseline.name
        gpt3 = gpt2.replace("GPT-2", "GPT-3")
        return {gpt2: self.baseline.hellaswag, gpt3: self.baseline.gpt3_hellaswag}

    def missing(self) -> dict[str, str]:
        """Return one sentence for each part of the report, such as "training", without data."""
        sentences: dict[str, str] = {}
        if not self.training:
            sentences["training"] = f"No training step has been logged yet ({layout.METRICS})."
        if not self.validation:
            sentences["validation"] = f"No validation loss has been logged yet ({layout.METRICS})."
        if not self.samples:
            sentences["samples"] = f"No samples have been written yet ({layout.SAMPLES})."
        if self.comparison is None:
            sentences["evaluation"] = f"Not evaluated yet. Run: {EVALUATE} {shlex.quote(str(self.path))}"
        elif self.comparison.limit:
            only = f"Only {self.comparison.limit} examples of each task were scored."
            sentences["limit"] = f"{only} These are not benchmark scores."
        if not self.recipe_text:
            sentences["recipe"] = f"The file {layout.RECIPE} is missing."
        if not self.environment_text:
            sentences["environment"] = f"The file {layout.ENVIRONMENT} is missing."
        if self.broken_lines:
            sentences["lines"] = f"Damaged lines in {layout.METRICS}: {self.broken_lines}."
        return sentences


def _is_validation(event: Mapping[str, Any]) -> bool:
    return any(key.startswith("eval_") for key in event)


def _further_sets(validation: Sequence[Row]) -> list[str]:
    """Return the names of all validation sets except the main validation set."""
    names: dict[str, None] = {}  # the keys, in order
    for row in validation:
        for key in row:
            loss = re.fullmatch("eval_(.+)_loss", key)
            if loss:
                names[loss[1]] = None
    return list(names)


def _samples(record: RunRecord) -> list[dict[str, Any]]:
    """Return the samples in the order of steps. A resumed run writes some samples a second time."""
    samples: dict[tuple[int, str], dict[str, Any]] = {}
    written, _ = events.read(record.samples)
    for sample in written:
        key = (sample["step"], sample["prompt"])
        samples[key] = sample
    return sorted(samples.values(), key=lambda sample: sample["step"])


def _comparison(path: Path) -> Comparison | None:
    """Return the scores of a run, or those of its final model by evaluate.sh --follow."""
    file = path / layout.COMPARISON
    if not file.is_file():
        file = path / layout.EVALUATION_FOLDER / layout.FINAL / file.name
    return _read(file, Comparison.from_json)


def _followed(path: Path) -> list[Comparison]:
    """Return the scores of checkpoints, in order, by evaluate.sh --follow."""
    comparisons: list[Comparison] = []
    # The manifest is written last.
    for manifest in path.glob(f"{layout.EVALUATION_FOLDER}/*/{layout.CHECKPOINT_MANIFEST}"):
        file = manifest.with_name(Path(layout.COMPARISON).name)
        comparison = _read(file, Comparison.from_json)
        if comparison is not None and _tokens_trained(comparison):
            comparisons.append(comparison)
    return sorted(comparisons, key=_tokens_trained)


def _tokens_trained(comparison: Comparison) -> int:
    """Return the tokens of the first model of a comparison, or 0 if they are unknown."""
    if not comparison.models:
        return 0
    return comparison.models[0].tokens_trained or 0


def _diagnosis(text: str) -> dict[str, Table]:
    return diagnosis_tables(json.loads(text))


def _read(path: Path, parse: Callable[[str], Content]) -> Content | None:
    """Return the parsed content of a file, or None if it does not exist."""
    if not path.is_file():
        return None
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} is damaged ({in_a_line(error)}). Repeat the command that wrote it.") from None


def _status(record: RunRecord, training: Sequence[Row], environment: Environment) -> RunStatus:
    """Return the status of a run. Missing values come from the last training event and the batch plan."""
    status = record.status()
    if training and not status.tokens:  # the status of step 0. The log may be further.
        last = training[-1]
        tokens = int(last["tokens"]) if has_value(last, "tokens") else None
        status = dataclasses.replace(status, step=int(last["step"]), tokens=tokens)
    if status.state == "running" and record.process() == "ended":
        status = dataclasses.replace(status, state="killed", reason=None)
    state = status.state or "unknown"
    planned = status.max_steps or environment.plan.max_steps or None
    return dataclasses.replace(status, state=state, max_steps=planned)


def has_value(row: Row, key: str) -> bool:
    """Return whether a logged event has a finite value of `key`."""
    return not math.isnan(row.get(key, math.nan))


def values(rows: Sequence[Row], key: str) -> list[float]:
    """Return the finite values of `key` in a list of logged events, in order."""
    return [row[key] for row in rows if has_value(row, key)]


def last_value(rows: Sequence[Row], key: str) -> float | None:
    """Return the last finite value of `key` in a list of logged events, or None."""
    for row in reversed(rows):
        if has_value(row, key):
            return row[key]
    return None


def points(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """Return token counts and finite values of `key`, as two lists of equal length."""
    complete = [row for row in rows if has_value(row, "tokens") and has_value(row, key)]
    tokens = [row["tokens"] for row in complete]
    numbers = [row[key] for row in complete]
    return tokens, numbers


def scores_of_checkpoints(run: Run) -> dict[str, tuple[list[int], list[float]]]:
    """Return the tokens and the values of all scored checkpoints, by the name of the task and the metric."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for comparison in run.followed:
        model = comparison.models[0]
        for row in comparison.rows:
            score = row.values.get(model.name, NO_SCORE)
            if score.value is None or row.metric in SAME:
                continue
            name = f"{row.task} {row.heading}"
            if comparison.limit:
                name += f" ({comparison.limit} documents)"
            tokens, scores = curves.setdefault(name, ([], []))
            tokens.append(_tokens_trained(comparison))
            scores.append(score.value)
    return curves


def numbers_in(event: Mapping[str, Any]) -> Row:
    """Return the values of a logged event, with NaN for everything that is not a finite number."""
    numbers: Row = {}
    for key, value in event.items():
        numbers[key] = value if events.is_number(value) else math.nan
    return numbers


def _last_per_step(logged: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Merge the logged events of each step into one event.

    A resumed run logs some steps a second time. The later values are used. The events are ordered by step.
    """
    merged: dict[float, Row] = {}
    for event in logged:
        row = numbers_in(event)
        if has_value(row, "step"):
            of_step = merged.setdefault(row["step"], {})
            of_step.update(row)
    return [merged[step] for step in sorted(merged)]
