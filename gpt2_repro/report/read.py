"""Read the files of a run directory, whether the run has finished or not."""

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.evaluation.comparison import Comparison, diagnosis_tables
from gpt2_repro.evaluation.references import HELLASWAG_ITEMS, SHARDS, baseline_of, published_loss
from gpt2_repro.launchers import EVALUATE
from gpt2_repro.model.checkpoint import suggest_run
from gpt2_repro.planning.compute_optimal import FINEWEB, expected_loss, is_fitted
from gpt2_repro.run_record import RunRecord, events, layout
from gpt2_repro.text import Table, count


LARGEST = 1e30  # matplotlib cannot draw larger numbers
SAME = {"word_perplexity", "byte_perplexity", "nats_per_token"}  # metrics that follow from bits_per_byte
Row = dict[str, float]  # the numbers of one step; NaN for a value that is not finite or not a number


class Run:
    """The data of one run directory. Values that are read from a missing file are empty.

    Raises UserError if a file is damaged.
    """

    def __init__(self, path: Path) -> None:
        if not layout.is_run(path):
            where = f"{path} is not a run directory, the --output_dir of train.py."
            raise UserError(f"{where} {suggest_run(path)}".strip())
        record = RunRecord(path)
        if damaged := record.damaged():
            raise UserError(f"{damaged} is damaged. Repair or delete the file.")
        self.path, self.name = path, path.resolve().name
        self.recipe, self.recipe_text = record.recipe(), record.recipe_text()
        self.environment, self.environment_text = record.environment(), _read(path / layout.ENVIRONMENT, str) or ""
        # The GPT-2 model whose size is nearest to the run's active parameters.
        self.baseline = baseline_of(self.environment.active_parameters or self.environment.parameters)
        # A last line that a kill cut short is not counted as broken.
        metrics, self.broken_lines = events.read(record.metrics)
        self.training = _last_per_step(row for row in metrics if "loss" in row)  # one row per step, in order
        self.non_finite_steps = [int(row["step"]) for row in self.training if math.isnan(row["loss"])]
        self.validation = _last_per_step(row for row in metrics if any(key.startswith("eval_") for key in row))
        keys = dict.fromkeys(key for row in self.validation for key in row)
        # The names of all validation sets except the main validation set.
        self.further_sets = [key[len("eval_") : -len("_loss")] for key in keys if re.fullmatch("eval_.+_loss", key)]
        # A resumed run writes some samples a second time.
        samples = {(sample["step"], sample["prompt"]): sample for sample in events.read(record.samples)[0]}
        self.samples = sorted(samples.values(), key=lambda sample: sample["step"])
        of_final = path / layout.EVALUATION_FOLDER / layout.FINAL / Path(layout.COMPARISON).name  # by --follow
        self.comparison: Comparison | None = _read(path / layout.COMPARISON, Comparison.from_json)
        self.comparison = self.comparison or _read(of_final, Comparison.from_json)
        # The scores of checkpoints, in order, by evaluate.sh --follow. It writes the manifest last.
        files = [
            file.with_name(Path(layout.COMPARISON).name)
            for file in path.glob(f"{layout.EVALUATION_FOLDER}/*/{layout.CHECKPOINT_MANIFEST}")
        ]
        followed = [_read(file, Comparison.from_json) for file in files if file.is_file()]
        trained = [one for one in followed if one.models and one.models[0].tokens_trained]
        self.followed: list[Comparison] = sorted(trained, key=lambda one: one.models[0].tokens_trained or 0)
        tables = _read(path / layout.DIAGNOSIS, lambda text: diagnosis_tables(json.loads(text)))
        self.diagnosis: dict[str, Table] = tables or {}
        # Values missing in the status file come from the last training event and the batch plan.
        status = record.status()
        if self.training and not status.tokens:  # the status of step 0. The log may be further.
            step, tokens = int(self.training[-1]["step"]), values(self.training[-1:], "tokens")
            status = dataclasses.replace(status, step=step, tokens=int(tokens[0]) if tokens else None)
        if record.was_killed():
            status = dataclasses.replace(status, state="killed", reason="its process has ended without an entry here")
        planned = status.max_steps or self.environment.plan.max_steps or None
        self.status = dataclasses.replace(status, state=status.state or "unknown", max_steps=planned)
        identity = {key: value for key, value in self.environment.run_identity.items() if not key.endswith("seed")}
        seed, of_data = map(self.environment.run_identity.get, ("seed", "data_seed"))
        self.seeds = seed, seed if of_data is None else of_data
        # The same for all runs that differ only in the seed.
        self.setting = json.dumps([identity, self.status.step], sort_keys=True) if identity else str(path)

    @property
    def reference_losses(self) -> dict[str, float]:
        """Losses on the validation set in nats per token, of n-gram models and of GPT-2.

        GPT-2's published loss is included only if the run validates on the same tokens.
        """
        data, tokens = self.environment.data, values(self.validation, "eval_tokens") or [0]
        published = published_loss(self.baseline, data.get("request", {}), tokens[-1])
        losses = numbers_in(data.get("reference_losses", {}))
        return losses if published is None else losses | {self.baseline.name: published}

    @property
    def expected(self) -> tuple[float, str] | None:
        """The expected last loss of a run on FineWeb with GPT-2's tokenizer, and a note. None for other runs."""
        request, plan = self.environment.data.get("request", {}), self.environment.plan
        source, tokens = str(request.get("source")), plan.max_steps * plan.tokens_per_step
        is_fineweb = SHARDS.get(source, {}).get("text") == "fineweb" or source.startswith(f"{FINEWEB}:")
        is_known = is_fineweb and request.get("tokenizer") == "openai-community/gpt2"
        if not (is_known and tokens and self.environment.parameters):
            return None
        far = "" if is_fitted(self.environment.parameters, tokens) else ", far from the runs that were fitted"
        note = f"estimate of --budget for {count(tokens)} tokens{far}"
        return expected_loss(self.environment.parameters, tokens), note

    @property
    def reference_scores(self) -> dict[str, float]:
        """HellaSwag accuracies of the GPT-2 and the GPT-3 of the nearest size, if comparable."""
        name, items = self.baseline.name, values(self.validation, "hellaswag_items")
        scores = {name: self.baseline.hellaswag, name.replace("GPT-2", "GPT-3"): self.baseline.gpt3_hellaswag}
        return scores if items[-1:] == [HELLASWAG_ITEMS] else {}

    def missing(self) -> dict[str, str]:
        """Return one sentence for each part of the report, such as "training", without data."""
        limit = self.comparison and self.comparison.limit
        reasons = {
            "training": (self.training, f"No training step has been logged yet ({layout.METRICS})."),
            "validation": (self.validation, f"No validation loss has been logged yet ({layout.METRICS})."),
            "samples": (self.samples, f"No samples have been written yet ({layout.SAMPLES})."),
            "evaluation": (self.comparison, f"Not evaluated yet. Run: {EVALUATE} {shlex.quote(str(self.path))}"),
            "limit": (not limit, f"Only {limit} examples of each task were scored. These are not benchmark scores."),
            "recipe": (self.recipe_text, f"The file {layout.RECIPE} is missing."),
            "environment": (self.environment_text, f"The file {layout.ENVIRONMENT} is missing."),
            "lines": (not self.broken_lines, f"Damaged lines in {layout.METRICS}: {self.broken_lines}."),
        }
        return {part: sentence for part, (value, sentence) in reasons.items() if not value}


