"""What OpenAI's models have where a run is measured: the lines of its plots.

HellaSwag in completion style, normalised by length, as this project scores it while it trains; losses in nats per token on
the first 10,485,760 tokens of llm.c's validation shards. From llm.c (dev/vislog.ipynb) and build-nanogpt (play.ipynb).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


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
    """The GPT-2 whose size is the nearest; the smallest where it is unknown."""
    return min(BASELINES, key=lambda its: abs(its.parameters - (parameters or 0)))


def published_loss(baseline: Baseline, request: Mapping[str, Any], tokens: object) -> float | None:
    """Its loss on the validation set of a prepared folder, None where none is published.

    Args:
        request: of the folder's manifest.
        tokens: those that a validation counts.
    """
    text, split = SHARDS.get(str(request.get("source")), ("", ""))
    as_in_the_shard = (request.get("split"), request.get("packing")) == (split, "concat")
    known = as_in_the_shard and request.get("tokenizer") == "openai-community/gpt2" and tokens == LOSS_TOKENS
    return baseline.losses.get(text) if known else None
