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
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Counts = Integers  # occurrences of each token id [vocabulary]
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

    @property
    def targets(self) -> int:
        """The number of ids to predict: all but the first."""
        return len(self.ids) - 1


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
        task_folder = Path(folder)
        sources = {task: source}
        write_task_files(sources, task_folder)
        fetch_data(sources, task_folder)
        (loaded,) = load_task(task, task_folder)
        texts: list[str] = []
        for document in loaded.eval_docs:
            if task == "wikitext":
                texts.append(wikitext_detokenizer(document))
            else:
                texts.append(document["text"])
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
    training_rows = _spread(data.rows("train"), COUNTED_TOKENS)
    training_ids = np.concatenate(training_rows)
    counts = np.bincount(training_ids, minlength=len(tokenizer))
    return texts, counts


def _spread(rows: Any, tokens: int) -> list[Ids]:
    """Return the ids of rows with about a number of targets, evenly chosen."""
    targets_of_rows = rows.lengths() - 1
    targets = int(targets_of_rows.sum())
    count = _rows_with(tokens, len(rows), targets)
    chosen = evenly(range(len(rows)), count)
    return [row["input_ids"] for row in rows.__getitems__(chosen)]


def _rows_with(tokens: int, num_rows: int, targets: int) -> int:
    """Return the number of rows that have about `tokens` targets, if `num_rows` rows have `targets`."""
    return math.ceil(num_rows * tokens / max(1, targets))


def cut_rows(texts: Mapping[str, Sequence[Ids]], *, window: int, tokens: int) -> list[Row]:
    """Return rows with about `tokens` targets (ids to predict) of each kind of text, of at most `window` targets."""
    rows: list[Row] = []
    number = 0  # of the document
    for domain, documents in enumerate(texts.values()):
        cut: list[Row] = []
        targets = 0
        for ids in documents:
            for start in range(0, len(ids) - 1, window):
                end = start + window + 1
                row = Row(ids[start:end], domain, number)
                targets += row.targets
                cut.append(row)
            number += 1
        count = _rows_with(tokens, len(cut), targets)
        rows += evenly(cut, count)
    return rows