def values(rows: Sequence[Row], key: str) -> list[float]:
    """Return the finite values of `key` in a list of logged events, in order."""
    return [row[key] for row in rows if not math.isnan(row.get(key, math.nan))]


def points(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """Return token counts and finite values of `key`, as two lists of equal length."""
    complete = [row for row in rows if values([row], "tokens") and values([row], key)]
    return values(complete, "tokens"), values(complete, key)


def scores_of_checkpoints(run: Run) -> dict[str, tuple[list[int], list[float]]]:
    """Return the tokens and the values of all scored checkpoints, by the name of the task and the metric."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for comparison in run.followed:
        model, few = comparison.models[0], f" ({comparison.limit} documents)" if comparison.limit else ""
        for row in comparison.rows:
            score = row.values.get(model.name)
            if score is not None and score.value is not None and row.metric not in SAME:
                tokens, scores = curves.setdefault(f"{row.task} {row.heading}{few}", ([], []))
                tokens.append(model.tokens_trained or 0)
                scores.append(score.value)
    return curves


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} is damaged ({in_a_line(error)}). Repeat the command that wrote it.") from None


def numbers_in(event: Mapping[str, Any]) -> Row:
    """Return the values of a logged event, with NaN for everything that is not a finite number."""
    good = {key for key, value in event.items() if type(value) in (int, float) and abs(value) < LARGEST}
    return {key: value if key in good else math.nan for key, value in event.items()}


def _last_per_step(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Merge the logged events of each step into one event.

    A resumed run logs some steps a second time. The later values are used. The events are ordered by step.
    """
    merged: dict[float, Row] = {}
    for row in map(numbers_in, rows):
        if values([row], "step"):
            merged[row["step"]] = merged.get(row["step"], {}) | row
    return [merged[step] for step in sorted(merged)]
