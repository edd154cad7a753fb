"""Choose model size, tokens, batch and learning rate of a GPT-2 for a number of FLOPs.

The rules and their sources:

- expected loss: L(N, D) = E + A / N**alpha + B / D**beta of Besiroglu et al. (arXiv 2404.10102), a new fit of the data
  of Hoffmann et al. 2022. E is moved so that GPT-2 124M has the loss of llm.c after 9.9B tokens of FineWeb. The formula
  then gives 2.90 for llm.c's GPT-2 350M after 31.5B tokens, which ended at 2.928.
- tokens per step: proportional to D**0.383 (Bergsma et al., arXiv 2505.13738), with 524,288 for 9.9B tokens
- learning rate: proportional to the square root of the tokens per step, and of 1 / width (as nanochat's
  scripts/base_train.py and gpt.py for AdamW), with 6e-4 for GPT-2 124M
"""

import math
from pathlib import Path
from typing import NamedTuple

import jinja2

from gpt2_repro.errors import UserError
from gpt2_repro.model.size import ModelScale, gpt2_scale
from gpt2_repro.planning.cost import GPT2_FLOPS_PER_TOKEN


TEMPLATE = Path(__file__).with_name("budget.yaml.j2")
A = 482.01
ALPHA = 0.3478
B = 2085.43
BETA = 0.3658
# The smallest run that was fitted.
FITTED_PARAMETERS = 70e6
FITTED_TOKENS = 5e9
# llm.c's run, as recipes/gpt2_124m.yaml.
GPT2_124M = 124_439_808
TOKENS = 9.89e9
LOSS = 3.28
BATCH = 1 << 19
RATE = 6e-4
WIDTH = 768
CONTEXT = 1024
VOCABULARY = 50_257
FEWEST_STEPS = 100
# The fit is not more exact than this (nats). The smallest model in this range is the cheapest to sample and to score.
TOLERANCE = 0.02
HELD_OUT = 100_000_000  # tokens for validation
FINEWEB = "HuggingFaceFW/fineweb"
SOURCES = {9.8e9: "fineweb-10bt", 98e9: f"{FINEWEB}:sample-100BT", 349e9: f"{FINEWEB}:sample-350BT"}


class Choice(NamedTuple):
    """A GPT-2 with `depth` blocks of width 64 * depth, and how it is trained."""

    depth: int
    scale: ModelScale
    tokens_per_step: int
    steps: int

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def learning_rate(self) -> float:
        rate = RATE * math.sqrt(self.tokens_per_step / BATCH * WIDTH / (64 * self.depth))
        return float(f"{rate:.2g}")

    @property
    def loss(self) -> float:
        return expected_loss(self.scale.parameters, self.tokens)

    def recipe(self, name: str, heading: str, *, hours: float) -> str:
        """Return the recipe as YAML. Its comments have the expected loss, and the origin of each number.

        `name` is the name of its data folder. Raises UserError if no sample of FineWeb has so many tokens.
        """
        needed = int(1.01 * self.tokens) + HELD_OUT  # a row less at the end of each shard
        template = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"), keep_trailing_newline=True)
        reference_flops = TOKENS * GPT2_FLOPS_PER_TOKEN
        return template.render(
            choice=self,
            name=name,
            heading=heading,
            hours=hours,
            source=smallest_source(needed),
            needed=needed,
            share=reference_flops / (self.tokens * self.scale.flops_per_token),
            is_fitted=is_fitted(self.scale.parameters, self.tokens),
            held_out=HELD_OUT,
            tolerance=TOLERANCE,
            tokens=TOKENS,
            loss=LOSS,
        )


def smallest_source(needed: int) -> str:
    """Return the smallest sample of FineWeb with more than `needed` tokens, or raise UserError."""
    for tokens, source in SOURCES.items():
        if needed < tokens:
            return source
    raise UserError(f"{needed / 1e9:.0f}B tokens are more than FineWeb's sample of 350B has. Pay less.")


def expected_loss(parameters: float, tokens: float) -> float:
    """Return the expected validation loss on FineWeb, in nats per token of GPT-2."""
    of_size = A / parameters**ALPHA - A / GPT2_124M**ALPHA
    of_data = B / tokens**BETA - B / TOKENS**BETA
    return LOSS + of_size + of_data


def is_fitted(parameters: float, tokens: float) -> bool:
    """Return whether a run is in the range of the runs that were fitted."""
    return parameters >= FITTED_PARAMETERS and tokens >= FITTED_TOKENS


def choose(flops: float, gpus: int) -> Choice:
    """Return the smallest GPT-2 whose expected loss for a number of FLOPs is nearly the best.

    A step has `gpus` times a power of two tokens. Raises UserError if there are too few FLOPs for 100 steps.
    """
    choices: list[Choice] = []
    for depth in range(2, 49):
        scale = gpt2_scale(
            n_layer=depth,
            n_embd=64 * depth,
            sequence_length=CONTEXT,
            vocab_size=VOCABULARY,
            pad_to_multiple_of=128,
        )
        tokens = flops / scale.flops_per_token
        target = max(32_768, BATCH * (tokens / TOKENS) ** 0.383)
        batch = gpus << round(math.log2(target / gpus))
        steps = int(tokens / batch)
        if steps >= FEWEST_STEPS:
            choices.append(Choice(depth, scale, batch, steps))
    if not choices:
        raise UserError("This budget is too small for 100 steps. Pass a larger --budget or --hours.")
    best = min(choice.loss for choice in choices)
    return next(choice for choice in choices if choice.loss <= best + TOLERANCE)
