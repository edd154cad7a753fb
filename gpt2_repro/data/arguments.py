"""The recipe section `data:`: which text, which tokenizer, how it becomes rows; and how that is carried out."""

import dataclasses
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from gpt2_repro.batch_plan import TokenCount
from gpt2_repro.errors import UserError


def option(default: Any, help: str, **keywords: Any) -> Any:
    """A field with its help text and further keywords of argparse. A list begins empty."""
    metadata = {"help": help, **keywords}
    if isinstance(default, list):
        return dataclasses.field(default_factory=list, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass
class DataArguments:
    """Where the tokens come from and what form they take. Recorded in the manifest of the prepared folder."""

    source: str = option(
        "fineweb-10bt",
        "A name of --list_sources, OWNER/NAME[:CONFIG][@REVISION] of the Hub, or a glob; #COLUMN names its text column. "
        "Several with weights in tokens are mixed: fineweb-edu-10bt=0.9,pg19=0.1.",
    )
    data_files: list[str] = option(
        [],
        "Your own text in place of the source: files, folders or globs of .txt .md .json .jsonl .csv .parquet .bin.",
    )
    text_column: str = option("text", "Key or column that holds the document in .jsonl, .csv, .parquet.")
    sample_by: Literal["document", "paragraph", "line"] = option("document", "What is a document in a .txt file.")
    source_split: str = option("train", "The split to take of a Hub dataset that is named by its id.")
    tokenizer: str = option(
        "openai-community/gpt2",
        "A Hub id, a folder, train:N for a BPE of N ids (train: by the size of the text), or char.",
    )
    dataset_dir: str = option("", "The prepared folder. (default: data/ and the name of the files or the source)")
    packing: Literal["concat", "wrap"] = option(
        "concat", "concat joins documents and cuts rows of one length; wrap cuts each document alone."
    )
    sequence_length: int = option(1024, "Tokens that a row trains, with packing wrap at most.")
    min_length: int = option(0, "Packing wrap drops windows that would train fewer tokens than this.")
    separator: Literal["before", "after", "none"] = option("before", "Where a document has the end-of-text id.")
    split: Literal["head", "hash", "source"] = option(
        "head",
        "Validation documents: the first, by a hash of the text, or the source's own (`val` in the file's name).",
    )
    validation_tokens: TokenCount = option(
        TokenCount(100_000_000), "Tokens held out by the split head (at most 10 %), and of each further set at most."
    )
    validation_fraction: float = option(0.01, "Share of the documents held out by the split hash.")
    split_seed: int = option(2357, "Seed of the split hash.")
    validation_text: bool = option(False, "Also write the validation documents to text/validation.jsonl.")
    validation_sets: list[str] = option([], "Further validation sets, as NAME=SOURCE: books=pg19 mine='notes/*.txt'.")
    max_tokens: TokenCount = option(TokenCount(0), "Stop after this many tokens of the source; 0 takes them all.")

    def __post_init__(self) -> None:
        self.data_files = [text.rstrip("/") or text for text in self.data_files]
        self.dataset_dir = self.dataset_dir or default_folder(self)
        if self.packing != "wrap" and self.min_length:
            raise UserError(f"--min_length {self.min_length} is for --packing wrap: leave it out")
        limits = {"sequence_length": (1, 2**31), "min_length": (0, self.sequence_length), "split_seed": (0, 2**64 - 1)}
        for name, (least, most) in limits.items():
            if not least <= getattr(self, name) <= most:
                fix = f"such as --{name} {getattr(type(self), name)}"
                raise UserError(f"--{name} {getattr(self, name)} must be from {least} to {most}, {fix}")
        if not 0 < self.validation_fraction < 1:
            fix = "such as --validation_fraction 0.01"
            raise UserError(f"--validation_fraction {self.validation_fraction} must be between 0 and 1, {fix}")


def default_folder(data: DataArguments) -> str:
    """Return data/ and the name of the files or the source, "" if nothing is named.

    books/shakespeare.txt.gz gives data/shakespeare; books, 'books/*.txt' and several files of books give data/books.
    """
    texts = data.source.split(",") if data.source != "files" else []
    if data.data_files:
        texts = [os.path.commonprefix(data.data_files) or data.data_files[0]]
    names = []
    for text in texts:
        path = Path(re.split(r"[*?[#@:=]", text)[0])
        name = path.resolve().name if path.is_dir() else path.name.partition(".")[0]
        names.append(re.sub(r"[^\w.-]+", "-", name).strip("-."))
    return "data/" + "+".join(names) if any(names) else ""


def name_folder(data: DataArguments, typed: Collection[str]) -> DataArguments:
    """Return the section with a folder of its own if a source or files were typed, and no folder."""
    if "dataset_dir" in typed or not {"source", "data_files"} & set(typed):
        return data
    return dataclasses.replace(data, dataset_dir="")


@dataclasses.dataclass(frozen=True)
class PreparationOptions:
    """How a preparation is carried out. Nothing of it changes the result. The metadata is argparse's."""

    num_proc: int = option(1, "Worker processes.", type=int)
    encoder: Literal["auto", "fastokens", "tokenizers"] = option(
        "auto", "auto takes fastokens for byte-level BPE.", choices=["auto", "fastokens", "tokenizers"]
    )
    max_bad_documents: int = option(0, "Skip and count rows without readable text, up to so many.", type=int)
    keep_downloads: bool = option(False, "Leave files of the Hub in its cache.", action="store_true")
    overwrite: bool = option(False, "Replace a finished folder, once its successor is whole.", action="store_true")

    def __post_init__(self) -> None:
        if self.num_proc < 1:
            raise UserError(f"--num_proc {self.num_proc} must be at least 1, such as --num_proc 2")
        if self.max_bad_documents < 0:
            fix = "such as --max_bad_documents 10"
            raise UserError(f"--max_bad_documents {self.max_bad_documents} must be at least 0, {fix}")
