"""The tokens that both models of a diagnosis are scored on."""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.evaluation.documents import cut_passages, evenly


Ids = NDArray[np.integer[Any]]
EDGE_TOKENS = 64  # of a document: what comes after its start, and before its end
MAX_EDGES = 500  # documents of a domain
MAX_PASSAGES = 1000
PASSAGE_TOKENS = 100  # of one with its last sentence once more, about
# A full stop, what may close behind it, and a space.
SENTENCE_END = re.compile(r"[.?!…][\"'”’`)\]]*\s+")


@dataclasses.dataclass(frozen=True)
class Domain:
    """Text of one kind.

    Args:
        documents: ids to score; of packed rows each row is one.
        starts: ids that begin a document, without what separates it from the one before.
        ends: ids that end a document, the separator behind them included.
        passages: text in LAMBADA's form, each ending in a word to guess.
    """

    name: str
    documents: list[Ids]
    starts: list[Ids]
    ends: list[Ids]
    passages: list[str]


@dataclasses.dataclass(frozen=True)
class Sample:
    """Rows to score: every id of a row is a target but its first.

    Args:
        rows: ids, at most one more than the window each.
        domain: of each row, an index of `names` [rows].
        document: of each row what it was cut from [rows]; rows of one document are no independent evidence.
    """

    names: list[str]
    rows: list[Ids]
    domain: NDArray[np.int64]
    document: NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Passage:
    """A passage in LAMBADA's form: what stands before its last sentence, that sentence, and the word that ends it."""

    before: str
    sentence: str
    word: str


@dataclasses.dataclass(frozen=True)
class Question:
    """Ids whose last `targets` are the answer."""

    ids: Ids
    targets: int


def draw_sample(domains: Sequence[Domain], *, window: int, tokens: int) -> Sample:
    """About `tokens` targets of each domain, in rows spread evenly over its documents.

    A document of more than `window` targets gives several rows; each begins with the id that the one before ended with.
    """
    rows, of_domain, of_document, before = [], [], [], 0
    for number, domain in enumerate(domains):
        cut = [(index, row) for index, ids in enumerate(domain.documents) for row in _cut(ids, window)]
        targets = sum(len(row) - 1 for _, row in cut)
        chosen = evenly(cut, -(-len(cut) * tokens // targets)) if targets else []
        rows += [row for _, row in chosen]
        of_domain += [number] * len(chosen)
        of_document += [before + index for index, _ in chosen]
        before += len(domain.documents)
    names = [domain.name for domain in domains]
    return Sample(names, rows, np.array(of_domain, np.int64), np.array(of_document, np.int64))


def _cut(ids: Ids, window: int) -> list[Ids]:
    return [ids[start : start + window + 1] for start in range(0, len(ids) - 1, window)]


def of_documents(name: str, texts: Sequence[str], tokenizer: Any, *, separator: int | None) -> Domain:
    """The domain of whole documents; `separator` is what the tokenizer would put between them."""
    documents = _encode(texts, tokenizer)
    ends = [np.append(ids, separator) for ids in documents] if separator is not None else []
    return Domain(name, documents, documents, ends, passages=[])


def of_passages(name: str, texts: Sequence[str], tokenizer: Any) -> Domain:
    """The domain of passages that end in a word to guess: excerpts, whose ends and starts are no document's."""
    return Domain(name, _encode(texts, tokenizer), starts=[], ends=[], passages=list(texts))


def of_rows(name: str, rows: Sequence[Ids], tokenizer: Any, *, separator: int | None) -> Domain:
    """The domain of packed rows, in which `separator` stands between documents; None where nothing does."""
    pieces, starts, ends = [], [], []
    for row in rows:
        places = np.flatnonzero(row == separator) if separator is not None else np.empty(0, np.int64)
        edges = [0, *places.tolist(), len(row)]
        pieces += [row[start:end] for start, end in itertools.pairwise(edges)]
        starts += [row[start + 1 : end] for start, end in itertools.pairwise(edges[1:])]
        ends += [row[start : end + 1] for start, end in itertools.pairwise(edges[:-1])]
    texts = [tokenizer.decode(piece, clean_up_tokenization_spaces=False) for piece in pieces]
    # A row may begin and end inside a word.
    whole_words = [" ".join(text.split()[1:-1]) for text in texts]
    return Domain(name, list(rows), starts, ends, cut_passages(whole_words, MAX_PASSAGES))


def _encode(texts: Sequence[str], tokenizer: Any) -> list[Ids]:
    # A text longer than the model's window is cut into rows; the tokenizer would warn of it.
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)
    return [np.array(ids, np.int64) for ids in encoded["input_ids"]]


def first_tokens(starts: Sequence[Ids], most: int, window: int) -> list[Ids]:
    """The first ids of at most so many documents, as many of each; of those that are long enough."""
    count = min(EDGE_TOKENS, window - 1)
    return [ids[:count] for ids in evenly([ids for ids in starts if len(ids) >= count], most)]


def last_tokens(ends: Sequence[Ids], most: int, window: int) -> list[Ids]:
    """The last ids of at most so many documents; of those that are long enough to tell an end."""
    count = min(EDGE_TOKENS, window)
    return [ids[-count:] for ids in evenly([ids for ids in ends if len(ids) >= count], most)]


def split_passage(text: str) -> Passage | None:
    """Its parts. None where it is one sentence, or its last one is one word."""
    context, _, word = text.strip().rpartition(" ")
    end = max((match.end() for match in SENTENCE_END.finditer(context)), default=0)
    return Passage(context[:end], context[end:], word) if end and context[end:].strip() else None


def ask(passage: Passage, tokenizer: Any, window: int) -> tuple[Question, Question]:
    """The word after the whole passage, and after its last sentence alone.

    Encoded as lm-evaluation-harness does: all in one, and what the text before does not have is the answer.
    """
    whole, alone = (
        _question(tokenizer, before, passage.word, window)
        for before in (passage.before + passage.sentence, passage.sentence)
    )
    return whole, alone


def _question(tokenizer: Any, before: str, word: str, window: int) -> Question:
    ids = tokenizer.encode(f"{before} {word}", add_special_tokens=False, verbose=False)
    targets = len(ids) - len(tokenizer.encode(before, add_special_tokens=False, verbose=False))
    return Question(np.array(ids[-window - 1 :], np.int64), max(1, targets))
