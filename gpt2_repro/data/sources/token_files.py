"""Read token files: llm.c's .bin shards, and nanoGPT's raw uint16 files."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gpt2_repro.data.sources.base import Batch, Part
from gpt2_repro.errors import UserError


TOKENS = ".bin"  # extension of token files
UINT16 = np.dtype("<u2")
# Format of llm.c (llmc/dataloader.h): 256 int32 (magic, version, number of tokens), then uint16 ids.
MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
ENOUGH = 256  # with fewer ids, a file is not checked for another format
CHECKED_IDS = 2**20  # ids at the start of a file that are checked
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

    def read(self) -> Iterator[Batch]:
        raise UserError(f"{self.name} contains tokens, not text. Pass the tokenizer that made them as --tokenizer.")

    def ids(self) -> np.ndarray:
        """Return the ids in the file as a memory-mapped array of shape [tokens]."""
        return map_ids(Path(self.name), self.offset, self.tokens, UINT16)

    def check(self, vocab_size: int, *, is_text: bool = True) -> None:
        """Raise UserError if the file cannot have ids of the tokenizer.

        Only the ids at the start and the end of the file are checked. Ids of no text may have any frequencies.
        """
        if vocab_size > 2**16:
            raise UserError(f"{self.name} has ids of 16 bits, but the tokenizer has {vocab_size:,} ids.")
        ids, end = self.ids()[:CHECKED_IDS], self.ids()[-MOST_EQUAL:]
        used, top, is_long = np.unique(ids), int(ids.max(initial=0)) + 1, len(ids) >= ENOUGH
        is_text &= is_long
        # Every second value is the high half of a wider id: at most 15, because vocabularies have less than 2**20 ids.
        # Ids without text can have small numbers there, but not only 0.
        halves, limit = ((ids[0::2], ids[1::2]), (ids[1::2], ids[0::2])), 16 if is_text else 1
        are_halves = (high.max() < limit and low.mean() > 16 * high.max() for low, high in halves)
        repeats = (np.array_equal(end[period:], end[:-period]) for period in range(1, MOST_PERIOD + 1))
        if is_long and any(are_halves):
            wrong = "has integers of more than 16 bits. Save the ids as uint16"
        elif is_long and _are_floats(ids):
            wrong = "has floats. Save the ids as uint16"
        elif top > vocab_size:
            wrong = f"has the id {top - 1}, but the tokenizer has {vocab_size:,} ids. Pass another --tokenizer"
        elif is_text and (np.ptp(ids[16:512]) == 0 or (len(end) == MOST_EQUAL and any(repeats))):
            wrong = "has a header or an end of equal ids or patterns. Save only the ids of the text"
        # Half of the ids have a low byte below 128, but most letters and the ids of characters are below 128.
        elif is_text and top > 1024 and len(used) >= 256 and (used & 255 < 128).mean() > 0.75:
            wrong = "has text or integers of 8 bits. Pass text as a .txt file, and save ids as uint16"
        # A small vocabulary, such as the ids of characters, uses nearly all of its ids.
        elif is_text and top <= vocab_size // 4 and 2 * len(used) > top:
            wrong = f"has ids below {top:,}, but the tokenizer has {vocab_size:,}. Pass the tokenizer that made them"
        else:
            return
        raise UserError(f"{self.name} {wrong}.")

    def lengths(self, end_of_text: int | None, separator: str) -> np.ndarray:
        """Return the number of tokens of each document, including its separator.

        Without separators, all tokens of the file are one document. Raises UserError if
        MOST_EQUAL ids in a row are equal, or nearly all of MOST_EQUAL documents in a row are empty.
        """
        if end_of_text is None or separator == "none":
            return np.array([self.tokens])
        ids, chunk = self.ids(), 2**26
        places = [np.flatnonzero(ids[a : a + chunk] == end_of_text) + a for a in range(0, self.tokens, chunk)]
        edges = np.concatenate([np.empty(0, np.int64), *places]) + (separator == "after")
        # If the file begins in the middle of a document, the rest of this document counts as a document.
        lengths = np.diff(np.unique(np.concatenate([[0], edges, [self.tokens]])))
        samples = ids[::MOST_EQUAL]
        repeated = np.flatnonzero(samples[1:] == samples[:-1]) * MOST_EQUAL
        if any(np.ptp(ids[start : start + MOST_EQUAL]) == 0 for start in repeated):
            raise UserError(f"{self.name} has {MOST_EQUAL:,} equal ids in a row. Save only the ids of the text.")
        empty = np.cumsum(lengths == 1)
        if (empty[MOST_EQUAL:] - empty[:-MOST_EQUAL]).max(initial=0) > 0.9 * MOST_EQUAL:
            raise UserError(f"{self.name} has long sequences of empty documents. Save only the ids of the text.")
        return lengths[lengths > 0]


def read_header(path: Path) -> TokenPart:
    """Read the header of a token file and return the location of its ids."""
    size = path.stat().st_size
    start = np.fromfile(path, "<u4", count=4)
    magic, version, tokens, _ = words = [*start.tolist(), 0, 0, 0, 0][:4]
    # litdata has the number of samples and the places where these end, of which the last is the size of the file.
    is_sampled = np.fromfile(path, "<u4", count=1, offset=4 * (magic + 1)).tolist() == [size]
    is_counted = any(word and size - width * word in HEADERS for word in words for width in (1, 2, 4, 8))
    if magic == MAGIC:
        offset, tokens = HEADER_BYTES, tokens if version == VERSION else -1
    elif is_sampled or is_counted or re.match(FOREIGN, start.tobytes()):
        raise UserError(f"{path} has an unsupported header. Pass raw uint16 ids or shards with magic {MAGIC}.")
    else:
        offset, tokens = 0, size // 2
    if size != offset + 2 * tokens:
        expected = f"the {tokens:,} uint16 ids" if tokens >= 0 else f"version {VERSION} of llm.c's format"
        raise UserError(f"{path} with {size:,} bytes is cut off or does not have {expected}. Download it again.")
    return TokenPart(str(path), offset, tokens, size)


def _are_floats(ids: np.ndarray) -> bool:
    """Return whether the bytes of ids are floats with whole numbers. Read as floats, ids are small fractions."""
    kinds = [ids[: len(ids) // 4 * 4].view(kind) for kind in ("<f2", "<f4", "<f8")]
    with np.errstate(invalid="ignore"):  # infinity and NaN
        return any((each % 1 == 0).all() and each.min(where=each > 0, initial=2048) < 2048 for each in kinds)


def map_ids(path: Path, offset: int, tokens: int, dtype: np.dtype) -> np.ndarray:
    """Return the token ids in a file as a memory-mapped array of shape [tokens].

    Args:
        offset: number of bytes in the file before the ids.
    """
    # An empty range cannot be mapped.
    return np.memmap(path, dtype, "r", offset, (tokens,)) if tokens else np.empty(0, dtype)


def separator_shown(first: TokenPart, last: TokenPart, end_of_text: int) -> str | None:
    """Return whether end-of-text ids are "before" or "after" each document.

    Return None if this is unknown. `first` and `last` are the first and the last token file of a source.
    """
    if first.tokens and first.ids()[0] == end_of_text:
        return "before"
    # Neither holds for llm.c's training shards, which begin and end in the middle of documents.
    return "after" if last.tokens and last.ids()[-1] == end_of_text else None
