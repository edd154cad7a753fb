"""The tables and the conclusion of a diagnosis, from two models' losses on the same rows."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.evaluation.diagnosis import profiles
from gpt2_repro.evaluation.diagnosis.profiles import NATS, Bucket, Estimate, Jump
from gpt2_repro.evaluation.diagnosis.texts import Losses, Row
from gpt2_repro.evaluation.statistics import FEWEST
from gpt2_repro.run_record.layout import RECIPE


UNUSED = 0.25  # parts of what the context is worth to the baseline
UNLEARNED = 3.0  # nats on the separator at a document's end: a twentieth of the baseline's probability
EXCESS = 0.5  # by which a domain's difference exceeds the home's, in parts of the home's, before it stands out
Tables = dict[str, list[Bucket]]


@dataclasses.dataclass(frozen=True)
class Cause:
    """A likely cause.

    Args:
        nats: its approximate cost per token of a row of text; of context at most what the model lacks everywhere.
    """

    name: str
    nats: float
    evidence: str
    remedy: str


def measure(
    rows: Sequence[Row],
    losses: Sequence[Losses],
    *,
    names: Sequence[str],
    window: int,
    separator: int | None,
    home: str | None,
    counts: NDArray[np.int64] | None,
) -> dict[str, Any]:
    """Return what diagnosis.json has besides settings.

    Args:
        losses: of each row, by both models.
        names: of the domains.
        separator: the id between documents of training rows.
        home: the domain that the model was trained on, if it is among them.
        counts: of each id in the training text [vocabulary]; None counts the sample.
    """
    everything = profiles.join(rows, losses, separator=separator)
    targets = everything[everything.part == "text"]
    edges = profiles.position_edges(window)
    full = targets[np.bincount(targets.row)[targets.row] == window]
    jump = profiles.find_jump(full, edges)
    trained = jump.position if jump else window
    # Each defect that was found is kept out of the tables by which the next ones are judged.
    sound = targets[targets.position < trained]
    tables = {
        "positions": profiles.by_place(full, full.position, edges),
        **profiles.document_edges(everything),
        **profiles.last_words(rows, losses, names=names, longest=trained),
    }
    reference = _reference(profiles.buckets(sound, sound.domain, names), home)
    # The model does not expect a separator where the baseline does, beyond what it lacks everywhere.
    unlearned = any(end.difference.exceeds(_everywhere(reference) + UNLEARNED) for end in _judged(tables["ends"]))
    if unlearned:
        sound = sound[(sound.token != separator) & ~sound.spoiled]
    tables["domains"] = profiles.buckets(sound, sound.domain, names)
    tables["frequencies"] = profiles.by_frequency(sound, np.bincount(targets.token) if counts is None else counts)
    causes = sorted(_causes(tables, jump, unlearned, home, window), key=lambda cause: -cause.nats)
    not_judged = _not_judged(tables)
    found: dict[str, Sequence[Any]] = {**tables, "jump": [jump] if jump else [], "causes": causes}
    return {
        **{name: [dataclasses.asdict(one, dict_factory=_finite) for one in its] for name, its in found.items()},
        "not_judged": not_judged,
        "conclusion": _conclude(causes, not_judged),
    }


def _judged(buckets: Sequence[Bucket]) -> list[Bucket]:
    return [bucket for bucket in buckets if bucket.documents >= FEWEST]


def _reference(domains: Sequence[Bucket], home: str | None) -> Bucket | None:
    """Return the domain to compare the others with: the model's home, or the one with the smallest difference."""
    judged = _judged(domains)
    at_home = next((bucket for bucket in judged if bucket.label == home), None)
    return at_home or min(judged, key=lambda bucket: bucket.difference.value, default=None)


def _everywhere(reference: Bucket | None) -> float:
    """Return by how many nats the model is worse on any token."""
    return max(reference.difference.value, 0.0) if reference else 0.0


