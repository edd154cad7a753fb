"""Divide local files of text or tokens into parts, which workers read."""

import dataclasses
from pathlib import Path

from gpt2_repro.data.sources.base import Part, SourceFile, TextForm
from gpt2_repro.data.sources.parquet_files import parquet_parts
from gpt2_repro.data.sources.text_files import COMPRESSIONS, TextPart, is_json_array
from gpt2_repro.data.sources.token_files import read_header


KINDS = (".txt", ".md", ".json", ".jsonl", ".csv", ".parquet")
PART_BYTES = 2**25  # bytes of text per part: a worker needs a quarter of a second


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
