"""Define the named sources, and estimate their sizes and preparation times."""

import dataclasses

from gpt2_repro.files import read_table
from gpt2_repro.text import Cell, Table, duration, size


# Bytes of text per second and worker, for text that the worker has not encoded before. Two workers together reach
# 91 MB/s: python benchmarks/data_preparation.py --small 1, 2026-11-21, 2 cores of an AMD EPYC (benchmarks/RESULTS.md).
TEXT_RATE = 45e6
LINE_RATE = 100e6  # bytes per second of download over a line of 1 Gbit/s


@dataclasses.dataclass(frozen=True)
class Preset:
    """A Hub dataset with a short name. presets.yaml describes the fields."""

    about: str
    repository: str
    train: str
    download: float
    text: float
    tokens: float
    largest_file: float
    validation: str = ""

    @property
    def downloads(self) -> float:
        """Maximum disk usage of downloaded text files, in bytes."""
        # `peak_bytes` counts token files as `staged`. Two text files can be on disk at the same time, because the next
        # file is downloaded while one file is tokenized.
        return 0 if self.train.endswith(".bin") else 2 * self.largest_file


_TABLE = read_table(__file__, "presets.yaml")
PRESETS = {name: Preset(**fields) for name, fields in _TABLE["presets"].items()}
OTHER_SOURCES: dict[str, str] = _TABLE["other_sources"]
BY_LANGUAGE: dict[str, str] = _TABLE["by_language"]


def table(num_proc: int) -> str:
    """Return the --list_sources text, with preparation times for `num_proc` workers."""
    shown = Table(["source", "download", "tokens", "disk", "peak", "time", "description"], [])
    for name, preset in PRESETS.items():
        downloading = preset.download / LINE_RATE
        tokenizing = preset.text / TEXT_RATE / num_proc
        minutes = max(1, round(max(downloading, tokenizing) / 60))
        folder = 2 * preset.tokens
        peak = peak_bytes(staged=folder, rows=folder, downloads=preset.downloads)
        about = preset.about
        if preset.validation:
            about += "; has validation files: --split source"
        shown.rows.append(
            [
                Cell(name),
                Cell(size(preset.download), "number"),
                Cell(f"{preset.tokens / 1e9:.2f}B", "number"),
                Cell(size(folder), "number"),
                Cell(size(peak), "number"),
                Cell(duration(60 * minutes), "number"),
                Cell(about),
            ]
        )
    others = OTHER_SOURCES | _TABLE["forms"]
    other_lines = [f"{name}\n    {about}" for name, about in others.items()]
    note = (
        "disk: size of the prepared folder, 2 bytes per token. peak: maximum disk usage, with temporary tokens. "
        f"time: {num_proc} workers tokenize {TEXT_RATE / 1e6:.0f} MB of text per second each (benchmarks/RESULTS.md), "
        f"or the time to download {LINE_RATE / 1e6:.0f} MB per second if that is longer."
    )
    return "\n".join([*shown.lines(), "", *other_lines, "", note])


def peak_bytes(*, staged: float, rows: float, downloads: float) -> float:
    """Return the peak disk usage of a preparation in bytes.

    Args:
        staged: size of the temporary files with token ids.
        rows: size of the files with the rows.
        downloads: maximum disk usage of downloaded text files.
    """
    # Each text file is deleted after use. The temporary files with token ids stay on disk until all rows are cut.
    return 1.02 * (staged + max(rows, downloads))  # 2 % for document lengths, records and texts
