"""Sources with a name: where they lie, how they are read, and what they cost in bytes, tokens and time."""

import dataclasses

from gpt2_repro.data.sources.base import TextForm
from gpt2_repro.formatting import duration, size


# Text a second that one of two workers prepares, of text that no worker has seen before: 91 MB/s of both,
# python benchmarks/data_preparation.py --small 1, 2026-11-21, 2 cores of an AMD EPYC (benchmarks/RESULTS.md).
TEXT_RATE = 45e6
LINE_RATE = 100e6  # bytes a second, of a line of 1 Gbit/s


@dataclasses.dataclass(frozen=True)
class Size:
    """Bytes and tokens of a preset.

    Args:
        download: bytes of the training files.
        text: bytes of their text in UTF-8, 0 for tokens.
        tokens: of GPT-2, about.
        file: bytes of the largest file.
    """

    download: float
    text: float
    tokens: float
    file: float


@dataclasses.dataclass(frozen=True)
class Preset:
    """A dataset of the Hub.

    Args:
        repository: its id.
        train, validation: patterns of paths in the repository; no validation where it brings none of its own.
        about: one line.
        form: how rows become documents.
    """

    repository: str
    train: str
    about: str
    size: Size
    validation: str = ""
    form: TextForm = TextForm()

    @property
    def downloads(self) -> float:
        """Bytes of text files that are on disk at once. Files of tokens are staged as they are."""
        return 0 if self.train.endswith(".bin") else 2 * self.size.file


# Paths, rows and bytes as the repositories' listings and cards gave them in 2024 to 2026; tokens of GPT-2 by llm.c's
# shards (FineWeb 10.36B, Edu 9,953,989,344), nanoGPT's readme (OpenWebText 9,040,017,095), others estimated.
PRESETS = {
    "fineweb-10bt": Preset(
        "HuggingFaceFW/fineweb",
        "sample/10BT/*.parquet",
        "web text; the data of llm.c's published curves",
        Size(download=30.64e9, text=47e9, tokens=10.36e9, file=2.15e9),
    ),
    "fineweb-edu-10bt": Preset(
        "HuggingFaceFW/fineweb-edu",
        "sample/10BT/*.parquet",
        "web text chosen as educational",
        Size(download=28.52e9, text=45.97e9, tokens=9.95e9, file=2.15e9),
    ),
    "fineweb-edu-100bt": Preset(
        "HuggingFaceFW/fineweb-edu",
        "sample/100BT/*.parquet",
        "the same, ten times as much",
        Size(download=286.4e9, text=463e9, tokens=100e9, file=2.15e9),
    ),
    "openwebtext": Preset(
        "Skylion007/openwebtext",
        "plain_text/train-*.parquet",
        "an open copy of GPT-2's own WebText",
        Size(download=24.19e9, text=39.74e9, tokens=9.04e9, file=0.31e9),
    ),
    "wikitext-103": Preset(
        "Salesforce/wikitext",
        "wikitext-103-raw-v1/train-*.parquet",
        "Wikipedia's good articles, a document a page",
        Size(download=314.1e6, text=539e6, tokens=118e6, file=157e6),
        validation="wikitext-103-raw-v1/validation-*.parquet",
        form=TextForm(first_row=" = "),
    ),
    "tinystories": Preset(
        "roneneldan/TinyStories",
        "data/train-*.parquet",
        "short stories in the words of a small child, written by GPT-3.5 and GPT-4",
        Size(download=990.8e6, text=1.903e9, tokens=474e6, file=249e6),
        validation="data/validation-*.parquet",
    ),
    "pg19": Preset(
        "emozilla/pg19",
        "data/train-*.parquet",
        "28,602 books of Project Gutenberg from before 1919",
        Size(download=6.5e9, text=11.45e9, tokens=2.8e9, file=0.31e9),
        validation="data/validation-*.parquet",
    ),
    "fineweb-10bt-tokens": Preset(
        "kjj0/fineweb10B-gpt2",
        "fineweb_train_*.bin",
        "fineweb-10bt as llm.c's shards of GPT-2 ids, with its validation shard",
        Size(download=20.5e9, text=0, tokens=10.26e9, file=0.2e9),
        validation="fineweb_val_*.bin",
    ),
    "fineweb-edu-10bt-tokens": Preset(
        "kjj0/finewebedu10B-gpt2",
        "finewebedu_train_*.bin",
        "fineweb-edu-10bt as llm.c's shards of GPT-2 ids, with its validation shard",
        Size(download=19.7e9, text=0, tokens=9.85e9, file=0.2e9),
        validation="finewebedu_val_*.bin",
    ),
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
        minutes = max(1, round(max(preset.size.download / LINE_RATE, preset.size.text / TEXT_RATE / num_proc) / 60))
        own = "; brings validation: --split source" if preset.validation else ""
        folder = 2 * preset.size.tokens
        peak = peak_bytes(staged=folder, rows=folder, downloads=preset.downloads)
        lines.append(
            f"{name:24} {size(preset.size.download):>9} {preset.size.tokens / 1e9:7.2f}B {size(folder):>8} "
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
