"""Divide local files of text or tokens into parts, which workers read."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpt2_repro.data.sources.base import Batch, Part, SourceFile, TextForm, WholeFile
from gpt2_repro.data.sources.parquet_files import parquet_parts
from gpt2_repro.data.sources.text_files import COMPRESSIONS, TextPart, is_json_array
from gpt2_repro.data.sources.token_files import read_header


KINDS = (".txt", ".md", ".json", ".jsonl", ".csv", ".parquet")
PART_BYTES = 2**25  # bytes of text per part: a worker needs a quarter of a second
FEW_PARTS = 100  # small files are not joined to fewer parts than this, so that all workers have work


def kind_of(path: Path) -> str:
    """Return the extension of a file, such as .txt for both a.txt and a.txt.gz."""
    return (Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix).lower()


@dataclasses.dataclass(frozen=True)
class LocalFile(SourceFile):
    """A local file: text in one of the formats in KINDS, or tokens (.bin)."""

    name: str
    size: int
    form: TextForm = TextForm()

    def identity(self) -> tuple[str, ...]:
        """Return a key that is equal for all links to the same file."""
        found = Path(self.name).stat()
        return str(found.st_dev), str(found.st_ino), "" if self.name.endswith(".bin") else self.form.text_column

    def parts(self) -> list[Part]:
        path = Path(self.name)
        kind = kind_of(path)
        if kind == ".bin":
            return [read_header(path)]
        if kind == ".parquet":
            return parquet_parts(path, self.size, self.form, PART_BYTES)
        if kind == ".md":
            kind = ".txt"
        if kind == ".json" and not is_json_array(path):
            kind = ".jsonl"
        by_line = kind == ".jsonl" or (kind == ".txt" and self.form.sample_by == "line")
        whole = max(1, self.size)
        step = PART_BYTES if by_line and path.suffix not in COMPRESSIONS else whole
        ranges = [(start, min(start + step, self.size)) for start in range(0, whole, step)]
        return [TextPart(self.name, kind, self.form, start, stop, stop - start) for start, stop in ranges]


@dataclasses.dataclass(frozen=True)
class JoinedFiles(WholeFile):
    """Consecutive small files, read in a single part to save time."""

    name: str
    size: int
    files: Sequence[SourceFile]

    def read(self) -> Iterator[Batch]:
        for file in self.files:
            for part in file.parts():
                yield from part.read()


def join_small(files: Sequence[SourceFile]) -> dict[str, SourceFile]:
    """Join consecutive small text files.

    Returns a dict in the order of the files. Each key has the index of the first file, and if several files are joined,
    their number.
    """
    limit = min(PART_BYTES, sum(file.size for file in files) // FEW_PARTS)
    groups: list[list[SourceFile]] = []
    held = 0
    for file in files:
        joinable = isinstance(file, LocalFile) and kind_of(Path(file.name)) != ".bin"
        size = file.size if joinable else limit + 1
        held += size
        if not groups or held > limit:
            groups.append([])
            held = size
        groups[-1].append(file)
    joined: dict[str, SourceFile] = {}
    first = 0
    for group in groups:
        name, size = f"{group[0].name} to {group[-1].name}", sum(file.size for file in group)
        key = f"{first:05d}" if len(group) == 1 else f"{first:05d}x{len(group)}"
        joined[key] = group[0] if len(group) == 1 else JoinedFiles(name, size, group)
        first += len(group)
    return joined
