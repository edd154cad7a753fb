"""Compute the losses of two models on the same tokens, and average them over groups of tokens, for `diagnose`."""

import itertools
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.cli import Progress
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.passages import evenly
from gpt2_repro.evaluation.tasks import fetch_data, load_task, write_task_files
from gpt2_repro.launchers import EVALUATE
from gpt2_repro.tokenization import encode, is_same, start_id


Ids = NDArray[np.integer[Any]]
Counts = NDArray[np.int64]  # occurrences of each token id [vocabulary]
Losses = list[NDArray[np.float32]]  # for each row: the losses of all ids but the first, in nats
COUNTED_TOKENS = 10_000_000  # training tokens that are counted for the token frequencies
POSITIONS = 4096  # per forward pass, with padding; logits and softmax of GPT-2's vocabulary take 1.6 GB
TASKS = {"lambada_openai": "LAMBADA passages", "wikitext": "wikitext"}  # the names in the tables
AFTER_SEPARATOR = [1, 2, 3, 5, 9, 17, 33, 65]  # edges of ranges of positions; 1 is the first id of a document
# Lower limits of ranges of token frequencies, in occurrences per million tokens.
FREQUENCIES = {0: "under 1", 1: "1 to 10", 10: "10 to 100", 100: "100 to 1,000", 1000: "1,000 and more"}


class Row(NamedTuple):
    """A row of token ids to score."""

    ids: Ids
    domain: int  # index of the kind of text
    document: int  # index. Rows from the same document are not statistically independent


class Bucket(TypedDict):
    """A row of a table: the mean losses of a group of targets, in nats."""

    label: str
    tokens: int
    documents: int
    ours: float
    theirs: float
    difference: "MeanDifference"


class MeanDifference(TypedDict):
    """The mean difference of two losses, with its standard error if there is more than one document."""

    value: float
    stderr: float | None


def check_vocabulary(tokenizer: Any, expected: Any, option: str) -> None:
    """Raise UserError if two tokenizers differ. `option` passed the first one."""
    if not is_same(tokenizer, expected):
        fix = f"Pass a model or data with this tokenizer, or run {EVALUATE}, which compares bits per byte."
        raise UserError(f"{option} does not have the tokenizer of RUN, so losses per token cannot be compared. {fix}")


def read_task(task: str, source: Path | None, tokenizer: Any) -> list[Ids]:
    """Return the ids of LAMBADA's passages or wikitext's pages, processed as in lm-eval.

    A page has the separator on both sides. A passage of LAMBADA is an excerpt of a document.

    Args:
        source: a jsonl file, or None to read from the Hub.

    Raises UserError if the texts cannot be read.
    """
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    with tempfile.TemporaryDirectory(prefix="diagnosis-") as folder:
        write_task_files({task: source}, Path(folder))
        fetch_data({task: source}, Path(folder))
        (loaded,) = load_task(task, Path(folder))
        if task == "wikitext":
            texts = [wikitext_detokenizer(doc) for doc in loaded.eval_docs]
        else:
            texts = [doc["text"] for doc in loaded.eval_docs]
    separator = start_id(tokenizer)
    edge: list[int] = []
    if task == "wikitext" and separator is not None:
        edge = [separator]
    documents: list[Ids] = []
    for ids in encode(tokenizer, texts):
        documents.append(np.array([*edge, *ids, *edge], np.int64))
    return documents


def read_prepared(folder: Path, tokenizer: Any, tokens: int) -> tuple[dict[str, list[Ids]], Counts]:
    """Return the rows of each validation set of a prepared folder, and the count of each id in its training rows."""
    from gpt2_repro.data.prepared import PreparedData

    data = PreparedData.read(folder)
    check_vocabulary(data.tokenizer, tokenizer, f"--dataset_dir {folder}")

    texts: dict[str, list[Ids]] = {}
    for name, rows in data.validation().items():
        texts[f"validation {name or 'text'}"] = _spread(rows, tokens)
    training_ids = np.concatenate(_spread(data.rows("train"), COUNTED_TOKENS))
    return texts, np.bincount(training_ids, minlength=len(tokenizer))


def _spread(rows: Any, tokens: int) -> list[Ids]:
    """Return the ids of rows with about a number of targets, evenly chosen."""
    targets = int((rows.lengths() - 1).sum())
    count = math.ceil(len(rows) * tokens / max(1, targets))
    chosen = evenly(range(len(rows)), count)
    return [row["input_ids"] for row in rows.__getitems__(chosen)]


def cut_rows(texts: Mapping[str, Sequence[Ids]], *, window: int, tokens: int) -> list[Row]:
    """Return rows with about `tokens` targets (ids to predict) of each kind of text, of at most `window` targets."""
    rows: list[Row] = []
    number = 0  # of the document
    for domain, documents in enumerate(texts.values()):
        cut: list[Row] = []
        targets = 0
        for ids in documents:
            for start in range(0, len(ids) - 1, window):
                row = Row(ids[start : start + window + 1], domain, number)
                targets += len(row.ids) - 1
                cut.append(row)
            number += 1
        rows += evenly(cut, math.ceil(len(cut) * tokens / max(1, targets)))
    return rows


