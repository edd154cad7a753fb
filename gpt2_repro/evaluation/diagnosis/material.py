"""What both models read for a diagnosis, and what is measured and concluded from their scores."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.evaluation.diagnosis.causes import conclude, is_unlearned, reference_of
from gpt2_repro.evaluation.diagnosis.positions import find_jump, position_edges
from gpt2_repro.evaluation.diagnosis.probes import LastWords, last_words, separator, start_token
from gpt2_repro.evaluation.diagnosis.profiles import by_domain, by_frequency, by_position, join
from gpt2_repro.evaluation.diagnosis.scoring import RowScore
from gpt2_repro.evaluation.diagnosis.texts import (
    EDGE_TOKENS,
    MAX_EDGES,
    MAX_PASSAGES,
    PASSAGE_TOKENS,
    Domain,
    Ids,
    Question,
    Sample,
    ask,
    draw_sample,
    first_tokens,
    last_tokens,
    split_passage,
)
from gpt2_repro.evaluation.documents import evenly


@dataclasses.dataclass(frozen=True)
class Material:
    """All that is scored.

    Args:
        starts: the first ids of documents, all of one length.
        ends: the last ids of documents, the separator included.
        start_id: the token that lm-evaluation-harness starts a document with; None where the tokenizer has none.
        separator: the token that stands between documents in training rows, at the end of `ends`.
        questions: by the name of their passages, each whole and with its last sentence alone.
    """

    sample: Sample
    starts: Sequence[Ids]
    ends: Sequence[Ids]
    start_id: int | None
    separator: int | None
    questions: Mapping[str, Sequence[tuple[Question, Question]]]

    @classmethod
    def gather(cls, domains: Sequence[Domain], tokenizer: Any, *, window: int, tokens: int) -> "Material":
        """About `tokens` targets of each domain in rows of the window, at starts and ends of documents, in questions."""
        separator, start = tokenizer.eos_token_id, tokenizer.bos_token_id
        edges, passages = min(MAX_EDGES, tokens // EDGE_TOKENS), min(MAX_PASSAGES, tokens // PASSAGE_TOKENS)
        questions = {
            domain.name: [
                ask(passage, tokenizer, window)
                for text in evenly(domain.passages, passages)
                if (passage := split_passage(text)) is not None
            ]
            for domain in domains
        }
        return cls(
            draw_sample(domains, window=window, tokens=tokens),
            [ids for domain in domains for ids in first_tokens(domain.starts, edges, window)],
            [ids for domain in domains for ids in last_tokens(domain.ends, edges, window)],
            separator if start is None else start,
            separator,
            {name: asked for name, asked in questions.items() if asked},
        )

    def rows(self) -> list[Ids]:
        """The rows to score, part after part."""
        return list(itertools.chain(*self._parts()))

    def _parts(self) -> list[list[Ids]]:
        with_start = [] if self.start_id is None else [np.insert(ids, 0, self.start_id) for ids in self.starts]
        without = [] if self.start_id is None else list(self.starts)
        asked = [question.ids for pairs in self.questions.values() for pair in pairs for question in pair]
        return [self.sample.rows, with_start, without, list(self.ends), asked]

    def divide(self, scores: Sequence[RowScore]) -> Iterator[Sequence[RowScore]]:
        """The scores of `rows()` by part."""
        rest = iter(scores)
        for part in self._parts():
            yield list(itertools.islice(rest, len(part)))


def measure(
    material: Material,
    ours: Sequence[RowScore],
    theirs: Sequence[RowScore],
    *,
    window: int,
    home: str | None,
    counts: NDArray[np.int64] | None,
) -> dict[str, Any]:
    """The tables and the conclusion of a diagnosis.json.

    Args:
        ours, theirs: what the model and the baseline have on `material.rows()`.
        home: the domain that the model was trained on, where one of them is.
        counts: how often each id stands in its training text [vocabulary]; None counts the sample.
    """
    (
        (our_rows, our_with, our_without, our_ends, our_words),
        (their_rows, their_with, their_without, their_ends, their_words),
    ) = (material.divide(scores) for scores in (ours, theirs))
    targets = join(material.sample, our_rows, their_rows, separator=material.separator)
    edges = position_edges(window)
    full = targets.where(np.bincount(targets.row)[targets.row] == window)
    jump = find_jump(full, edges)
    start = start_token(our_with, our_without, their_with, their_without) if our_with else None
    ends = separator(our_ends, their_ends) if our_ends else None
    # One defect is kept out of what the next ones are told by.
    sound = targets.where(targets.position < (jump.position if jump else window))
    reference = reference_of(by_domain(sound), home)
    if is_unlearned(ends, start, max(reference.difference.value, 0.0) if reference else 0.0):
        sound = sound.where((sound.token != material.separator) & ~sound.spoiled)
    words = _last_words(material, our_words, their_words, jump.position if jump else window)
    domains = by_domain(sound)
    findings = conclude(
        jump=jump,
        full_documents=len(np.unique(full.document)),
        domains=domains,
        home=home,
        start=start,
        ends=ends,
        words=words,
        window=window,
    )
    measured = {
        "domains": domains,
        "positions": by_position(full, edges),
        "frequencies": by_frequency(sound, np.bincount(targets.token) if counts is None else counts),
        "start_token": start,
        "separator": ends,
        "last_words": words,
        "jump": jump,
        "causes": findings.causes,
        "not_judged": findings.not_judged,
    }
    return {name: _plain(value) for name, value in measured.items()} | {"conclusion": findings.paragraph}


def _last_words(
    material: Material, ours: Sequence[RowScore], theirs: Sequence[RowScore], longest: int
) -> list[LastWords]:
    """Of the passages that end before the position `longest`."""
    found, place = [], 0
    for name, pairs in material.questions.items():
        kept = [number for number, (whole, _) in enumerate(pairs) if len(whole.ids) - 1 <= longest]
        scores = [
            [score for number in kept for score in of_model[place + 2 * number : place + 2 * number + 2]]
            for of_model in (ours, theirs)
        ]
        if kept:
            found.append(last_words(name, [pairs[number] for number in kept], *scores))
        place += 2 * len(pairs)
    return found


def _plain(value: Any) -> Any:
    """As JSON has it: no dataclasses, and null for an error that is not known."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
