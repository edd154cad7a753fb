"""The validation losses that llm.c's GPT-2 124M has on FineWeb, and whether a run of its recipe has them too.

Three public runs of llm.c with the settings of `recipes/gpt2_124m.yaml` on 19,560 steps: 8 x H100 (modded-nanogpt,
records/track_1_short/2024-10-13_llmc), 8 x A100 (SiddanthEmani/GPT-2-124M-CUDA) and 1 x A100 (HectorFCardenas/llm.c). Nats
per token on the first 10,485,760 tokens of the validation shard; the third on other batches of it.
"""

import itertools
import math
from typing import Literal


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
ABOVE = (
    "usual causes of a loss above it: fewer tokens per step or another learning rate than the plan above says, dropout, "
    "weights or sums in bf16, labels shifted twice or not at all, other data or another order of documents"
)
BELOW = (
    "usual causes of a loss below it: validation documents among the training ones, a validation set that is not the first "
    "10,485,760 tokens of the shard, targets that the model can see"
)


def band(step: int) -> tuple[float, float] | None:
    """The lowest and highest validation loss in nats that fits after `step`; None outside of steps 250 to 19,500."""
    if not min(ANCHORS) <= step <= max(ANCHORS):
        return None
    before, after = next(pair for pair in itertools.pairwise(ANCHORS) if step <= pair[1])
    along = math.log(step / before) / math.log(after / before)
    low, high = (
        (1 - along) * first + along * last for first, last in zip(ANCHORS[before], ANCHORS[after], strict=True)
    )
    middle, half = (low + high) / 2, next(width for until, width in HALF_WIDTHS.items() if step <= until)
    return min(low, middle - half), max(high, middle + half)


def verdict(step: int, loss: float) -> Literal["inside", "above", "below"] | None:
    """Where a validation loss lies beside the band; None where there is none. What is no number lies above."""
    if (limits := band(step)) is None:
        return None
    if loss < limits[0]:
        return "below"
    return "inside" if loss <= limits[1] else "above"


def compared(step: int, loss: float) -> str:
    """The band with the verdict, for a line of the log: `llm.c 4.315–4.345 ✓`; '' where there is no band."""
    found, limits = verdict(step, loss), band(step)
    if found is None or limits is None:
        return ""
    return f"{NAME} {limits[0]:.3f}–{limits[1]:.3f} {'✓' if found == 'inside' else f'✗ {found}'}"


def explained(step: int, loss: float) -> str:
    """The verdict on a setup in a sentence, with the usual causes where it is off; '' where there is no band."""
    found = verdict(step, loss)
    if found is None:
        return ""
    line = f"validation loss {loss:.4f} at step {step:,}: {compared(step, loss)}"
    if found == "inside":
        return f"{line}: the setup learns as {NAME}'s runs do"
    return f"{line}; {ABOVE if found == 'above' else BELOW}"
