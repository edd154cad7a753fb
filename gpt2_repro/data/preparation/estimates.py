"""Estimate tokens and disk space from the sizes of the source files."""

from collections.abc import Iterable
from pathlib import Path

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.staging import Stream
from gpt2_repro.data.sources.base import SourceFile
from gpt2_repro.data.sources.local_files import LocalFile
from gpt2_repro.data.sources.token_files import TOKENS, UINT16


# Bytes of text per byte of the file: 1.6 in FineWeb's parquet (46 GB in 28.5 GB); for English prose 2.7 with gzip and
# 3 with zstd.
TEXT_PER_BYTE = {".parquet": 1.6, ".gz": 2.7, ".zst": 3.0}
BYTES_PER_TOKEN = 4.5  # for English web text and GPT-2's tokenizer: 46.0 GB have 9.95B tokens


def text_bytes(files: Iterable[SourceFile]) -> float:
    """Return the bytes of text in files; for compressed files, an estimate."""
    total = 0.0
    for file in files:
        suffix = Path(file.name).suffix
        total += file.size * TEXT_PER_BYTE.get(suffix, 1.0)
    return total


def expected_tokens(files: Iterable[SourceFile], args: DataArguments) -> float:
    """Estimate the number of tokens in files."""
    bytes_per_token = BYTES_PER_TOKEN
    if args.tokenizer == "char":
        bytes_per_token = 1
    tokens = 0.0
    text_files: list[SourceFile] = []
    for file in files:
        if file.name.endswith(TOKENS):
            tokens += file.size / UINT16.itemsize
        else:
            text_files.append(file)
    return tokens + text_bytes(text_files) / bytes_per_token


def staged_bytes(stream: Stream, args: DataArguments, itemsize: int) -> float:
    """Estimate the disk space for the staged tokens and the downloads of a stream.

    `itemsize` is the number of bytes per token id.
    """
    downloads = 0
    has_local_tokens = False
    for file in stream.files:
        is_local = isinstance(file, LocalFile)
        if not is_local:
            downloads += file.size
        elif file.name.endswith(TOKENS):
            has_local_tokens = True  # they are not copied
    needed = 0.0
    if not has_local_tokens:
        needed = itemsize * min(expected_tokens(stream.files, args), stream.limit)
    if args.validation_text and args.split == "hash":  # downloads are kept, to read them again
        needed += downloads
    return needed


def row_bytes(stream: Stream, args: DataArguments, itemsize: int) -> float:
    """Estimate the disk space for the rows of a stream."""
    return itemsize * min(expected_tokens(stream.files, args), stream.limit)
