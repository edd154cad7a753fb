"""What a run takes in hours and dollars, on the machine that is there and on every card that has a price."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple


Basis = Literal["published", "estimated", "typed", "assumed"]
TEN_BILLION = 10_000_000_000
GPT2_FLOPS_PER_TOKEN = 855e6  # of the 124M model in rows of 1,024 tokens (6N + 12LCT), which the table of cards is of
# Assumed minutes of a rented machine around the training; a first start installs and compiles.
BOOT, ENVIRONMENT, COMPILING, EVALUATION = 3.0, 4.0, 1.5, 5.0
SAVE_SECONDS, SAMPLE_SECONDS = 2.0, 0.6
SYNC_BYTES_PER_SECOND = 50e6


class Entry(NamedTuple):
    """A part of what is paid, in minutes, and what the number rests on."""

    name: str
    minutes: float
    basis: Basis


class Ranked(NamedTuple):
    """What 10B tokens cost on one kind of card."""

    card: str
    provider: str
    usd: float
    hours: float  # of one card
    usd_per_hour: float
    priced: str  # when and by whom
    speed: str  # whose measurement


@dataclasses.dataclass(frozen=True)
class Work:
    """What a run has to do.

    Args:
        tokens, steps: of the training; flops: of all of its tokens.
        validations: how many, of eval_tokens each; hellaswag_passes: of hellaswag_tokens each; samples: how many.
        save_steps, save_minutes: between two checkpoints, whichever comes first; 0 for none.
        checkpoint_bytes, final_bytes: of a checkpoint, and of the model in fp32.
        keep_checkpoints: the newest ones, 0 for all; keep_every_steps: those that are kept for good, 0 for none.
    """

    tokens: int
    steps: int
    flops: float
    eval_tokens: int
    validations: int
    hellaswag_tokens: int
    hellaswag_passes: int
    samples: int
    save_steps: int
    save_minutes: float
    checkpoint_bytes: int
    final_bytes: int
    keep_checkpoints: int
    keep_every_steps: int


def times(steps: int, every: int) -> int:
    """How often something is done that is done before the first step, every so many, and after the last."""
    return 0 if not every else 1 + -(-steps // every)


def hours(tokens: float, tokens_per_second: float) -> float:
    """Of steps alone: 10e9 tokens at 1.59e6 a second are 1.75."""
    return tokens / tokens_per_second / 3600


def budget(work: Work, tokens_per_second: float, *, basis: Basis) -> list[Entry]:
    """Everything that is paid from the start of a machine to its stop, in the order in which it comes.

    `tokens_per_second`: of all cards in a step; a forward pass has a third of a step's FLOPs. `basis`: of that speed.
    """
    training = 60 * hours(work.tokens, tokens_per_second)
    measured, scored = work.validations * work.eval_tokens, work.hellaswag_passes * work.hellaswag_tokens
    entries = [
        Entry("boot", BOOT, "assumed"),
        Entry("environment", ENVIRONMENT, "assumed"),
        Entry("compiling", COMPILING, "assumed"),
        Entry("training steps", training, basis),
        Entry("validation", 60 * hours(measured / 3, tokens_per_second), basis),
        Entry("HellaSwag", 60 * hours(scored / 3, tokens_per_second), basis),
        Entry("samples", work.samples * SAMPLE_SECONDS / 60, "assumed"),
        Entry("saving", saves(work, training) * SAVE_SECONDS / 60, "assumed"),
        Entry("evaluation", EVALUATION, "assumed"),
        Entry("sync", (work.checkpoint_bytes + work.final_bytes) / SYNC_BYTES_PER_SECOND / 60, "assumed"),
    ]
    return [entry for entry in entries if entry.minutes]


def saves(work: Work, training_minutes: float = 0.0) -> int:
    """Checkpoints of a run whose steps take so long; by its steps alone where that is not known."""
    if not work.save_steps:
        return 0
    apart = work.save_steps * training_minutes / work.steps
    if work.save_minutes and apart > work.save_minutes:
        return 1 + int(training_minutes / work.save_minutes)
    return -(-work.steps // work.save_steps)


def run_bytes(work: Work) -> int:
    """What a run takes at most: the checkpoints that are kept, the best one, the one being written, and the final model."""
    newest = work.keep_checkpoints or saves(work)
    for_good = work.steps // work.keep_every_steps if work.keep_every_steps else 0
    return (min(newest, max(1, saves(work))) + for_good + 2) * work.checkpoint_bytes + work.final_bytes


def ranked(offers: Sequence[Ranked]) -> list[Ranked]:
    """The cheapest first."""
    return sorted(offers, key=lambda offer: offer.usd)
