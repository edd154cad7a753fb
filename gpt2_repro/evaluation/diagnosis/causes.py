"""From two models' losses to what the difference is likely to come from, or to the finding that nothing stands out."""

import dataclasses
from collections.abc import Sequence

from gpt2_repro.evaluation.diagnosis.positions import ERRORS, NATS, Jump
from gpt2_repro.evaluation.diagnosis.probes import LastWords, Separator, StartToken
from gpt2_repro.evaluation.diagnosis.profiles import Bucket, Estimate
from gpt2_repro.evaluation.diagnosis.texts import EDGE_TOKENS
from gpt2_repro.evaluation.statistics import FEWEST


UNUSED = 0.25  # parts of what the context is worth to the baseline
UNLEARNED = 3.0  # nats on the separator at a document's end: a twentieth of the baseline's probability
EXCESS = 0.5  # by which a domain's difference exceeds the home's, in parts of the home's, before it stands out


@dataclasses.dataclass(frozen=True)
class Cause:
    """A cause that the losses speak for: what it is, what shows it, what would mend it.

    Args:
        nats: about what it costs on each token that it concerns; of context on each last word.
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
    full_rows: int,
    domains: Sequence[Bucket],
    home: str | None,
    start: StartToken | None,
    ends: Separator | None,
    words: Sequence[LastWords],
    window: int,
) -> Findings:
    """Weigh the measurements.

    Args:
        jump: what `find_jump` found in `full_rows` rows that fill the window.
        domains: the losses on positions before the jump.
        home: the domain that the model was trained on, where one of them is.
    """
    not_judged = []
    if full_rows < FEWEST:
        not_judged.append(f"positions ({full_rows} rows fill the window, {FEWEST} would do)")
    if ends is None or ends.documents < FEWEST:
        not_judged.append(f"the separator (it takes a tokenizer that has one, and the ends of {FEWEST} documents)")
    asked = [one for one in words if one.passages >= FEWEST]
    if not asked:
        not_judged.append(f"the use of context (it takes {FEWEST} passages)")
    judged = [bucket for bucket in domains if bucket.documents >= FEWEST]
    reference = next((bucket for bucket in judged if bucket.label == home), None)
    reference = reference or min(judged, key=lambda bucket: bucket.difference.value, default=None)
    if len(judged) < 2:
        not_judged.append(f"domains (it takes two of {FEWEST} documents or more)")

    causes = []
    if jump is not None and full_rows >= FEWEST:
        causes.append(_untrained_positions(jump))
    if is_unlearned(ends, start):
        causes.append(_unlearned_separator(ends, start, window))
    telling = [one for one in asked if one.gain[1] > NATS]
    at_home = [one for one in telling if reference is not None and one.name == reference.label]
    # On text that it does not know a model makes less of the context too.
    if unused := [one for one in at_home or telling if _context_unused(one)]:
        causes.append(_unused_context(unused))
    if reference is not None and (foreign := [bucket for bucket in judged if _stands_out(bucket, reference)]):
        causes.append(_foreign_domains(foreign, reference, [] if unused else at_home))
    causes.sort(key=lambda cause: -cause.nats)
    return Findings(causes, not_judged, _paragraph(causes, not_judged, judged, reference))


def _untrained_positions(jump: Jump) -> Cause:
    return Cause(
        "untrained positions",
        jump.difference.value,
        f"from position {jump.position:,} on the difference is {_nats(jump.difference)} larger than before it, and the "
        f"model's own loss rises by {jump.ours.value:.2f} nats there where the baseline's changes by {_change(jump.theirs.value)}. "
        "More context lowers the loss of a model that was trained at these positions",
        f"score it with --max_length {jump.position}, and train the next one with rows that reach the last position",
    )


def is_unlearned(ends: Separator | None, start: StartToken | None) -> bool:
    """Whether the model does not expect a separator where the baseline does, or stumbles over one at a document's start."""
    unexpected = ends is not None and ends.documents >= FEWEST and ends.difference.exceeds(UNLEARNED, errors=ERRORS)
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
        cost = (first.ours - first.theirs + start.difference.value * EDGE_TOKENS) / window
        shown.append(
            f"behind it, as lm-evaluation-harness begins each page of wikitext, the first token has {first.ours:.2f} nats beside "
            f"{first.theirs:.2f}, and the next ones change by {_change(start.ours.value)} beside "
            f"{_change(start.theirs.value)}: {cost:.3f} nats a token over a window of {window:,}"
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


def _unused_context(words: Sequence[LastWords]) -> Cause:
    shown = "; ".join(
        f"on {one.name} the text before the last sentence is worth {_two(one.gain[0])} nats to it and {_two(one.gain[1])} to the "
        f"baseline, while from the last sentence alone it is {_compared(-one.sentence_difference.value)}"
        for one in words
    )
    return Cause(
        "context that is not used",
        -min(one.gain_difference.value for one in words),
        f"{shown}. What only the domain lacks would lower both",
        "train on rows that keep documents in one piece: longer ones, no windows cut from single sentences, no rows that mix text",
    )


def _stands_out(bucket: Bucket, reference: Bucket) -> bool:
    excess = bucket.difference.minus(reference.difference)
    own = max(reference.difference.value, 0)
    return bucket.difference.exceeds(0, errors=2) and excess.exceeds(max(NATS, EXCESS * own), errors=ERRORS)


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
        max(bucket.difference.value for bucket in foreign) - reference.difference.value,
        evidence,
        "mix such text into the training data, or train on the baseline's kind; longer training of the same mends less",
    )


def _paragraph(
    causes: Sequence[Cause], not_judged: Sequence[str], judged: Sequence[Bucket], reference: Bucket | None
) -> str:
    if causes:
        first, *others = causes
        found = "Likely cause" if first.nats >= NATS else "No likely cause, but a defect that costs little"
        text = f"{found}: {first.name}. {_capital(first.evidence)}. To mend it: {first.remedy}."
        for cause in others:
            text += f" Beside it, {cause.name}: {cause.evidence}. To mend it: {cause.remedy}."
    elif reference is None:
        text = "No cause stands out, but hardly anything could be judged."
    else:
        text = f"No cause stands out. {_everywhere(judged)}"
    return f"{text} Not judged: {'; '.join(not_judged)}." if not_judged else text


def _everywhere(judged: Sequence[Bucket]) -> str:
    shown = ", ".join(
        f"{_change(bucket.difference.value)} ± {bucket.difference.stderr:.3f} nats on {bucket.label}"
        for bucket in judged
    )
    if all(abs(bucket.difference.value) < NATS for bucket in judged):
        return f"The two models are nearly alike: the difference is {shown}."
    if all(bucket.difference.value < 0 for bucket in judged):
        return f"The model is better than the baseline everywhere: the difference is {shown}."
    return (
        f"The difference is {shown}, of one size everywhere. That is what acts on all tokens alike: the tokens trained, "
        "learning rate, dropout, batch. train.py with RUN/recipe.yaml and --diff_recipe RECIPE lists what deviates."
    )


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