def _causes(tables: Tables, jump: Jump | None, unlearned: bool, home: str | None, window: int) -> Iterator[Cause]:
    if jump and _judged(tables["positions"]):
        yield Cause(
            "untrained positions",
            jump.difference.value * (window - jump.position) / window,
            f"From position {jump.position:,} on the difference is larger by {jump.difference} nats, and the model's own "
            f"loss rises by {jump.ours}",
            f"score it with --max_length {jump.position}, and train the next one with rows that reach the last position",
        )
    if unlearned:
        (end,), cost = tables["ends"], 0.0
        if tables["starts"]:
            first, (later,) = tables["starts"][0], tables["start_cost"]
            cost = first.difference.value + later.difference.value * (later.tokens // later.documents)
        yield Cause(
            "a separator that was not learned",
            cost / window,
            f"Where documents end, its loss on the separator is {end.ours:.1f} nats and the baseline's {end.theirs:.1f}",
            "put one in front of every document, --separator before, and leave its label unmasked",
        )
    reference = _reference(tables["domains"], home)
    if reference is None:
        return
    everywhere, foreign = _everywhere(reference), []
    for bucket in _judged(tables["domains"]):
        ours, base = bucket.difference, reference.difference
        excess = Estimate(ours.value - base.value, math.hypot(ours.stderr, base.stderr))
        if ours.exceeds(NATS) and excess.exceeds(max(NATS, EXCESS * everywhere)):
            foreign.append(bucket)
    # Context is judged by the reference if it has passages, never by unfamiliar text: there a model uses it less, too.
    unfamiliar = [bucket.label for bucket in foreign]
    telling = [gain for gain in _judged(tables["gain"]) if gain.theirs > NATS and gain.label not in unfamiliar]
    telling = [gain for gain in telling if gain.label == reference.label] or telling
    # The context is worth less to the model by more than it lacks on the last sentence alone.
    lacks = {bucket.label: -bucket.difference.value for bucket in tables["sentence"]}
    losses = [Estimate(-gain.difference.value, gain.difference.stderr) for gain in telling]
    bounds = [max(NATS, UNUSED * gain.theirs, lacks[gain.label]) for gain in telling]
    unused = [gain for gain, loss, bound in zip(telling, losses, bounds, strict=True) if loss.exceeds(bound)]
    if unused:
        shown = [f"{its.ours:.2f} nats to it and {its.theirs:.2f} to the baseline on {its.label}" for its in unused]
        yield Cause(
            "context that is not used",
            min(everywhere, max(-gain.difference.value for gain in unused)),
            f"The text before the last sentence is worth {', '.join(shown)}",
            "check that rows show documents in one piece; if they do, train for longer: context is learned late",
        )
    if foreign:
        listed = ", ".join(f"{bucket.label} by {bucket.difference} nats" for bucket in foreign)
        yield Cause(
            "the text that it was trained on",
            max(bucket.difference.value for bucket in foreign) - everywhere,
            f"It is worse on {listed}, while on {reference.label} the difference is {reference.difference}",
            "mix it into the training data, or train on the baseline's kind; longer training on the same helps less",
        )


def _not_judged(tables: Tables) -> list[str]:
    """Return what had too few documents."""
    documents = {bucket.label: bucket.documents for bucket in tables["domains"]}
    for what, table in (("positions", "positions"), ("the separator", "ends"), ("the use of context", "gain")):
        documents[what] = max((bucket.documents for bucket in tables[table]), default=0)
    few = [f"{what} ({count} documents, {FEWEST} needed)" for what, count in documents.items() if count < FEWEST]
    return few if len(_judged(tables["domains"])) > 1 else [*few, "domains (two needed)"]


def _conclude(causes: Sequence[Cause], not_judged: Sequence[str]) -> str:
    sentences = []
    for cause in causes:
        kind = "Likely cause" if cause.nats >= NATS else "A defect that costs little"
        sentences.append(f"{kind}: {cause.name}. {cause.evidence}. To fix it: {cause.remedy}.")
    if not causes:
        sentences.append(
            "No cause stands out. Fewer tokens, another learning rate, dropout or batch cost the same everywhere: "
            f"train.py with RUN/{RECIPE} and --diff_recipe RECIPE lists what deviates."
        )
    if not_judged:
        sentences.append(f"Not judged: {'; '.join(not_judged)}.")
    return " ".join(sentences)


def _finite(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dataclass's fields as JSON has them: null for a standard error that is not known."""
    return {name: None if value == math.inf else value for name, value in pairs}
