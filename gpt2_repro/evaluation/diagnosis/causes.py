"""Name what the loss difference of two models is likely to come from, or say that nothing stands out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpt2_repro.evaluation.diagnosis.profiles import NATS, Bucket, Estimate, Jump
from gpt2_repro.evaluation.statistics import FEWEST


UNUSED = 0.25  # parts of what the context is worth to the baseline
UNLEARNED = 3.0  # nats on the separator at a document's end: a twentieth of the baseline's probability
EXCESS = 0.5  # by which a domain's difference exceeds the home's, in parts of the home's, before it stands out


@dataclass(frozen=True)
class Cause:
    """A likely cause.

    Args:
        nats: its approximate cost per token of a row of text; of context at most what the model lacks everywhere.
    """

    name: str
    nats: float
    evidence: str
    remedy: str


def conclude(
    tables: Mapping[str, Sequence[Bucket]], jump: Jump | None, *, home: str | None, window: int
) -> tuple[list[Cause], list[str], str]:
    """Return the causes, the costliest first; what could not be judged; and both as a paragraph.

    Args:
        tables: by domain without what the jump and an unlearned separator did.
        home: the domain that the model was trained on, if it is among them.
    """
    judged = [bucket for bucket in tables["domains"] if bucket.documents >= FEWEST]
    documents = {bucket.label: bucket.documents for bucket in tables["domains"]}
    for what, table in (("positions", "positions"), ("the separator", "ends"), ("the use of context", "gain")):
        documents[what] = max((bucket.documents for bucket in tables[table]), default=0)
    not_judged = [
        f"{what} ({count} documents, {FEWEST} needed)" for what, count in documents.items() if count < FEWEST
    ]
    if len(judged) < 2:
        not_judged.append("domains (two needed)")

    reference = reference_of(judged, home)
    foreign = [bucket for bucket in judged if reference and _stands_out(bucket, reference)]
    causes = []
    if jump and documents["positions"] >= FEWEST:
        causes.append(_untrained_positions(jump, window))
    if is_unlearned(tables["ends"], reference):
        causes.append(_unlearned_separator(tables, window))
    if unused := _unused(tables, foreign, reference):
        causes.append(_unused_context(unused, reference))
    if reference and foreign:
        causes.append(_foreign_text(foreign, reference))
    causes.sort(key=lambda cause: -cause.nats)
    return causes, not_judged, _paragraph(causes, not_judged, [bucket.difference.value for bucket in judged])


def reference_of(domains: Sequence[Bucket], home: str | None) -> Bucket | None:
    """Return the domain to compare the others with: the model's home, or the one with the smallest difference."""
    judged = [bucket for bucket in domains if bucket.documents >= FEWEST]
    at_home = next((bucket for bucket in judged if bucket.label == home), None)
    return at_home or min(judged, key=lambda bucket: bucket.difference.value, default=None)


def is_unlearned(ends: Sequence[Bucket], reference: Bucket | None) -> bool:
    """Return whether the model does not expect a separator where the baseline does, beyond what it lacks everywhere."""
    bound = _everywhere(reference) + UNLEARNED
    return any(bucket.documents >= FEWEST and bucket.difference.exceeds(bound) for bucket in ends)


def _everywhere(reference: Bucket | None) -> float:
    """Return by how many nats the model is worse on any token."""
    return max(reference.difference.value, 0.0) if reference else 0.0


def _stands_out(bucket: Bucket, reference: Bucket) -> bool:
    ours, base = bucket.difference, reference.difference
    excess = Estimate(ours.value - base.value, math.hypot(ours.stderr, base.stderr))
    return ours.exceeds(NATS) and excess.exceeds(max(NATS, EXCESS * _everywhere(reference)))