def score_rows(model: Any, rows: Sequence[Row], *, device: str, name: str) -> Losses:
    """Return a model's losses on each row. The model is moved to the CPU afterwards."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.utils.rnn import pad_sequence

    from gpt2_repro.evaluation.hellaswag import batches_by_length

    model = model.float().to(device)
    model.eval()
    losses: Losses = [np.empty(0, np.float32)] * len(rows)
    lengths = [len(row.ids) for row in rows]
    batches = batches_by_length(lengths, POSITIONS)
    with torch.inference_mode():
        for numbers in Progress(batches, desc=name):
            ids_of_rows: list[torch.Tensor] = []
            for number in numbers:
                ids = rows[number].ids.astype(np.int64)
                ids_of_rows.append(torch.from_numpy(ids))
            # Padding is on the right, so that no position of a row attends to it.
            batch = pad_sequence(ids_of_rows, batch_first=True)
            batch = batch.to(device)
            inputs = batch[:, :-1]
            targets = batch[:, 1:]
            outputs = model(input_ids=inputs, use_cache=False)
            logits = outputs.logits.float()
            flat_logits = logits.flatten(0, 1)
            flat_losses = cross_entropy(flat_logits, targets.flatten(), reduction="none")
            padded_losses = flat_losses.view(targets.shape).cpu().numpy()
            for number, row_losses in zip(numbers, padded_losses, strict=True):
                losses[number] = row_losses[: rows[number].targets]
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
    target_counts = [row.targets for row in rows]
    domain = np.repeat([row.domain for row in rows], target_counts)
    document = np.repeat([row.document for row in rows], target_counts)
    tokens: list[Ids] = []
    positions: list[Integers] = []
    distances: list[Integers] = []
    for row in rows:
        tokens.append(row.ids[1:])
        if row.targets == window:
            positions.append(np.arange(window))
        else:
            # Only full rows, so that all positions are compared on the same rows.
            positions.append(np.full(row.targets, -1))
        distances.append(after_separator(row.ids, separator))
    token = np.concatenate(tokens, dtype=np.int64)
    position = np.concatenate(positions)
    distance = np.concatenate(distances)
    if counts is None:
        counts = np.bincount(token)
    per_million = counts[token] * 1e6 / counts.sum()
    lower_limits = list(FREQUENCIES)
    frequency = np.digitize(per_million, lower_limits) - 1
    frequency_labels = list(FREQUENCIES.values())
    is_separator = np.where(token == separator, 0, -1)
    flat_losses = [np.concatenate(losses_of_rows) for losses_of_rows in losses]
    both = np.array(flat_losses, np.float64)
    return {
        "domains": buckets(both, document, domain, names),
        "positions": by_range(both, document, position, position_edges(window)),
        "frequencies": buckets(both, document, frequency, frequency_labels),
        "ends": buckets(both, document, is_separator, ["the separator"]),
        "starts": by_range(both, document, distance, AFTER_SEPARATOR),
    }


def after_separator(ids: Ids, separator: int | None) -> Integers:
    """Return the distance of each id but the first from the separator before it, 0 without one."""
    index = np.arange(len(ids))
    separators = np.where(ids == separator, index, -1)
    last_separator = np.maximum.accumulate(separators)
    last = last_separator[:-1]  # before each id but the first
    distance = index[1:] - last
    return np.where(last < 0, 0, distance)


def buckets(losses: Floats, document: Integers, group: Integers, labels: Sequence[str]) -> list[Bucket]:
    """Return the mean losses and their difference for each group that has targets.

    Args:
        losses: of the model and of the baseline, in nats, of shape [2, targets].
        document: index of the document of each target [targets].
        group: index of the label of each target [targets]. Targets with other indices are left out.
    """
    rows: list[Bucket] = []
    for number, label in enumerate(labels):
        is_member = group == number
        ours, baseline = losses[:, is_member]
        if not len(ours):
            continue
        mean, stderr, documents = clustered(ours - baseline, document[is_member])
        bucket = Bucket(
            label=label,
            tokens=len(ours),
            documents=documents,
            ours=float(ours.mean()),
            theirs=float(baseline.mean()),
            difference=MeanDifference(value=mean, stderr=stderr),
        )
        rows.append(bucket)
    return rows


def by_range(losses: Floats, document: Integers, position: Integers, edges: Sequence[int]) -> list[Bucket]:
    """Return a bucket per range of positions. `edges`: first positions, and the end."""
    labels: list[str] = []
    for low, high in itertools.pairwise(edges):
        if low + 1 == high:
            labels.append(f"{low:,}")
        else:
            labels.append(f"{low:,} to {high - 1:,}")
    range_of_target = np.digitize(position, edges) - 1
    return buckets(losses, document, range_of_target, labels)


def clustered(values: Floats, cluster: Integers) -> tuple[float, float | None, int]:
    """Return mean, standard error (None for a single cluster) and number of clusters of clustered values."""
    _, cluster = np.unique(cluster, return_inverse=True)
    counts = np.bincount(cluster)
    clusters = len(counts)
    mean = values.mean()
    if clusters == 1:
        return float(mean), None, clusters
    sums = np.bincount(cluster, values)
    residuals = sums - mean * counts
    sum_of_squares = (residuals**2).sum()
    spread = math.sqrt(sum_of_squares * clusters / (clusters - 1))
    stderr = spread / len(values)
    return float(mean), stderr, clusters


def position_edges(window: int) -> list[int]:
    """Return the edges that divide the positions of a window into ranges."""
    sixteenth = max(1, window // 16)
    # Code that shifts labels inside rows of `window` ids never trains the last position, so it is a separate range.
    edges = {0, window - 1, window}
    edge = 1
    while edge < sixteenth:
        edges.add(edge)
        edge *= 2
    edges.update(range(sixteenth, window, sixteenth))
    return sorted(edges)
