"""Find the documents of evaluation tasks that share a run of tokens with training data."""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.cli import Progress
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.comparison import CLEAN
from gpt2_repro.evaluation.scores import Metric, document_of
from gpt2_repro.evaluation.tasks import TaskFiles, load_task
from gpt2_repro.run_record import RunRecord
from gpt2_repro.tokenization import encode


LENGTH = 13  # tokens, as GPT-3's overlaps have 13 words (arXiv:2005.14165, appendix C)
# Bytes of text in a run, at least: 13 tokens of GPT-2's tokenizer in English. 13 tokens of a vocabulary of 500 ids are
# five words, which many texts share.
RUN_BYTES = 52
FACTOR = 0x9E3779B97F4A7C15  # odd; the hash of a run is a polynomial of it, modulo 2**64
BITS = 26  # of a hash; with them, a table finds the few training hashes that may be wanted
PIECE = 1 << 14  # training tokens that are hashed at once, so that they stay in the processor's cache
Hashes = NDArray[np.uint64]
NONE = np.empty(0, np.uint64)


def training_data(run_directory: Path | None) -> PreparedData:
    """Return the prepared folder that a run was trained on. Raises UserError if it is unknown, damaged or replaced."""
    problem = "--check_overlap needs a run and its prepared folder. Pass a run directory, or leave it out."
    if run_directory is None:
        raise UserError(problem)
    run = RunRecord(run_directory)
    section = run.recipe().get("data", {})
    folder = section.get("dataset_dir")
    if not folder:
        raise UserError(problem)
    prepared = PreparedData.read(folder)
    trained = run.environment().data.get("sha256")
    if trained and trained != prepared.manifest.sha256:
        raise UserError(f"{folder} was prepared again after {run_directory} was trained. Leave out --check_overlap.")
    prepared.check_shards("train")
    prepared.check_tokenizer()
    return prepared


def overlapping_documents(prepared: PreparedData, tasks: TaskFiles) -> set[str]:
    """Return the hashes of the documents of tasks that share text with training rows."""
    texts: dict[str, list[str]] = {}
    for task in tasks.sources:
        texts.update(texts_of(task, tasks.folder))
    ids: dict[str, list[list[int]]] = {}
    for name, texts_of_document in texts.items():
        ids[name] = encode(prepared.tokenizer, texts_of_document)
    return find_overlaps(
        ids,
        prepared.rows("train").pieces(),
        length=run_length(texts, ids),
        total=prepared.manifest.counts["train"].row_tokens,
    )


def run_length(texts: Mapping[str, Sequence[str]], ids: Mapping[str, Sequence[Sequence[int]]]) -> int:
    """Return the tokens of a run: LENGTH, or more if these have fewer than RUN_BYTES bytes of the texts on average."""
    num_bytes = 0
    for texts_of_document in texts.values():
        for text in texts_of_document:
            num_bytes += len(text.encode())
    tokens = 0
    for ids_of_document in ids.values():
        for ids_of_text in ids_of_document:
            tokens += len(ids_of_text)
    length = math.ceil(RUN_BYTES * tokens / max(1, num_bytes))
    return max(LENGTH, length)


def texts_of(task: str, folder: Path) -> dict[str, list[str]]:
    """Return the texts of each document of a task without its few-shot examples, by the hash of the document."""
    from lm_eval.utils import handle_non_serializable, hash_string

    texts: dict[str, list[str]] = {}
    for loaded in load_task(task, folder):
        loaded.build_all_requests()
        for request in loaded.instances:
            text = json.dumps(request.doc, indent=2, default=handle_non_serializable, ensure_ascii=False)
            name = hash_string(text)  # as in lm_eval/evaluator.py (0.4.13)
            texts_of_document = texts.setdefault(name, [])
            examples = request.doc.get("shown", "")  # see core.rows_of
            whole_text = "".join(request.args)
            texts_of_document.append(whole_text.removeprefix(examples))
    return texts


