"""Published numbers to compare a run with: OpenAI's models, and the losses of llm.c's GPT-2 124M.

OpenAI's models: HellaSwag in completion style, normalised by length, as this project scores it while it trains; losses in
nats per token on the first 10,485,760 tokens of llm.c's validation shards. From llm.c (dev/vislog.ipynb) and build-nanogpt
(play.ipynb).

llm.c's losses on FineWeb: three public runs with the settings of `recipes/gpt2_124m.yaml` on 19,560 steps: 8 x H100
(modded-nanogpt, records/track_1_short/2024-10-13_llmc), 8 x A100 (SiddanthEmani/GPT-2-124M-CUDA) and 1 x A100
(HectorFCardenas/llm.c). Nats per token on the same tokens; the third run on other batches of the shard.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any, Literal


HELLASWAG_ITEMS = 10_042  # of the validation split; of fewer, other scores
LOSS_TOKENS = 10_485_760
# The sources of one text, and how its validation set is cut as llm.c's shard is.
SHARDS = {
    "fineweb-10bt": ("fineweb", "head"),
    "fineweb-10bt-tokens": ("fineweb", "source"),
    "fineweb-edu-10bt": ("fineweb-edu", "head"),
    "fineweb-edu-10bt-tokens": ("fineweb-edu", "source"),
}


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


GPT2 = Baseline("GPT-2", 124_439_808, 0.294463, 0.337, {"fineweb": 3.424958, "fineweb-edu": 3.2924})
BASELINES = (
    GPT2,
    Baseline("GPT-2 medium", 354_823_168, 0.375224, 0.436, {"fineweb": 3.083089}),
    Baseline("GPT-2 large", 774_030_080, 0.431986, 0.510, {"fineweb": 3.000580}),
    Baseline("GPT-2 xl", 1_557_611_200, 0.488946, 0.547, {"fineweb": 2.831273}),
)


def baseline_of(parameters: float | None) -> Baseline:
    """Return the GPT-2 of the nearest size, the smallest if the size is unknown."""
    return min(BASELINES, key=lambda its: abs(its.parameters - (parameters or 0)))


def published_loss(baseline: Baseline, request: Mapping[str, Any], tokens: object) -> float | None:
    """Return the published loss on the validation set of a prepared folder, None if there is no such number.

    Args:
        request: of the folder's manifest.
        tokens: targets of a validation.
    """
    text, split = SHARDS.get(str(request.get("source")), ("", ""))
    as_in_the_shard = (request.get("split"), request.get("packing")) == (split, "concat")
    known = as_in_the_shard and request.get("tokenizer") == "openai-community/gpt2" and tokens == LOSS_TOKENS
    return baseline.losses.get(text) if known else None


NAME = "llm.c"
# Optimizer step of 524,288 tokens: the lowest and the highest validation loss of the three runs.
ANCHORS = {
    250: (6.1565, 6.2022),
    500: (5.3743, 5.4249),
    750: (4.7097, 4.7382),
    1000: (4.3170, 4.3423),
    1250: (4.1296, 4.1401),
    1500: (4.0060, 4.0103),
    2000: (3.8585, 3.8722),
    2500: (3.7652, 3.7684),
    3000: (3.6973, 3.7041),
    4000: (3.6088, 3.6176),
    5000: (3.5487, 3.5556),
    6000: (3.5037, 3.5104),
    8000: (3.4395, 3.4457),
    10000: (3.3873, 3.3982),
    12000: (3.3446, 3.3522),
    14000: (3.3079, 3.3165),
    16000: (3.2826, 3.2900),
    18000: (3.2673, 3.2755),
    19500: (3.2648, 3.2731),
}
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
