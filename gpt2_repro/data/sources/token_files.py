"""Files of tokens: llm.c's .bin shards and nanoGPT's raw uint16 files."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gpt2_repro.data.sources.base import Batch, Part
from gpt2_repro.errors import UserError


# llm.c, llmc/dataloader.h: 256 int32 (magic, version, number of tokens), then uint16 ids. Its Llama 3 shards are another
# version with uint32 ids.
MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
OTHER_MAGICS = {20240801: "Llama 3 shard of llm.c (uint32)", 20240522: "evaluation file of llm.c"}


@dataclasses.dataclass(frozen=True)
class TokenPart(Part):
    """The ids of a file, where they lie."""

    name: str
    offset: int  # bytes
    tokens: int
    size: int

    def read(self) -> Iterator[Batch]:
        raise UserError(f"{self.name} holds tokens, not text: name the --tokenizer that made them")

    def ids(self) -> np.ndarray:
        """[tokens], mapped from the file"""
        return map_ids(Path(self.name), self.offset, self.tokens, np.dtype("<u2"))

    def lengths(self, end_of_text: int | None, separator: str) -> np.ndarray:
        """[documents], in tokens with their separators; the rest of a document that an earlier file began is one."""
        if end_of_text is None or separator == "none":
            return np.array([self.tokens])
        ids, chunk = self.ids(), 2**26
        places = [np.flatnonzero(ids[a : a + chunk] == end_of_text) + a for a in range(0, self.tokens, chunk)]
        edges = np.concatenate([np.empty(0, np.int64), *places]) + (separator == "after")
        return np.diff(np.unique(np.concatenate([[0], edges, [self.tokens]])))


def read_header(path: Path) -> TokenPart:
    """Where the ids of a file lie. Raises UserError for another format and for one that was cut off."""
    try:
        size = path.stat().st_size
        start = np.fromfile(path, "<i4", count=3)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    first = int(start[0]) if len(start) else 0
    if first in OTHER_MAGICS:
        raise UserError(f"{path} is a {OTHER_MAGICS[first]}: shards with the header {MAGIC} and uint16 ids are read")
    if first != MAGIC:
        if size % 2:
            raise UserError(f"{path} has {size:,} bytes: raw uint16 ids have an even number, so it was cut off")
        return TokenPart(str(path), 0, size // 2, size)
    if len(start) < 3 or start[1] != VERSION:
        raise UserError(f"{path} is of version {start[1:2]} of llm.c's format: version {VERSION} is read")
    tokens = int(start[2])
    if size != HEADER_BYTES + 2 * tokens:
        raise UserError(f"{path} has {size:,} bytes, its header says {HEADER_BYTES + 2 * tokens:,}: fetch it again")
    return TokenPart(str(path), HEADER_BYTES, tokens, size)


def map_ids(path: Path, offset: int, tokens: int, dtype: np.dtype) -> np.ndarray:
    """[tokens] of `dtype`, mapped from the file; an empty array for none, which cannot be mapped."""
    return np.memmap(path, dtype, "r", offset, (tokens,)) if tokens else np.empty(0, dtype)


def separator_shown(first: TokenPart, last: TokenPart, end_of_text: int) -> str | None:
    """Where the end-of-text id stands in documents that begin with the one part and end with the other.

    None where it cannot be seen: llm.c's training shards begin and end in the middle of documents.
    """
    if first.tokens and first.ids()[0] == end_of_text:
        return "before"
    return "after" if last.tokens and last.ids()[-1] == end_of_text else None
