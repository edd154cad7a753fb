"""Compare two models' losses on the same rows, and name causes of the difference."""

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


# Context counts as unused if the model gains less from it than the baseline, by this fraction of the baseline's gain.
UNUSED = 0.25
# The separator counts as unlearned if the model's loss on it exceeds the baseline's by this many nats (1/20 of the
# probability) more than it does on all text.
UNLEARNED = 3.0
# A domain stands out if its loss difference exceeds that of the home domain by this fraction of the latter.
EXCESS = 0.5
Tables = dict[str, list[Bucket]]


@dataclasses.dataclass(frozen=True)
class Cause:
    """A likely cause of the loss difference between the model and the baseline.

    Args:
        nats: how much of the mean loss difference this cause explains, in nats per token (an estimate).
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
    """Return the tables, the causes and the conclusion for diagnosis.json.

    Args:
        losses: the model's losses on all rows, and the baseline's losses on all rows.
        names: the names of the domains (kinds of text).
        window: the largest number of targets (ids to predict) in a row.
        separator: the id between documents.
        home: the name of the domain that the model was trained on.
        counts: how often each id occurs in the training text, of shape [vocabulary]. If None, the ids in `rows` are
            counted instead.
    """
    everything = profiles.join(rows, losses, separator=separator)
    targets = everything[everything.part == "text"]
    edges = profiles.position_edges(window)
    # Only full rows, so that all positions are compared on the same rows.
    full = targets[np.bincount(targets.row)[targets.row] == window]
    jump = profiles.find_jump(full, edges)
    trained = jump.position if jump else window
    # Tokens with a defect already found are removed before the next causes are judged.
    sound = targets[targets.position < trained]
    tables = {
        "positions": profiles.by_place(full, full.position, edges),
        **profiles.document_edges(everything),
        **profiles.last_words(rows, losses, names=names, longest=trained),
    }
    reference = _reference(profiles.buckets(sound, sound.domain, names), home)
    # The loss difference on separators must exceed the difference on all text by UNLEARNED.
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
    """Return the domain (kind of text) to compare other domains with.

    Domains with too few documents are ignored. The result is the domain `home`. If `home` is not among the remaining
    domains, the result is the domain with the smallest loss difference. If no domain remains, the result is None.
    """
    judged = _judged(domains)  # without domains that have too few documents
    at_home = next((bucket for bucket in judged if bucket.label == home), None)
    return at_home or min(judged, key=lambda bucket: bucket.difference.value, default=None)


def _everywhere(reference: Bucket | None) -> float:
    """Return the loss difference on `reference` in nats, as an estimate for all text."""
    return max(reference.difference.value, 0.0) if reference else 0.0


def _causes(tables: Tables, jump: Jump | None, unlearned: bool, home: str | None, window: int) -> Iterator[Cause]:
    if jump and _judged(tables["positions"]):
        yield Cause(
            "untrained positions",
            jump.difference.value * (window - jump.position) / window,
            f"From position {jump.position:,} on, the loss difference is larger by {jump.difference} nats, and the "
            f"model's own loss is higher by {jump.ours} nats",
            f"score with --max_length {jump.position}, and train the next model on rows that fill the window",
        )
    if unlearned:
        (end,), cost = tables["ends"], 0.0
        if tables["starts"]:
            first, (later,) = tables["starts"][0], tables["start_cost"]
            cost = first.difference.value + later.difference.value * (later.tokens // later.documents)
        yield Cause(
            "a separator that was not learned",
            cost / window,
            f"At the end of documents, the loss on the separator is {end.ours:.1f} nats (baseline: {end.theirs:.1f})",
            "put a separator before every document (--separator before) and do not mask its label",
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
    # Judge the use of context on the reference domain if it has passages. Never use unfamiliar text, because a model
    # uses context less there.
    unfamiliar = [bucket.label for bucket in foreign]
    telling = [gain for gain in _judged(tables["gain"]) if gain.theirs > NATS and gain.label not in unfamiliar]
    telling = [gain for gain in telling if gain.label == reference.label] or telling
    # Context is unused if the model gains too little from it, by more than it lacks on the last sentence alone.
    lacks = {bucket.label: -bucket.difference.value for bucket in tables["sentence"]}
    losses = [Estimate(-gain.difference.value, gain.difference.stderr) for gain in telling]
    bounds = [max(NATS, UNUSED * gain.theirs, lacks[gain.label]) for gain in telling]
    unused = [gain for gain, loss, bound in zip(telling, losses, bounds, strict=True) if loss.exceeds(bound)]
    if unused:
        shown = [f"{its.ours:.2f} nats on {its.label} (baseline: {its.theirs:.2f})" for its in unused]
        yield Cause(
            "context that is not used",
            min(everywhere, max(-gain.difference.value for gain in unused)),
            f"The text before the last sentence raises the last word's log-probability by {', '.join(shown)}",
            "check that rows contain uncut documents. If they do, train longer: the use of context is learned late",
        )
    if foreign:
        listed = ", ".join(f"{bucket.label} by {bucket.difference} nats" for bucket in foreign)
        yield Cause(
            "the text that it was trained on",
            max(bucket.difference.value for bucket in foreign) - everywhere,
            f"The model is worse on {listed}, but on {reference.label} the difference is {reference.difference} nats",
            "train on such text, too, or on text like the baseline's. Longer training on the same text helps less",
        )


def _not_judged(tables: Tables) -> list[str]:
    """Return the measurements that have too few documents or domains for a conclusion.

    Each returned string has the name of a measurement and the number needed, such as "domains (1 usable, 2 needed)".
    """
    documents = {bucket.label: bucket.documents for bucket in tables["domains"]}
    for what, table in (("positions", "positions"), ("the separator", "ends"), ("the use of context", "gain")):
        documents[what] = max((bucket.documents for bucket in tables[table]), default=0)
    few = [f"{what} ({count} documents, {FEWEST} needed)" for what, count in documents.items() if count < FEWEST]
    domains = len(_judged(tables["domains"]))
    return few if domains > 1 else [*few, f"domains ({domains} usable, 2 needed)"]


def _conclude(causes: Sequence[Cause], not_judged: Sequence[str]) -> str:
    sentences = []
    for cause in causes:
        kind = "Likely cause" if cause.nats >= NATS else "A defect that costs little"
        sentences.append(f"{kind}: {cause.name}. {cause.evidence}. To fix this: {cause.remedy}.")
    if not causes:
        sentences.append(
            "No cause stands out. Token count, learning rate, dropout and batch size affect all text alike, so "
            "this command cannot tell which of them is the cause. "
            f"To list the fields in which two recipes differ, run train.py RUN/{RECIPE} --diff_recipe RECIPE."
        )
    if not_judged:
        sentences.append(f"Not judged: {'; '.join(not_judged)}.")
    return " ".join(sentences)


def _finite(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Convert pairs of name and value to a dictionary for JSON, with infinity as None."""
    return {name: None if value == math.inf else value for name, value in pairs}
