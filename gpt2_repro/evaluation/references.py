"""Compare a run with the published numbers in references.yaml."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any, Literal

from gpt2_repro.files import read_table


HELLASWAG_ITEMS = 10_042  # in the validation split; scores of fewer items cannot be compared
LOSS_TOKENS = 10_485_760
_TABLES = read_table(__file__, "references.yaml")
# For each source: its text, and the split that the published losses need.
SHARDS: dict[str, dict[str, str]] = _TABLES["shards"]


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A GPT-2 model of OpenAI and its published scores."""

    name: str
    parameters: int
    hellaswag: float  # accuracy
    gpt3_hellaswag: float  # accuracy of the GPT-3 model with the same size
    losses: Mapping[str, float]  # nats per token on llm.c's validation shards of "fineweb" and "fineweb-edu"


# Number of documents in each complete data set. Another split, or a part of the set, has different scores.
DOCUMENTS: dict[str, int] = _TABLES["documents"]
SCORES: dict[str, list[dict[str, Any]]] = _TABLES["scores"]


def published_score(model: str, task: str, metric: str, window: int, documents: int | None) -> float | None:
    """Return a Hub id's published score of a task with this number of documents, or None if unknown."""
    for score in SCORES.get(model, ()):
        same = (score["task"], score["metric"]) == (task, metric) and documents == DOCUMENTS.get(task, documents)
        if same and (window == score.get("window") or ("window" not in score and window >= 256)):
            return float(score["value"])
    return None


BASELINES = tuple(Baseline(**row) for row in _TABLES["baselines"])
GPT2 = BASELINES[0]


def baseline_of(parameters: float | None) -> Baseline:
    """Return the GPT-2 model nearest in size to `parameters` (None: the smallest)."""
    return min(BASELINES, key=lambda one: abs(one.parameters - (parameters or 0)))


def published_loss(baseline: Baseline, request: Mapping[str, Any], tokens: object) -> float | None:
    """Return a baseline's published loss on a validation split, or None if unknown.

    Args:
        request: the section `data` of the recipe that the data was prepared with.
        tokens: the number of targets that each validation scores.
    """
    shard = SHARDS.get(str(request.get("source")))
    form = [request.get(key) for key in ("split", "packing", "tokenizer")]
    if shard is None or form != [shard["split"], "concat", "openai-community/gpt2"] or tokens != LOSS_TOKENS:
        return None
    return baseline.losses.get(shard["text"])


@dataclasses.dataclass(frozen=True)
class Curve:
    """The validation losses of published runs with the settings of a recipe: an entry of references.yaml."""

    recipe: str
    losses: dict[int, tuple[float, float]]  # by optimizer step: the lowest and the highest
    half_widths: dict[int, float]


CURVES = {name: Curve(**row) for name, row in _TABLES["curves"].items()}
CAUSES: dict[str, str] = _TABLES["causes"]


def band(name: str | None, step: int) -> tuple[float, float] | None:
    """Return the lowest and highest expected validation loss at `step`, in nats per token.

    The result is None outside of the steps of the curve `name`, or if there is no curve.
    """
    curve = CURVES.get(name or "")
    if curve is None or not min(curve.losses) <= step <= max(curve.losses):
        return None
    before, after = next(pair for pair in itertools.pairwise(curve.losses) if step <= pair[1])
    along = math.log(step / before) / math.log(after / before)
    low, high = ((1 - along) * a + along * b for a, b in zip(curve.losses[before], curve.losses[after], strict=True))
    middle, half = (low + high) / 2, next(width for until, width in curve.half_widths.items() if step <= until)
    return min(low, middle - half), max(high, middle + half)


def verdict(name: str | None, step: int, loss: float) -> Literal["inside", "above", "below"] | None:
    """Return how a validation loss compares with the published range. NaN is above."""
    if (limits := band(name, step)) is None:
        return None
    return "below" if loss < limits[0] else "inside" if loss <= limits[1] else "above"


def compared(name: str | None, step: int, loss: float) -> str:
    """Return log text such as `llm.c 4.315–4.345 ✓`, or "" without a published range."""
    if (limits := band(name, step)) is None:
        return ""
    side = verdict(name, step, loss)
    return f"{name} {limits[0]:.3f}–{limits[1]:.3f} {'✓' if side == 'inside' else f'✗ {side}'}"


def explained(name: str | None, step: int, loss: float) -> str:
    """Return how a validation loss compares with the published range, or "" without one."""
    if (side := verdict(name, step, loss)) is None:
        return ""
    return f"validation loss {loss:.4f} at step {step:,}: {compared(name, step, loss)}. {CAUSES[side]}"