def _unused(
    tables: Mapping[str, Sequence[Bucket]], foreign: Sequence[Bucket], reference: Bucket | None
) -> list[Bucket]:
    """Return the gains of text whose context is worth less to the model by more than it lacks on the last sentence alone.

    Judged by the reference if it has passages, never by unfamiliar text: there a model uses context less, too.
    """
    unfamiliar = {bucket.label for bucket in foreign}
    telling = [
        (sentence, gain)
        for sentence, gain in zip(tables["sentence"], tables["gain"], strict=True)
        if gain.documents >= FEWEST and gain.theirs > NATS and gain.label not in unfamiliar
    ]
    at_home = [pair for pair in telling if reference and pair[1].label == reference.label]
    return [
        gain
        for sentence, gain in at_home or telling
        if Estimate(-gain.difference.value, gain.difference.stderr).exceeds(
            max(NATS, UNUSED * gain.theirs, -sentence.difference.value)
        )
    ]


def _untrained_positions(jump: Jump, window: int) -> Cause:
    return Cause(
        "untrained positions",
        jump.difference.value * (window - jump.position) / window,
        f"from position {jump.position:,} on the difference is larger by {jump.difference} nats, and the model's own loss "
        f"rises by {jump.ours}",
        f"score it with --max_length {jump.position}, and train the next one with rows that reach the last position",
    )


def _unlearned_separator(tables: Mapping[str, Sequence[Bucket]], window: int) -> Cause:
    (end,), nats = tables["ends"], 0.0
    for first, later in zip(tables["starts"], tables["start_cost"], strict=False):
        cost = later.difference.value * (later.tokens // later.documents)
        nats = (first.difference.value + cost) / window
    return Cause(
        "a separator that was not learned",
        nats,
        f"where documents end, its loss on the separator is {end.ours:.1f} nats and the baseline's {end.theirs:.1f}",
        "put one in front of every document, --separator before, and leave its label unmasked",
    )


def _unused_context(gains: Sequence[Bucket], reference: Bucket | None) -> Cause:
    shown = (f"{gain.ours:.2f} nats to it and {gain.theirs:.2f} to the baseline on {gain.label}" for gain in gains)
    return Cause(
        "context that is not used",
        min(_everywhere(reference), max(-gain.difference.value for gain in gains)),
        f"the text before the last sentence is worth {', '.join(shown)}",
        "check that rows show documents in one piece, for torn or mixed documents teach a model to ignore context; if they "
        "do, train for longer: it is learned late",
    )


def _foreign_text(foreign: Sequence[Bucket], reference: Bucket) -> Cause:
    listed = ", ".join(f"{bucket.label} by {bucket.difference} nats" for bucket in foreign)
    return Cause(
        "the text that it was trained on",
        max(bucket.difference.value for bucket in foreign) - _everywhere(reference),
        f"it is worse on {listed}, while on {reference.label} the difference is {reference.difference}",
        "mix such text into the training data, or train on the baseline's kind; longer training on the same helps less",
    )


def _paragraph(causes: Sequence[Cause], not_judged: Sequence[str], differences: Sequence[float]) -> str:
    sentences = [
        f"{'Likely cause' if cause.nats >= NATS else 'A defect that costs little'}: {cause.name}. "
        f"{cause.evidence[:1].upper()}{cause.evidence[1:]}. To fix it: {cause.remedy}."
        for cause in causes
    ]
    if not causes:
        sentences.append("No cause stands out.")
        if differences and max(map(abs, differences)) < NATS:
            sentences.append("The two models are nearly alike.")
        elif differences and max(differences) < NATS:
            sentences.append("The model is nowhere worse than the baseline.")
        elif differences and max(differences) - min(differences) <= max(NATS, EXCESS * min(differences)):
            sentences.append(
                "The difference is of one size everywhere, as from fewer tokens, another learning rate, dropout or batch. "
                "train.py with RUN/recipe.yaml and --diff_recipe RECIPE lists what deviates."
            )
    if not_judged:
        sentences.append(f"Not judged: {'; '.join(not_judged)}.")
    return " ".join(sentences)
