"""Read token files: llm.c's .bin shards and nanoGPT's raw uint16 files."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gpt2_repro.data.sources.base import Batch, Part
from gpt2_repro.errors import UserError


# Format of llm.c (llmc/dataloader.h): 256 int32 (magic, version, number of tokens), then uint16 ids. Its Llama 3
# shards have another header and uint32 ids.
MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
OTHER_MAGICS = {
    20240326: "model of llm.c",
    20240801: "Llama 3 shard of llm.c (uint32)",
    20240522: "evaluation file of llm.c",
}


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
        return map_ids(Path(self.name), self.offset, self.tokens, np.dtype("<u2"))

    def lengths(self, end_of_text: int | None, separator: str) -> np.ndarray:
        """Return the number of tokens of each document, including its separator.

        If the file has no separators, all its tokens are one document.
        """
        if end_of_text is None or separator == "none":
            return np.array([self.tokens])
        ids, chunk = self.ids(), 2**26
        places = [np.flatnonzero(ids[a : a + chunk] == end_of_text) + a for a in range(0, self.tokens, chunk)]
        edges = np.concatenate([np.empty(0, np.int64), *places]) + (separator == "after")
        # If the file begins in the middle of a document, the rest of this document counts as a document.
        return np.diff(np.unique(np.concatenate([[0], edges, [self.tokens]])))


def read_header(path: Path) -> TokenPart:
    """Read the header of a token file and return the location of its ids.

    Raises UserError if the file has another format or was cut off.
    """
    try:
        size = path.stat().st_size
        start = np.fromfile(path, "<i4", count=3)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Pass another file.") from None
    first = int(start[0]) if len(start) else 0
    if first in OTHER_MAGICS:
        raise UserError(f"Unsupported: {path} ({OTHER_MAGICS[first]}). Pass shards with magic {MAGIC} and uint16 ids.")
    if first != MAGIC:
        if size % 2:
            raise UserError(
                f"{path} is cut off: its size of {size:,} bytes is not a multiple of 2 (uint16). Download it again."
            )
        return TokenPart(str(path), 0, size // 2, size)
    if len(start) < 3 or start[1] != VERSION:
        raise UserError(f"{path} has version {start[1:2]} of llm.c's format. Pass files of version {VERSION}.")
    tokens = int(start[2])
    if size != HEADER_BYTES + 2 * tokens:
        raise UserError(f"{path} has {size:,} bytes instead of {HEADER_BYTES + 2 * tokens:,}. Download it again.")
    return TokenPart(str(path), HEADER_BYTES, tokens, size)


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