def score_rows(model: Any, rows: Sequence[Row], *, device: str, name: str) -> Losses:
    """Return a model's losses on each row. The model is moved to the CPU afterwards."""
    import torch

    from gpt2_repro.evaluation.hellaswag import batches_by_length

    model = model.float().to(device).eval()
    losses: Losses = [np.empty(0, np.float32)] * len(rows)
    batches = batches_by_length([len(row.ids) for row in rows], POSITIONS)
    with torch.inference_mode():
        for numbers in Progress(batches, desc=name):
            # Padding is on the right, so that no position of a row attends to it.
            ids = [torch.from_numpy(rows[number].ids.astype(np.int64)) for number in numbers]
            batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits.float()
            targets = batch[:, 1:]
            flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            padded_losses = flat.view(len(ids), -1).cpu().numpy()
            for number, row_losses in zip(numbers, padded_losses, strict=True):
                losses[number] = row_losses[: len(rows[number].ids) - 1]
    model.to("cpu")
    return losses


def loss_tables(
    rows: Sequence[Row],
    losses: Sequence[Losses],
    *,
    names: Sequence[str],
    window: int,
    separator: int | None,
    counts: Counts | None,
) -> dict[str, list[Bucket]]:
    """Return the tables of diagnosis.json (see comparison.DIAGNOSIS_TABLES).

    Args:
        losses: the results of `score_rows` for the model and for the baseline.
        names: the names of the kinds of text.
        window: the largest number of targets (ids to predict) in a row.
        counts: how often each id occurs in the training text. If None, the ids in `rows` are counted instead.
    """
    sizes = [len(row.ids) - 1 for row in rows]
    domain = np.repeat([row.domain for row in rows], sizes)
    document = np.repeat([row.document for row in rows], sizes)
    token = np.concatenate([row.ids[1:] for row in rows], dtype=np.int64)
    position = np.concatenate([np.arange(size) for size in sizes])
    # Only full rows, so that all positions are compared on the same rows.
    position[np.repeat(sizes, sizes) != window] = -1
    distance = np.concatenate([after_separator(row.ids, separator) for row in rows])
    occurrences = np.bincount(token) if counts is None else counts
    frequency = np.digitize(occurrences[token] * 1e6 / occurrences.sum(), list(FREQUENCIES)) - 1
    both = np.array([np.concatenate(of_rows) for of_rows in losses], np.float64)
    return {
        "domains": buckets(both, document, domain, names),
        "positions": by_range(both, document, position, position_edges(window)),
        "frequencies": buckets(both, document, frequency, list(FREQUENCIES.values())),
        "ends": buckets(both, document, np.where(token == separator, 0, -1), ["the separator"]),
        "starts": by_range(both, document, distance, AFTER_SEPARATOR),
    }


def after_separator(ids: Ids, separator: int | None) -> NDArray[np.int64]:
    """Return the distance of each id but the first from the separator before it, 0 without one."""
    index = np.arange(len(ids))
    last = np.maximum.accumulate(np.where(ids == separator, index, -1))[:-1]
    return np.where(last < 0, 0, index[1:] - last)


def buckets(
    losses: NDArray[np.float64], document: NDArray[Any], group: NDArray[Any], labels: Sequence[str]
) -> list[Bucket]:
    """Return the mean losses and their difference for each group that has targets.

    Args:
        losses: of the model and of the baseline, in nats, of shape [2, targets].
        document: index of the document of each target [targets].
        group: index of the label of each target [targets]. Targets with other indices are left out.
    """
    rows: list[Bucket] = []
    for number, label in enumerate(labels):
        ours, baseline = losses[:, group == number]
        if not len(ours):
            continue
        mean, stderr, documents = clustered(ours - baseline, document[group == number])
        rows.append(
            Bucket(
                label=label,
                tokens=len(ours),
                documents=documents,
                ours=float(ours.mean()),
                theirs=float(baseline.mean()),
                difference=MeanDifference(value=mean, stderr=stderr),
            )
        )
    return rows


def by_range(
    losses: NDArray[np.float64], document: NDArray[Any], position: NDArray[Any], edges: Sequence[int]
) -> list[Bucket]:
    """Return a bucket per range of positions. `edges`: first positions, and the end."""
    labels: list[str] = []
    for low, high in itertools.pairwise(edges):
        if low + 1 == high:
            labels.append(f"{low:,}")
        else:
            labels.append(f"{low:,} to {high - 1:,}")
    return buckets(losses, document, np.digitize(position, edges) - 1, labels)


def clustered(values: NDArray[np.floating[Any]], cluster: NDArray[np.int64]) -> tuple[float, float | None, int]:
    """Return mean, standard error (None for a single cluster) and number of clusters of clustered values."""
    _, cluster = np.unique(cluster, return_inverse=True)
    counts = np.bincount(cluster)
    clusters = len(counts)
    mean = values.mean()
    if clusters == 1:
        return float(mean), None, clusters
    residuals = np.bincount(cluster, values) - mean * counts
    spread = math.sqrt((residuals**2).sum() * clusters / (clusters - 1))
    return float(mean), spread / len(values), clusters


def position_edges(window: int) -> list[int]:
    """Return the edges that divide the positions of a window into ranges."""
    sixteenth = max(1, window // 16)
    doubled = [2**power for power in range(window.bit_length()) if 2**power < sixteenth]
    # Code that shifts labels inside rows of `window` ids never trains the last position, so it is a separate range.
    return sorted({0, *doubled, *range(sixteenth, window, sixteenth), window - 1, window})
