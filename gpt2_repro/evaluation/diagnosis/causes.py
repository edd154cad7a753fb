"""From two models' losses to what the difference is likely to come from, or to the finding that nothing stands out."""

import dataclasses
from collections.abc import Sequence

from gpt2_repro.evaluation.diagnosis.positions import ERRORS, NATS, Jump
from gpt2_repro.evaluation.diagnosis.probes import LastWords, Separator, StartToken
from gpt2_repro.evaluation.diagnosis.profiles import Bucket, Estimate
from gpt2_repro.evaluation.statistics import FEWEST


UNUSED = 0.25  # parts of what the context is worth to the baseline
UNLEARNED = 3.0  # nats on the separator at a document's end: a twentieth of the baseline's probability
EXCESS = 0.5  # by which a domain's difference exceeds the home's, in parts of the home's, before it stands out


@dataclasses.dataclass(frozen=True)
class Cause:
    """A cause that the losses speak for: what it is, what shows it, what would mend it.

    Args:
        nats: about what it costs on a token of a row of text; of context at most what the model lacks everywhere.
    """

    name: str
    nats: float
    evidence: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Findings:
    """What the measurements say.

    Args:
        causes: the costliest first; empty where none stands out.
        not_judged: what could not be looked at, with the reason.
    """

    causes: list[Cause]
    not_judged: list[str]
    paragraph: str


def conclude(
    *,
    jump: Jump | None,
    full_documents: int,
    domains: Sequence[Bucket],
    home: str | None,
    start: StartToken | None,
    ends: Separator | None,
    words: Sequence[LastWords],
    window: int,
) -> Findings:
    """Weigh the measurements.

    Args:
        jump: what `find_jump` found in rows of so many documents that fill the window.
        domains: the losses, without what the jump and an unlearned separator did to them.
        home: the domain that the model was trained on, where one of them is.
    """
    not_judged = [
        f"{bucket.label} ({bucket.documents} documents, {FEWEST} would do)"
        for bucket in domains
        if bucket.documents < FEWEST
    ]
    if full_documents < FEWEST:
        not_judged.append(f"positions ({full_documents} documents fill the window, {FEWEST} would do)")
    if ends is None or ends.documents < FEWEST:
        not_judged.append(f"the separator (it takes a tokenizer that has one, and the ends of {FEWEST} documents)")
    asked = [one for one in words if one.passages >= FEWEST]
    if not asked:
        not_judged.append(f"the use of context (it takes {FEWEST} passages)")
    judged = [bucket for bucket in domains if bucket.documents >= FEWEST]
    if len(judged) < 2:
        not_judged.append(f"domains (it takes two of {FEWEST} documents or more)")
    reference = reference_of(domains, home)
    everywhere = max(reference.difference.value, 0.0) if reference else 0.0

    causes = []
    if jump is not None and full_documents >= FEWEST:
        causes.append(_untrained_positions(jump, window))
    if is_unlearned(ends, start, everywhere):
        causes.append(_unlearned_separator(ends, start, window))
    foreign = [bucket for bucket in judged if reference is not None and _stands_out(bucket, reference)]
    # On text that it does not know a model makes less of the context too.
    unknown = {bucket.label for bucket in foreign}
    telling = [one for one in asked if one.gain[1] > NATS and one.name not in unknown]
    at_home = [one for one in telling if reference is not None and one.name == reference.label]
    if unused := [one for one in at_home or telling if _context_unused(one)]:
        causes.append(_unused_context(unused, everywhere))
    if reference is not None and foreign:
        causes.append(_foreign_domains(foreign, reference, [] if unused else at_home))
    causes.sort(key=lambda cause: -cause.nats)
    return Findings(causes, not_judged, _paragraph(causes, not_judged, judged))


def reference_of(domains: Sequence[Bucket], home: str | None) -> Bucket | None:
    """The domain that the others are measured by: the model's home, or the one that it is best on beside the baseline."""
    judged = [bucket for bucket in domains if bucket.documents >= FEWEST]
    at_home = next((bucket for bucket in judged if bucket.label == home), None)
    return at_home or min(judged, key=lambda bucket: bucket.difference.value, default=None)


def _untrained_positions(jump: Jump, window: int) -> Cause:
    return Cause(
        "untrained positions",
        jump.difference.value * (window - jump.position) / window,
        f"from position {jump.position:,} on the difference is {_nats(jump.difference)} larger than before it, and the "
        f"model's own loss rises by {jump.ours.value:.2f} nats there where the baseline's changes by {_change(jump.theirs.value)}. "
        "More context lowers the loss of a model that was trained at these positions",
        f"score it with --max_length {jump.position}, and train the next one with rows that reach the last position",
    )


def is_unlearned(ends: Separator | None, start: StartToken | None, everywhere: float) -> bool:
    """Whether the model does not expect a separator where the baseline does, or stumbles over one at a document's start.

    Args:
        everywhere: nats by which the model is worse on any token.
    """
    unexpected = (
        ends is not None
        and ends.documents >= FEWEST
        and ends.difference.exceeds(everywhere + UNLEARNED, errors=ERRORS)
    )
    hurts = start is not None and start.documents >= FEWEST and start.difference.exceeds(NATS, errors=ERRORS)
    return unexpected or (hurts and start is not None and start.ours.exceeds(0, errors=ERRORS))


