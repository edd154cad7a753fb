"""Compare a run with the published numbers in references.yaml."""

import bisect
import dataclasses
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
    if documents != DOCUMENTS.get(task, documents):
        return None
    for score in SCORES.get(model, ()):
        if score["task"] != task or score["metric"] != metric:
            continue
        if "window" in score:
            is_same_window = window == score["window"]
        else:
            is_same_window = window >= 256
        if is_same_window:
            return float(score["value"])
    return None


BASELINES = tuple(Baseline(**row) for row in _TABLES["baselines"])
GPT2 = BASELINES[0]


def baseline_of(parameters: float | None) -> Baseline:
    """Return the GPT-2 model nearest in size to `parameters` (None: the smallest)."""
    size = parameters or 0
    return min(BASELINES, key=lambda baseline: abs(baseline.parameters - size))


def published_loss(baseline: Baseline, request: Mapping[str, Any], tokens: object) -> float | None:
    """Return a baseline's published loss on a validation split, or None if unknown.

    Args:
        request: the section `data` of the recipe that the data was prepared with.
        tokens: the number of targets that each validation scores.
    """
    shard = SHARDS.get(str(request.get("source")))
    if shard is None or tokens != LOSS_TOKENS:
        return None
    if request.get("split") != shard["split"] or request.get("packing") != "concat":
        return None
    if request.get("tokenizer") != "openai-community/gpt2":
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
    if curve is None:
        return None
    steps = list(curve.losses)  # in order
    if step < steps[0] or step > steps[-1]:
        return None
    number = bisect.bisect_left(steps, step, lo=1)  # of the first step that is not before `step`
    before = steps[number - 1]
    after = steps[number]
    along = math.log(step / before) / math.log(after / before)
    low_before, high_before = curve.losses[before]
    low_after, high_after = curve.losses[after]
    low = (1 - along) * low_before + along * low_after
    high = (1 - along) * high_before + along * high_after
    middle = (low + high) / 2
    widths = [width for until, width in curve.half_widths.items() if step <= until]
    half = widths[0]
    return min(low, middle - half), max(high, middle + half)


def verdict(name: str | None, step: int, loss: float) -> Literal["inside", "above", "below"] | None:
    """Return how a validation loss compares with the published range. NaN is above."""
    limits = band(name, step)
    if limits is None:
        return None
    low, high = limits
    if loss < low:
        return "below"
    if loss <= high:
        return "inside"
    return "above"  # also NaN


def compared(name: str | None, step: int, loss: float) -> str:
    """Return log text such as `llm.c 4.315–4.345 ✓`, or "" without a published range."""
    limits = band(name, step)
    if limits is None:
        return ""
    low, high = limits
    side = verdict(name, step, loss)
    mark = "✓"
    if side != "inside":
        mark = f"✗ {side}"
    return f"{name} {low:.3f}–{high:.3f} {mark}"


def explained(name: str | None, step: int, loss: float) -> str:
    """Return how a validation loss compares with the published range, or "" without one."""
    side = verdict(name, step, loss)
    if side is None:
        return ""
    return f"validation loss {loss:.4f} at step {step:,}: {compared(name, step, loss)}. {CAUSES[side]}"
