"""Compare a run with published numbers: OpenAI's models, and the losses of llm.c's GPT-2 124M (references.yaml)."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml


HELLASWAG_ITEMS = 10_042  # of the validation split; of fewer, other scores
LOSS_TOKENS = 10_485_760
_TABLES = yaml.safe_load(Path(__file__).with_name("references.yaml").read_text())
# By the source of a text: the text, and how its validation split is cut.
SHARDS: dict[str, dict[str, str]] = _TABLES["shards"]
# By the optimizer step: the lowest and the highest validation loss of the three runs of llm.c.
ANCHORS: dict[int, list[float]] = _TABLES["anchors"]


@dataclasses.dataclass(frozen=True)
class Baseline:
    """GPT-2 of one size, and the score of the GPT-3 of that size.

    Args:
        losses: by the text of the shard.
    """

    name: str
    parameters: int
    hellaswag: float
    gpt3_hellaswag: float
    losses: Mapping[str, float]


BASELINES = tuple(Baseline(**row) for row in _TABLES["baselines"])
GPT2 = BASELINES[0]


def baseline_of(parameters: float | None) -> Baseline:
    """Return the GPT-2 of the nearest size, the smallest if the size is unknown."""
    return min(BASELINES, key=lambda its: abs(its.parameters - (parameters or 0)))


def published_loss(baseline: Baseline, request: Mapping[str, Any], tokens: object) -> float | None:
    """Return the published loss on the validation set of a prepared folder, None if there is no such number.

    Args:
        request: of the folder's manifest.
        tokens: targets of a validation.
    """
    shard = SHARDS.get(str(request.get("source")))
    form = [request.get(key) for key in ("split", "packing", "tokenizer")]
    if shard is None or form != [shard["split"], "concat", "openai-community/gpt2"] or tokens != LOSS_TOKENS:
        return None
    return baseline.losses.get(shard["text"])


NAME = "llm.c"
# Up to a step: half of the least width of the band. Three runs are few, and between the anchors the curve bends.
HALF_WIDTHS = {500: 0.03, 2000: 0.015, 10_000: 0.011, 19_500: 0.0075}
ABOVE = "usual causes: tokens per step, learning rate, dropout, weights or sums in bf16, labels not shifted once, other data"
BELOW = (
    "usual causes: validation documents in the training rows, other validation rows, targets that the model can see"
)


def band(step: int) -> tuple[float, float] | None:
    """Return the lowest and highest validation loss in nats that fits after `step`; None outside of steps 250 to 19,500."""
    if not min(ANCHORS) <= step <= max(ANCHORS):
        return None
    before, after = next(pair for pair in itertools.pairwise(ANCHORS) if step <= pair[1])
    along = math.log(step / before) / math.log(after / before)
    low, high = ((1 - along) * a + along * b for a, b in zip(ANCHORS[before], ANCHORS[after], strict=True))
    middle, half = (low + high) / 2, next(width for until, width in HALF_WIDTHS.items() if step <= until)
    return min(low, middle - half), max(high, middle + half)


def verdict(step: int, loss: float) -> Literal["inside", "above", "below"] | None:
    """Return where a validation loss lies relative to the band, None if there is none. NaN lies above."""
    if (limits := band(step)) is None:
        return None
    return "below" if loss < limits[0] else "inside" if loss <= limits[1] else "above"


def compared(step: int, loss: float) -> str:
    """Return the band with the verdict, for a line of the log: `llm.c 4.315–4.345 ✓`; '' if there is no band."""
    found, limits = verdict(step, loss), band(step)
    if limits is None:
        return ""
    return f"{NAME} {limits[0]:.3f}–{limits[1]:.3f} {'✓' if found == 'inside' else f'✗ {found}'}"


def explained(step: int, loss: float) -> str:
    """Return the verdict on a setup in a sentence, with the usual causes if it is off; '' if there is no band."""
    found = verdict(step, loss)
    ends = {"inside": f": the setup learns as {NAME}'s runs do", "above": f"; {ABOVE}", "below": f"; {BELOW}"}
    return f"validation loss {loss:.4f} at step {step:,}: {compared(step, loss)}{ends[found]}" if found else ""