def _unlearned_separator(ends: Separator | None, start: StartToken | None, window: int) -> Cause:
    shown, cost = [], 0.0
    if ends is not None:
        shown.append(
            f"where documents end, its loss on the separator is {ends.ours.value:.1f} nats and the baseline's "
            f"{ends.theirs.value:.1f}"
        )
    if start is not None:
        first = start.places[0]
        cost = (first.ours - first.theirs + start.difference.value * start.later) / window
        shown.append(
            f"behind one, the first token of a document has {first.ours:.2f} nats beside {first.theirs:.2f}, and the next "
            f"{start.later} change by {_change(start.ours.value)} beside {_change(start.theirs.value)}: {_change(cost)} nats a "
            f"token over a window of {window:,} (lm-evaluation-harness begins each page of wikitext with one)"
        )
    return Cause(
        "a separator that was not learned",
        cost,
        "; ".join(shown),
        "put one in front of every document, --separator before, and leave its label unmasked",
    )


def _context_unused(words: LastWords) -> bool:
    """Whether the earlier text is worth less to the model by more than it lacks on the last sentence alone."""
    lacks = Estimate(-words.gain_difference.value, words.gain_difference.stderr)
    bound = max(NATS, UNUSED * words.gain[1], -words.sentence_difference.value)
    return lacks.exceeds(bound, errors=ERRORS)


def _unused_context(words: Sequence[LastWords], everywhere: float) -> Cause:
    shown = "; ".join(
        f"on {one.name} the text before the last sentence is worth {_two(one.gain[0])} nats to it and {_two(one.gain[1])} to the "
        f"baseline, while from the last sentence alone it is {_compared(-one.sentence_difference.value)}"
        for one in words
    )
    return Cause(
        "context that is not used",
        min(everywhere, -min(one.gain_difference.value for one in words)),
        f"{shown}. What only the domain lacks would lower both",
        "look whether the rows show documents in one piece, for rows that tear or mix them teach that context tells nothing; if "
        "they do, train for longer: it is learned late",
    )


def _stands_out(bucket: Bucket, reference: Bucket) -> bool:
    excess = bucket.difference.minus(reference.difference)
    own = max(reference.difference.value, 0)
    return bucket.difference.exceeds(NATS, errors=ERRORS) and excess.exceeds(max(NATS, EXCESS * own), errors=ERRORS)


def _foreign_domains(foreign: Sequence[Bucket], reference: Bucket, at_home: Sequence[LastWords]) -> Cause:
    listed = ", ".join(f"{bucket.label} by {_nats(bucket.difference)}" for bucket in foreign)
    evidence = f"it is worse on {listed}, while on {reference.label} it is {_compared(reference.difference.value)}"
    for one in at_home:
        if one.gain[0] < (1 - UNUSED) * one.gain[1]:
            continue
        evidence += (
            f". It is not the use of context: on {one.name} the text before the last sentence is worth {_two(one.gain[0])} nats to "
            f"it and {_two(one.gain[1])} to the baseline"
        )
    return Cause(
        "the text that it was trained on",
        max(bucket.difference.value for bucket in foreign) - max(reference.difference.value, 0),
        evidence,
        "mix such text into the training data, or train on the baseline's kind; longer training of the same mends less",
    )


def _paragraph(causes: Sequence[Cause], not_judged: Sequence[str], judged: Sequence[Bucket]) -> str:
    if causes:
        first, *others = causes
        found = "Likely cause" if first.nats >= NATS else "No likely cause, but a defect that costs little"
        text = f"{found}: {first.name}. {_capital(first.evidence)}. To mend it: {first.remedy}."
        for cause in others:
            text += f" Beside it, {cause.name}: {cause.evidence}. To mend it: {cause.remedy}."
    elif not judged:
        text = "No cause stands out, but hardly anything could be judged."
    else:
        text = "No cause stands out."
    if judged:
        text += f" {_everywhere(judged, named=bool(causes))}"
    return f"{text} Not judged: {'; '.join(not_judged)}." if not_judged else text


def _everywhere(judged: Sequence[Bucket], *, named: bool) -> str:
    """The difference on every text, and what it looks like where no cause was named."""
    shown = ", ".join(
        f"{_change(bucket.difference.value)} ± {bucket.difference.stderr:.3f} nats on {bucket.label}"
        for bucket in judged
    )
    values = [bucket.difference.value for bucket in judged]
    if named:
        return f"The difference without that is {shown}." if len(judged) > 1 else f"The difference is {shown}."
    if max(map(abs, values)) < NATS:
        return f"The two models are nearly alike: the difference is {shown}."
    if max(values) < NATS:
        return f"The model is nowhere worse than the baseline: the difference is {shown}."
    if max(values) - min(values) <= max(NATS, EXCESS * min(values)):
        return (
            f"The difference is {shown}, of one size everywhere. That is what acts on all tokens alike: the tokens trained, "
            "learning rate, dropout, batch. train.py with RUN/recipe.yaml and --diff_recipe RECIPE lists what deviates."
        )
    return f"The difference is {shown}."


def _nats(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} ± {estimate.stderr:.3f} nats"


def _two(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


def _change(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _compared(loss_difference: float) -> str:
    if abs(loss_difference) < 0.005:
        return "as good as the baseline"
    return f"{abs(loss_difference):.2f} nats {'worse' if loss_difference > 0 else 'better'} than the baseline"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
