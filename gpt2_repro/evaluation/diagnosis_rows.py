"""Select rows of token ids for `diagnose`, and compute a model's losses on them."""

import dataclasses
import itertools
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.cli import Progress
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.passages import cut_passages, evenly
from gpt2_repro.evaluation.tasks import fetch_data, load_task, write_task_files
from gpt2_repro.launchers import EVALUATE
from gpt2_repro.tokenization import encode, is_same, start_id


Ids = NDArray[np.integer[Any]]
Counts = NDArray[np.int64]  # occurrences of each token id [vocabulary]
Losses = list[NDArray[np.float32]]  # for each row: the losses of all ids but the first, in nats
COUNTED_TOKENS = 10_000_000  # training tokens that are counted for the token frequencies
EDGE_TOKENS = 64  # ids at the start and at the end of a document
MAX_EDGES = 500  # documents per domain
MAX_PASSAGES = 1000  # per domain
POSITIONS = 4096  # per forward pass, with padding; logits and softmax of GPT-2's vocabulary take 1.6 GB
PASSAGE_TOKENS = 100  # approximately, of a passage and its repeated last sentence
PARTS = ("text", "starts", "bare", "ends", "words")  # the kinds of rows; see rows_to_score
# A full stop, closing quotes or brackets, and a space.
SENTENCE_END = re.compile(r"[.?!…][\"'”’`)\]]*\s+")
TASKS = {"lambada_openai": "LAMBADA passages", "wikitext": "wikitext"}  # the names in the tables


@dataclasses.dataclass(frozen=True)
class Domain:
    """Texts of one kind, such as wikitext or the validation split, as one array of token ids per document."""

    name: str
    documents: Sequence[Ids]  # to score. A packed row counts as one document
    starts: Sequence[Ids] = ()  # the first ids of some documents, without the separator
    ends: Sequence[Ids] = ()  # the last ids of some documents, with the separator
    passages: Sequence[str] = ()  # texts whose last word the model predicts, as in LAMBADA


class Row(NamedTuple):
    """A row of token ids to score. Only the losses of the last `targets` ids are used."""

    ids: Ids
    targets: int
    domain: int  # index of the domain (the kind of text)
    document: int = 0  # index. Rows from the same document are not statistically independent
    part: str = "text"  # one of PARTS (see `rows_to_score`)


def read_task(task: str, source: Path | None, tokenizer: Any) -> Domain:
    """Return LAMBADA's passages or wikitext's pages, processed as in lm-eval.

    Args:
        source: a jsonl file, or None to read from the Hub.

    Raises UserError if the texts cannot be read.
    """
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    with tempfile.TemporaryDirectory(prefix="diagnosis-") as folder:
        write_task_files({task: source}, Path(folder))
        fetch_data({task: source}, Path(folder))
        (loaded,) = load_task(task, Path(folder))
        texts = [wikitext_detokenizer(doc) if task == "wikitext" else doc["text"] for doc in loaded.eval_docs]
    documents = [np.array(ids, np.int64) for ids in encode(tokenizer, texts)]
    if task == "lambada_openai":  # excerpts do not start or end with a document
        return Domain(TASKS[task], documents, passages=texts)
    separator = tokenizer.eos_token_id
    ends = [np.append(ids, separator) for ids in documents] if separator is not None else []
    return Domain(TASKS[task], documents, documents, ends)


def check_vocabulary(tokenizer: Any, expected: Any, option: str) -> None:
    """Raise UserError if two tokenizers differ. `option` passed the first one."""
    if not is_same(tokenizer, expected):
        fix = f"Pass a model or data with this tokenizer, or run {EVALUATE}, which compares bits per byte."
        raise UserError(f"{option} does not have the tokenizer of RUN, so losses per token cannot be compared. {fix}")


