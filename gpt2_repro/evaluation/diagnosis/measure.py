"""The tables and the conclusion of a diagnosis, from two models' losses on the same rows."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.evaluation.diagnosis.causes import conclude, is_unlearned, reference_of
from gpt2_repro.evaluation.diagnosis.profiles import (
    Bucket,
    buckets,
    by_frequency,
    by_place,
    find_jump,
    join,
    position_edges,
    records,
)
from gpt2_repro.evaluation.diagnosis.texts import EDGE_TOKENS, Losses, Row


def measure(
    parts: Mapping[str, Sequence[Row]],
    losses: Sequence[Mapping[str, Losses]],
    *,
    names: Sequence[str],
    window: int,
    separator: int | None,
    home: str | None,
    counts: NDArray[np.int64] | None,
) -> dict[str, Any]:
    """Return what diagnosis.json has besides settings.

    Args:
        losses: of both models, by part.
        names: of the domains.
        separator: the id between documents of training rows.
        home: the domain that the model was trained on, if it is among them.
        counts: of each id in the training text [vocabulary]; None counts the sample.
    """
    targets = join(parts["text"], *(its["text"] for its in losses), separator=separator)
    edges = position_edges(window)
    full = targets[np.bincount(targets.row)[targets.row] == window]
    jump = find_jump(full, edges)
    trained = jump.position if jump else window
    # Each defect that was found is kept out of the tables by which the next ones are judged.
    sound = targets[targets.position < trained]
    tables = {
        "positions": by_place(full, full.position, edges),
        **_document_edges(losses),
        **_last_words(parts["words"], [its["words"] for its in losses], names=names, longest=trained),
    }
    if is_unlearned(tables["ends"], reference_of(buckets(sound, sound.domain, names), home)):
        sound = sound[(sound.token != separator) & ~sound.spoiled]
    tables["domains"] = buckets(sound, sound.domain, names)
    tables["frequencies"] = by_frequency(sound, np.bincount(targets.token) if counts is None else counts)
    causes, not_judged, conclusion = conclude(tables, jump, home=home, window=window)
    found: dict[str, Sequence[Any]] = {**tables, "jump": [jump] if jump else [], "causes": causes}
    return {
        **{name: [dataclasses.asdict(one, dict_factory=_finite) for one in its] for name, its in found.items()},
        "not_judged": not_judged,
        "conclusion": conclusion,
    }


def _document_edges(losses: Sequence[Mapping[str, Losses]]) -> dict[str, list[Bucket]]:
    """Return the losses on the separator, on a document's first ids after a start token and without it."""
    ends = _pairs(np.array([[of_row[-1] for of_row in its["ends"]] for its in losses], np.float64))
    tables = {"ends": buckets(ends, np.zeros(len(ends)), ["the separator"])}
    started, bare = (np.array([its[part] for its in losses], np.float64) for part in ("starts", "bare"))
    if not started.size:
        return tables | {"starts": [], "bare": [], "start_cost": []}
    _, documents, count = started.shape
    places = np.tile(np.arange(1, count + 1), (documents, 1))
    edges = [2**power for power in range(EDGE_TOKENS.bit_length()) if 2**power <= count] + [count + 1]
    cost = _pairs(started[:, :, 1:] - bare)
    return tables | {
        "starts": by_place(_pairs(started), places.ravel(), edges),
        "bare": by_place(_pairs(bare), places[:, 1:].ravel(), edges),
        "start_cost": buckets(cost, np.zeros(len(cost)), ["all but the first"]),
    }


def _last_words(
    rows: Sequence[Row], losses: Sequence[Losses], *, names: Sequence[str], longest: int
) -> dict[str, list[Bucket]]:
    """Return the log-probabilities of last words, of the passages that end before the position `longest`."""
    words = np.array(
        [[-of_row[-row.targets :].sum() for row, of_row in zip(rows, its, strict=True)] for its in losses]
    )
    kept = [number for number in range(0, len(rows), 2) if len(rows[number].ids) - 1 <= longest]
    whole, sentence = words[:, kept], words[:, [number + 1 for number in kept]]
    domain = np.array([rows[number].domain for number in kept])
    scores = {"whole": whole, "sentence": sentence, "gain": whole - sentence}
    return {name: buckets(_pairs(values), domain, names) for name, values in scores.items()}


def _pairs(losses: NDArray[np.floating[Any]]) -> Any:
    """Return losses [models, documents] or [models, documents, places] as `buckets` takes them."""
    ours, theirs = (values.ravel() for values in losses)
    document = np.repeat(np.arange(len(losses[0])), losses[0].size // max(1, len(losses[0])))
    return records(ours=ours, theirs=theirs, document=document)


def _finite(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dataclass's fields as JSON has them: null for a standard error that is not known."""
    return {name: None if value == math.inf else value for name, value in pairs}
