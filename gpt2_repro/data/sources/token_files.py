"""Read token files: llm.c's .bin shards, nanoGPT's raw uint16 files, and datatrove's .ds files."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_repro.data.sources.base import Batch, Part
from gpt2_repro.errors import UserError


DATATROVE = ".ds"
TOKENS = (".bin", DATATROVE)  # extensions of token files
# datatrove's files next to a.ds: the end of each document, and a summary.
BESIDE_DATATROVE = (".ds.index", ".ds.metadata")
UINT16 = np.dtype("<u2")
UINT32 = np.dtype("<u4")
# Format of llm.c (llmc/dataloader.h): 256 int32 (magic, version, number of tokens), then uint16 ids.
MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 1024
CHUNK = 2**26  # ids that are compared with a separator at once
ENOUGH = 256  # with fewer ids, a file is not checked for another format
CHECKED_IDS = 2**20  # ids at the start of a file that are checked
CHECKED_DOCUMENTS = 1000  # documents at the start of a file with an index whose separators are checked
MOST_EQUAL = 1000  # a text ends with fewer equal ids, and has fewer empty documents in a row
MOST_PERIOD = 16  # ids in a pattern at the end; in the middle, a text can repeat "0, " many times
# Starts of .npy, .npz, PyTorch, pickle, Parquet, GGUF, gzip and safetensors files, and of others with capital letters
# (LITPKDS), and the sizes in bytes of headers that have the number of ids or bytes that follow.
FOREIGN = rb"(?s)\x93NUM|[A-Z0-9]{6}|PAR1|GGUF|PK\x03\x04|\x80[\x02-\x05][]\x8a\x95c]|\x1f\x8b\x08|.{4}\0{4}\{"
HEADERS = (4, 8, 12, 16, 24, 32, 64, 128, 256, 512, HEADER_BYTES)


@dataclasses.dataclass(frozen=True)
class TokenPart(Part):
    """The token ids of a token file, which are memory-mapped and not copied."""

    name: str
    offset: int  # bytes
    tokens: int
    size: int
    dtype: np.dtype[Any] = UINT16
    index: Path | None = None  # datatrove's file with the end of each document in tokens, as uint64

    def read(self) -> Iterator[Batch]:
        raise UserError(f"{self.name} contains tokens, not text. Pass the tokenizer that made them as --tokenizer.")

    def ids(self) -> np.ndarray:
        """Return the ids in the file as a memory-mapped array of shape [tokens]."""
        return map_ids(Path(self.name), self.offset, self.tokens, self.dtype)

    def check(self, vocab_size: int, *, is_text: bool = True) -> None:
        """Raise UserError if the file cannot have ids of the tokenizer.

        Only the ids at the start and the end of the file are checked. Ids of no text may have any frequencies.
        """
        if vocab_size > 2**16 and self.tokens and self.dtype == UINT16:
            raise UserError(f"{self.name} has ids of 16 bits, but the tokenizer has {vocab_size:,} ids.")
        ids = self.ids()[:CHECKED_IDS]
        is_long = len(ids) >= ENOUGH
        is_raw = self.index is None
        if is_long and is_raw and _are_floats(ids):
            raise UserError(f"{self.name} has floats. Save the ids as uint16.")
        if is_long and is_raw and _are_halves(ids, is_text=is_text):
            raise UserError(f"{self.name} has integers of more than 16 bits. Save the ids as uint16.")
        top = int(ids.max(initial=0)) + 1
        if top > vocab_size:
            fix = "Pass another --tokenizer."
            raise UserError(f"{self.name} has the id {top - 1}, but the tokenizer has {vocab_size:,} ids. {fix}")
        if is_long and is_text:
            self._check_text(ids, top, vocab_size)

    def _check_text(self, ids: np.ndarray, top: int, vocab_size: int) -> None:
        """Raise UserError if ids cannot be the start of a text. `top` is the largest of the ids plus 1."""
        has_header = np.ptp(ids[16:512]) == 0
        if has_header or _is_periodic(self.ids()[-MOST_EQUAL:]):
            fix = "Save only the ids of the text."
            raise UserError(f"{self.name} has a header or an end of equal ids or patterns. {fix}")
        used = np.unique(ids)
        # Half of the ids have a low byte below 128, but most letters and the ids of characters are below 128.
        low_bytes = used & 255
        has_letters = (low_bytes < 128).mean() > 0.75
        if top > 1024 and len(used) >= 256 and has_letters:
            fix = "Pass text as a .txt file, and save ids as uint16."
            raise UserError(f"{self.name} has text or integers of 8 bits. {fix}")
        # A small vocabulary, such as the ids of characters, uses nearly all of its ids.
        if top <= vocab_size // 4 and 2 * len(used) > top:
            fix = "Pass the tokenizer that made them."
            raise UserError(f"{self.name} has ids below {top:,}, but the tokenizer has {vocab_size:,}. {fix}")

    def check_separators(self, end_of_text: int, separator: str) -> None:
        """Raise UserError if most documents of a file with an index have no separator where --separator says.

        Only the documents at the start of the file are checked. datatrove can cut documents (shuffle_chunk_size).
        """
        if self.index is None:
            return
        lengths = self._indexed_lengths(CHECKED_DOCUMENTS)
        ends = np.cumsum(lengths)
        ids = self.ids()
        first_ids = ids[ends - lengths]
        last_ids = ids[ends - 1]
        shown = "none"
        if (first_ids == end_of_text).mean() > 0.5:
            shown = "before"
        elif (last_ids == end_of_text).mean() > 0.5:
            shown = "after"
        if shown == "none":
            raise UserError(f"{self.name} has no end-of-text ids between its documents. Pass --separator none.")
        if shown != separator:
            raise UserError(f"{self.name} has end-of-text ids {shown} each document. Pass --separator {shown}.")

    def _indexed_lengths(self, documents: int = -1) -> np.ndarray:
        """Return the tokens of each document of the index, or of its first ones, without empty documents."""
        assert self.index is not None
        ends = np.fromfile(self.index, "<u8", count=documents).astype(np.int64)
        lengths = np.diff(ends, prepend=0)
        return lengths[lengths > 0]

    def lengths(self, end_of_text: int | None, separator: str) -> np.ndarray:
        """Return the number of tokens of each document, including its separator.

        Without an index and without separators, all tokens of the file are one document. Raises UserError if
        MOST_EQUAL ids in a row are equal, or nearly all of MOST_EQUAL documents in a row are empty.
        """
        if self.index is not None:
            return self._indexed_lengths()
        if end_of_text is None or separator == "none":
            return np.array([self.tokens])
        ids = self.ids()
        separators = [np.empty(0, np.int64)]
        for start in range(0, self.tokens, CHUNK):
            chunk = ids[start : start + CHUNK]
            separators.append(np.flatnonzero(chunk == end_of_text) + start)
        boundaries = np.concatenate(separators)
        if separator == "after":
            boundaries += 1
        # If the file begins in the middle of a document, the rest of this document counts as a document.
        edges = np.unique(np.concatenate([[0], boundaries, [self.tokens]]))
        lengths = np.diff(edges)
        samples = ids[::MOST_EQUAL]
        equal_samples = np.flatnonzero(samples[1:] == samples[:-1])
        for place in equal_samples * MOST_EQUAL:
            if np.ptp(ids[place : place + MOST_EQUAL]) == 0:
                raise UserError(f"{self.name} has {MOST_EQUAL:,} equal ids in a row. Save only the ids of the text.")
        empty = np.cumsum(lengths == 1)
        empty_in_a_row = empty[MOST_EQUAL:] - empty[:-MOST_EQUAL]
        if empty_in_a_row.max(initial=0) > 0.9 * MOST_EQUAL:
            raise UserError(f"{self.name} has long sequences of empty documents. Save only the ids of the text.")
        return lengths[lengths > 0]


def read_header(path: Path) -> TokenPart:
    """Read the header of a token file and return the location of its ids."""
    if path.suffix == DATATROVE:
        return _read_index(path)
    size = path.stat().st_size
    start = np.fromfile(path, "<u4", count=4)
    words = np.zeros(4, int)
    words[: len(start)] = start
    magic, version, tokens, _ = words.tolist()
    damage = f"{path} with {size:,} bytes is cut off or does not have"
    if magic == MAGIC:
        if version != VERSION:
            raise UserError(f"{damage} version {VERSION} of llm.c's format. Download it again.")
        if size != HEADER_BYTES + 2 * tokens:
            raise UserError(f"{damage} the {tokens:,} uint16 ids. Download it again.")
        return TokenPart(str(path), HEADER_BYTES, tokens, size)
    # litdata has the number of samples and the places where these end, of which the last is the size of the file.
    last_end = np.fromfile(path, "<u4", count=1, offset=4 * (magic + 1))
    is_sampled = last_end.tolist() == [size]
    is_foreign = re.match(FOREIGN, start.tobytes()) is not None
    if is_sampled or is_foreign or _counts_the_rest(words.tolist(), size):
        raise UserError(f"{path} has an unsupported header. Pass raw uint16 ids or shards with magic {MAGIC}.")
    if size % 2:
        raise UserError(f"{damage} the {size // 2:,} uint16 ids. Download it again.")
    return TokenPart(str(path), 0, size // 2, size)


def _read_index(path: Path) -> TokenPart:
    """Return the location of the ids in a file of datatrove. The last end in its index is the number of tokens."""
    index = Path(f"{path}.index")
    if not index.is_file():
        raise UserError(f"{index} is missing. Copy it too, or write the tokens again with save_index=True.")
    ends = np.fromfile(index, "<u8")
    tokens = 0
    if len(ends):
        tokens = int(ends[-1])
    size = path.stat().st_size
    is_whole = index.stat().st_size == 8 * len(ends)
    is_sorted = bool((ends[1:] >= ends[:-1]).all())
    for dtype in (UINT16, UINT32):
        if is_whole and is_sorted and size == tokens * dtype.itemsize:
            return TokenPart(str(path), 0, tokens, size, dtype, index)
    problem = f"{path} with {size:,} bytes does not have the {tokens:,} ids of its index"
    raise UserError(f"{problem}. Copy both again, or run the task of datatrove again.")


def _counts_the_rest(words: list[int], size: int) -> bool:
    """Return whether one of the first words of a file is the number of ids or bytes after a header."""
    for word in words:
        if not word:
            continue
        for width in (1, 2, 4, 8):
            if size - width * word in HEADERS:
                return True
    return False


def _are_halves(ids: np.ndarray, *, is_text: bool) -> bool:
    """Return whether every second id is the high half of a wider id."""
    # At most 15, because vocabularies have less than 2**20 ids. Ids without text can have small numbers there, but not
    # only 0.
    limit = 1
    if is_text:
        limit = 16
    even = ids[0::2]
    odd = ids[1::2]
    for low, high in ((even, odd), (odd, even)):
        largest = high.max()
        if largest < limit and low.mean() > 16 * largest:
            return True
    return False


def _is_periodic(end: np.ndarray) -> bool:
    """Return whether the last ids of a file, if they are enough, repeat a short pattern."""
    if len(end) < MOST_EQUAL:
        return False
    for period in range(1, MOST_PERIOD + 1):
        if np.array_equal(end[period:], end[:-period]):
            return True
    return False


def _are_floats(ids: np.ndarray) -> bool:
    """Return whether the bytes of ids are floats with whole numbers. Read as floats, ids are small fractions."""
    rest = len(ids) % 4
    whole = ids[: len(ids) - rest]
    with np.errstate(invalid="ignore"):  # infinity and NaN
        for kind in ("<f2", "<f4", "<f8"):
            floats = whole.view(kind)
            are_whole = (floats % 1 == 0).all()
            if are_whole and floats.min(where=floats > 0, initial=2048) < 2048:
                return True
    return False


def map_ids(path: Path, offset: int, tokens: int, dtype: np.dtype) -> np.ndarray:
    """Return the token ids in a file as a memory-mapped array of shape [tokens].

    Args:
        offset: number of bytes in the file before the ids.
    """
    if not tokens:
        return np.empty(0, dtype)  # an empty range cannot be mapped
    return np.memmap(path, dtype, "r", offset, (tokens,))


def separator_shown(first: TokenPart, last: TokenPart, end_of_text: int) -> str | None:
    """Return whether end-of-text ids are "before" or "after" each document.

    Return None if this is unknown. `first` and `last` are the first and the last token file of a source.
    """
    first_ids = first.ids()[:1]
    last_ids = last.ids()[-1:]
    if end_of_text in first_ids:
        return "before"
    if end_of_text in last_ids:
        return "after"
    return None  # for example, llm.c's training shards begin and end in the middle of documents