def read_prepared(folder: Path, tokenizer: Any, tokens: int) -> tuple[list[Domain], Counts]:
    """Return the validation rows of a prepared folder, and the count of each id in its training rows."""
    from gpt2_repro.data.prepared import PreparedData

    data = PreparedData.read(folder)
    check_vocabulary(data.tokenizer, tokenizer, f"--dataset_dir {folder}")
    separator = None if data.manifest.form.separator == "none" else tokenizer.eos_token_id

    def spread(rows: Any, tokens: int) -> list[Ids]:
        count = -(-len(rows) * tokens // max(1, int((rows.lengths() - 1).sum())))
        return [row["input_ids"] for row in rows.__getitems__(evenly(range(len(rows)), count))]

    chosen = {f"validation {name or 'text'}": spread(rows, tokens) for name, rows in data.validation().items()}
    domains = [domain_of_rows(name, rows, tokenizer, separator=separator) for name, rows in chosen.items()]
    return domains, np.bincount(np.concatenate(spread(data.rows("train"), COUNTED_TOKENS)), minlength=len(tokenizer))


def domain_of_rows(name: str, rows: Sequence[Ids], tokenizer: Any, *, separator: int | None) -> Domain:
    """Return packed rows as a domain. `separator` is the id between documents."""
    pieces, starts, ends = [], [], []
    for row in rows:
        edges = [0, *np.flatnonzero(row == separator), len(row)]
        pieces += [row[start:end] for start, end in itertools.pairwise(edges)]
        starts += [row[start + 1 : end] for start, end in itertools.pairwise(edges[1:])]
        ends += [row[start : end + 1] for start, end in itertools.pairwise(edges[:-1])]
    texts = [tokenizer.decode(piece, clean_up_tokenization_spaces=False) for piece in pieces]
    # A row may begin and end inside a word.
    whole_words = [" ".join(text.split()[1:-1]) for text in texts]
    return Domain(name, rows, starts, ends, cut_passages(whole_words, MAX_PASSAGES))


def rows_to_score(domains: Sequence[Domain], tokenizer: Any, *, window: int, tokens: int) -> list[Row]:
    """Return all rows to score, sorted by kind in the order of PARTS.

    - text: about `tokens` targets (ids to predict) of each domain. A document of more than `window` targets is divided
      into several rows.
    - starts: the first ids of documents, after the start token that lm-eval puts before documents.
    - bare: the first ids of the same documents, without the start token.
    - ends: the last ids of documents. Only the separator is scored.
    - words: two rows per passage, which score the last word. The first row has the complete passage, and the second
      row has only the last sentence.
    """
    start = start_id(tokenizer)
    edges, passages = min(MAX_EDGES, tokens // EDGE_TOKENS), min(MAX_PASSAGES, tokens // PASSAGE_TOKENS)
    rows: list[Row] = []
    documents = itertools.count()
    for number, domain in enumerate(domains):
        cut = [
            Row(row := ids[at : at + window + 1], len(row) - 1, number, document)
            for ids, document in zip(domain.documents, documents, strict=False)
            for at in range(0, len(ids) - 1, window)
        ]
        if targets := sum(row.targets for row in cut):
            rows += evenly(cut, -(-len(cut) * tokens // targets))
        count = min(EDGE_TOKENS, window - 1)
        starts = [ids[:count] for ids in domain.starts if len(ids) >= count and start is not None]
        for ids, document in zip(evenly(starts, edges), documents, strict=False):
            rows.append(Row(ids, count - 1, number, document, "bare"))
            rows.append(Row(np.array([start, *ids], np.int64), count, number, document, "starts"))
        count = min(EDGE_TOKENS, window)
        ends = [ids[-count:] for ids in domain.ends if len(ids) >= count]
        rows += [Row(ids, 1, number, next(documents), "ends") for ids in evenly(ends, edges)]
        for earlier, sentence, word in filter(None, map(split_passage, evenly(domain.passages, passages))):
            for context in (earlier + sentence, sentence):
                # As in lm-eval, context and word are encoded together, and the length of the context is subtracted.
                whole, before = encode(tokenizer, [f"{context} {word}", context])
                targets = max(1, len(whole) - len(before))
                rows.append(Row(np.array(whole[-window - 1 :], np.int64), targets, number, part="words"))
    return sorted(rows, key=lambda row: PARTS.index(row.part))


def split_passage(text: str) -> tuple[str, str, str] | None:
    """Split a text before its last sentence and its last word, or return None."""
    context, _, word = text.strip().rpartition(" ")
    end = max((match.end() for match in SENTENCE_END.finditer(context)), default=0)
    return (context[:end], context[end:], word) if end and context[end:].strip() else None


def score_rows(model: Any, rows: Sequence[Row], *, device: str, name: str) -> Losses:
    """Return a model's loss on each id of a row in nats, one array per row.

    The first id of a row has no loss, so each array is one element shorter than the row. The model is
    moved to the CPU afterwards.
    """
    import torch

    from gpt2_repro.evaluation.hellaswag import batches_by_length

    model = model.float().to(device).eval()
    losses: Losses = [np.empty(0, np.float32)] * len(rows)
    with torch.inference_mode():
        for numbers in Progress(batches_by_length([len(row.ids) for row in rows], POSITIONS), desc=name):
            # Padding is on the right, so that no position of a row attends to it.
            ids = [torch.from_numpy(rows[number].ids.astype(np.int64)) for number in numbers]
            batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits.float()
            flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
            for number, row_losses in zip(numbers, flat.view(len(ids), -1).cpu().numpy(), strict=True):
                losses[number] = row_losses[: len(rows[number].ids) - 1]
    model.to("cpu")
    return losses
