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
# For each optimizer step: the lowest and the highest validation loss of three runs of llm.c.
ANCHORS: dict[int, list[float]] = _TABLES["anchors"]


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


NAME = "llm.c"
# Up to each step, half of the minimum width of the band in nats.
HALF_WIDTHS: dict[int, float] = _TABLES["half_widths"]
CAUSES: dict[str, str] = _TABLES["causes"]


def band(step: int) -> tuple[float, float] | None:
    """Return the lowest and highest expected validation loss at `step`.

    The losses are in nats per token, from three published runs of llm.c. The result is None if `step` is below
    250 or above 19,500.
    """
    if not min(ANCHORS) <= step <= max(ANCHORS):
        return None
    before, after = next(pair for pair in itertools.pairwise(ANCHORS) if step <= pair[1])
    along = math.log(step / before) / math.log(after / before)
    low, high = ((1 - along) * a + along * b for a, b in zip(ANCHORS[before], ANCHORS[after], strict=True))
    middle, half = (low + high) / 2, next(width for until, width in HALF_WIDTHS.items() if step <= until)
    return min(low, middle - half), max(high, middle + half)


def verdict(step: int, loss: float) -> Literal["inside", "above", "below"] | None:
    """Return how a validation loss compares with the published range. NaN is above."""
    if (limits := band(step)) is None:
        return None
    return "below" if loss < limits[0] else "inside" if loss <= limits[1] else "above"


def compared(step: int, loss: float) -> str:
    """Return log text such as `llm.c 4.315–4.345 ✓`, or "" without a published range."""
    if (limits := band(step)) is None:
        return ""
    side = verdict(step, loss)
    return f"{NAME} {limits[0]:.3f}–{limits[1]:.3f} {'✓' if side == 'inside' else f'✗ {side}'}"


def explained(step: int, loss: float) -> str:
    """Return how a validation loss compares with the published range, or "" without one."""
    side = verdict(step, loss)
    return f"validation loss {loss:.4f} at step {step:,}: {compared(step, loss)}. {CAUSES[side]}" if side else ""