def add_clean(metrics: Sequence[Metric], flagged: Collection[str]) -> list[Metric]:
    """Add the scores on the documents that are not in `flagged`, after each metric with such documents."""
    result: list[Metric] = []
    for metric in metrics:
        result.append(metric)
        if not metric.aggregation:
            continue
        values: list[Any] = []
        documents: list[str] = []
        for value, name in zip(metric.values, metric.documents, strict=True):
            if document_of(name) not in flagged:
                values.append(value)
                documents.append(name)
        if 0 < len(values) < len(metric.values):
            result.append(metric.over(values, documents, name=metric.name + CLEAN))
    return result


def hashes_of(ids: NDArray[Any], length: int) -> Hashes:
    """Return the hash of each run of `length` ids, of shape [len(ids) - length + 1]."""
    count = len(ids) - length + 1
    if count < 1:
        return NONE
    hashes = np.zeros(count, np.uint64)
    covered = 0  # ids of the run that are in `hashes`
    doubled = ids.astype(np.uint64) + np.uint64(1)  # the hashes of runs of `size` ids
    size = 1
    while True:
        factor = np.uint64(pow(FACTOR, size, 1 << 64))
        is_part_of_length = length & size != 0
        if is_part_of_length:
            end = covered + count
            hashes = hashes * factor + doubled[covered:end]
            covered += size
        if 2 * size > length:
            return hashes
        before = doubled[:-size]
        after = doubled[size:]
        doubled = before * factor + after
        size *= 2


def find_overlaps(
    documents: Mapping[str, Sequence[Sequence[int]]],
    rows: Iterable[NDArray[Any]],
    *,
    length: int = LENGTH,
    total: int | None = None,
) -> set[str]:
    """Return the names of the documents with a run of `length` ids that also occurs in training rows.

    Args:
        documents: for each document, the ids of its texts.
        rows: consecutive arrays of training ids, one in memory at a time.
        total: the number of training ids, for the progress bar.
    """
    names: list[str] = []  # of the document of each text
    hashes_of_texts: list[Hashes] = []
    for name, texts in documents.items():
        for ids in texts:
            names.append(name)
            hashes_of_texts.append(hashes_of(np.asarray(ids), length))
    all_hashes = np.concatenate([NONE, *hashes_of_texts])
    wanted = WantedHashes(all_hashes)
    margin = length - 1  # ids of a run after the first one
    with Progress(desc="overlap with the training data", unit="token", total=total, unit_scale=True) as bar:
        end = np.empty(0, np.uint16)  # of the array before, as a run may begin there
        for array in rows:
            trained = np.concatenate([end, array])
            end = trained[-margin:]
            for start in range(0, len(trained), PIECE):
                stop = start + PIECE + margin
                piece = trained[start:stop]
                wanted.mark(hashes_of(piece, length))
            bar.update(len(array))
    found: set[str] = set()
    is_seen = wanted.is_seen()
    start = 0
    for name, hashes in zip(names, hashes_of_texts, strict=True):
        stop = start + len(hashes)
        if is_seen[start:stop].any():
            found.add(name)
        start = stop
    return found


class WantedHashes:
    """Hashes of runs, and which of them were seen in training data."""

    def __init__(self, hashes: Hashes) -> None:
        unique, numbers = np.unique(hashes, return_inverse=True)
        self._unique = unique
        self._numbers = numbers  # of each hash in `unique`
        self._seen = np.zeros(len(unique), bool)
        self._table = np.zeros(1 << BITS, bool)
        self._table[_slot(unique)] = True

    def mark(self, hashes: Hashes) -> None:
        """Mark the wanted hashes that are among `hashes` as seen."""
        may_be_wanted = self._table[_slot(hashes)]
        candidates = hashes[may_be_wanted]
        nearest = np.searchsorted(self._unique, candidates, side="right") - 1  # at most; -1 is never equal
        is_equal = self._unique[nearest] == candidates
        found = nearest[is_equal]
        self._seen[found] = True

    def is_seen(self) -> NDArray[np.bool_]:
        """Return for each hash whether it was seen."""
        return self._seen[self._numbers]


def _slot(hashes: Hashes) -> NDArray[np.int64]:
    leading_bits = hashes >> np.uint64(64 - BITS)
    return leading_bits.astype(np.int64)
