"""Sources that have a name, with their sizes, and the time to prepare them."""

import dataclasses
from pathlib import Path

import yaml

from gpt2_repro.data.sources.base import TextForm
from gpt2_repro.formatting import duration, size


# Text a second that one of two workers prepares, of text that no worker has seen before: 91 MB/s of both,
# python benchmarks/data_preparation.py --small 1, 2026-11-21, 2 cores of an AMD EPYC (benchmarks/RESULTS.md).
TEXT_RATE = 45e6
LINE_RATE = 100e6  # bytes a second, of a line of 1 Gbit/s


@dataclasses.dataclass(frozen=True)
class Preset:
    """A dataset of the Hub. presets.yaml describes the fields."""

    about: str
    repository: str
    train: str
    download: float
    text: float
    tokens: float
    largest_file: float
    validation: str = ""
    first_row: str = ""

    @property
    def form(self) -> TextForm:
        """How rows become documents."""
        return TextForm(first_row=self.first_row)

    @property
    def downloads(self) -> float:
        """Bytes of text files that are on disk at once. Files of tokens are staged as they are."""
        return 0 if self.train.endswith(".bin") else 2 * self.largest_file


PRESETS = {
    name: Preset(**fields)
    for name, fields in yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text()).items()
}

OTHER_SOURCES = {
    "tiny-shakespeare": "40,000 lines of plays, one document, with nanoGPT's validation part: 1.1 MB, 338 K tokens",
    "embedded": "the English documentation inside every CPython: 2 MB, no network, another text for each version",
    "files": "your own text or tokens: --data_files GLOB",
}
FORMS = {
    "OWNER/NAME[:CONFIG][@REVISION]": "any other dataset of the Hub whose files are .parquet, .jsonl, .csv or .txt",
    "SOURCE=WEIGHT,SOURCE=WEIGHT": "a mixture, weights in tokens; it ends with the source that ends first",
}


def table(num_proc: int) -> str:
    """The sources as lines of text: download, tokens, disk and time of each preset with so many workers."""
    lines = [f"{'source':24} {'download':>9} {'tokens':>8} {'disk':>8} {'peak':>8}  {'time':>10}  about"]
    for name, preset in PRESETS.items():
        minutes = max(1, round(max(preset.download / LINE_RATE, preset.text / TEXT_RATE / num_proc) / 60))
        own = "; brings validation: --split source" if preset.validation else ""
        folder = 2 * preset.tokens
        peak = peak_bytes(staged=folder, rows=folder, downloads=preset.downloads)
        lines.append(
            f"{name:24} {size(preset.download):>9} {preset.tokens / 1e9:7.2f}B {size(folder):>8} "
            f"{size(peak):>8}  {duration(60 * minutes):>10}  {preset.about}{own}"
        )
    lines += ["", *(f"{name}\n    {about}" for name, about in (OTHER_SOURCES | FORMS).items()), ""]
    lines.append(
        "disk: the finished folder, 2 bytes a token; peak: while it is made, with the staged tokens. "
        f"time: with {num_proc} workers at {TEXT_RATE / 1e6:.0f} MB of text a second each (benchmarks/RESULTS.md) and "
        f"{LINE_RATE / 1e6:.0f} MB a second of network, whichever is slower."
    )
    return "\n".join(lines)


def peak_bytes(*, staged: float, rows: float, downloads: float) -> float:
    """Return the most bytes on disk during a preparation.

    Tokens are staged while text files are downloaded; all of them stay on disk until the rows are cut.
    """
    return 1.02 * (staged + max(rows, downloads))  # 2 % for lengths, notes and texts
