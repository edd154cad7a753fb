"""Probes that separate causes: the token between documents, at their start and end, and what context is worth to a last word."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from gpt2_repro.evaluation.diagnosis.profiles import Estimate, mean
from gpt2_repro.evaluation.diagnosis.scoring import RowScore
from gpt2_repro.evaluation.diagnosis.texts import EDGE_TOKENS, Question


@dataclasses.dataclass(frozen=True)
class StartLoss:
    """Mean losses in nats on the ids of some places behind the start of documents.

    Args:
        ours_without, theirs_without: where nothing stands before the document; its first id cannot be guessed then.
    """

    label: str
    ours: float
    theirs: float
    ours_without: float | None
    theirs_without: float | None


@dataclasses.dataclass(frozen=True)
class StartToken:
    """What the token that starts a document costs: the loss on its second and later ids with it, less that without it."""

    documents: int
    later: int  # ids of a document behind its first
    ours: Estimate
    theirs: Estimate
    difference: Estimate
    places: list[StartLoss]


@dataclasses.dataclass(frozen=True)
class Separator:
    """The loss on the separator where documents end, in nats."""

    documents: int
    ours: Estimate
    theirs: Estimate
    difference: Estimate


@dataclasses.dataclass(frozen=True)
class LastWords:
    """Log-probabilities in nats of the last words of passages.

    Args:
        whole: mean after the whole passage, ours and theirs.
        sentence: mean after its last sentence alone, ours and theirs.
        right: the share that is guessed after the whole passage, ours and theirs.
        sentence_difference: ours less theirs, after the last sentence alone.
        gain_difference: ours less theirs, of whole less sentence: of what the text before the last sentence is worth.
    """

    name: str
    passages: int
    whole: tuple[float, float]
    sentence: tuple[float, float]
    right: tuple[float, float]
    sentence_difference: Estimate
    gain_difference: Estimate

    @property
    def gain(self) -> tuple[float, float]:
        return self.whole[0] - self.sentence[0], self.whole[1] - self.sentence[1]


def start_token(
    ours_with: Sequence[RowScore],
    ours_without: Sequence[RowScore],
    theirs_with: Sequence[RowScore],
    theirs_without: Sequence[RowScore],
) -> StartToken:
    """Compare the scores of documents [documents] behind the start token with those of the same ids without it."""
    our_with, our_without, their_with, their_without = (
        np.stack([score.losses for score in scores]).astype(np.float64)
        for scores in (ours_with, ours_without, theirs_with, theirs_without)
    )
    our_cost, their_cost = (
        (given[:, 1:] - without).mean(axis=1)
        for given, without in ((our_with, our_without), (their_with, their_without))
    )
    places = our_with.shape[1]
    edges = [2**power for power in range(EDGE_TOKENS.bit_length()) if 2**power <= places] + [places + 1]
    rows = []
    for low, high in itertools.pairwise(edges):
        label = f"{low}" if low + 1 == high else f"{low} to {high - 1}"
        given = [float(losses[:, low - 1 : high - 1].mean()) for losses in (our_with, their_with)]
        without = [
            float(losses[:, low - 2 : high - 2].mean()) if low > 1 else None for losses in (our_without, their_without)
        ]
        rows.append(StartLoss(label, *given, *without))
    return StartToken(len(our_cost), places - 1, mean(our_cost), mean(their_cost), mean(our_cost - their_cost), rows)


def separator(ours: Sequence[RowScore], theirs: Sequence[RowScore]) -> Separator:
    """Compare the scores of the last id of rows [documents]."""
    our_loss, their_loss = (
        np.array([score.losses[-1] for score in scores], dtype=np.float64) for scores in (ours, theirs)
    )
    return Separator(len(our_loss), mean(our_loss), mean(their_loss), mean(our_loss - their_loss))


def last_words(
    name: str,
    questions: Sequence[tuple[Question, Question]],
    ours: Sequence[RowScore],
    theirs: Sequence[RowScore],
) -> LastWords:
    """Compare two models' scores of questions, each asked whole and then with its last sentence alone."""
    asked = [question for pair in questions for question in pair]
    found = [
        np.array([score.losses[-question.targets :].sum() for question, score in zip(asked, scores, strict=True)])
        for scores in (ours, theirs)
    ]
    (our_whole, our_sentence), (their_whole, their_sentence) = ((-losses[0::2], -losses[1::2]) for losses in found)
    right = [
        float(
            np.mean(
                [score.hits[-question.targets :].all() for question, score in zip(asked, scores, strict=True)][::2]
            )
        )
        for scores in (ours, theirs)
    ]
    return LastWords(
        name,
        len(questions),
        whole=(float(our_whole.mean()), float(their_whole.mean())),
        sentence=(float(our_sentence.mean()), float(their_sentence.mean())),
        right=(right[0], right[1]),
        sentence_difference=mean(our_sentence - their_sentence),
        gain_difference=mean((our_whole - our_sentence) - (their_whole - their_sentence)),
    )
