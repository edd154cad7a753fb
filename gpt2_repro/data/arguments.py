"""Define the recipe section `data:` and the options of prepare_data.py."""

import dataclasses
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import ClassVar, Literal

from gpt2_repro.data.sources.mixture import MixturePart, parse_mixture
from gpt2_repro.errors import UserError
from gpt2_repro.fields import changeable, fixed, option, unnamed
from gpt2_repro.files import expand
from gpt2_repro.tokens import TokenCount


MOST_WORKERS = 1024  # the largest machines that can be rented have fewer cores
MOST_NAMES = 3  # sources of a mixture in the name of its default folder


@dataclasses.dataclass
class DataArguments:
    """Fields of the recipe section `data:`, which set the text, tokenizer and rows."""

    _argument_group_name: ClassVar[str] = "section data of the recipe"

    source: str = changeable(
        "fineweb-10bt",
        "A name from --list_sources, a Hub dataset OWNER/NAME[:CONFIG][@REVISION], or a glob of local files. Add "
        "#COLUMN to select the text column. For a mixture, add the shares of the training tokens, and xN to use a "
        "source N times at most: fineweb-10bt=0.7,own/*.jsonl=0.3x2.",
        common=True,
    )
    data_files: list[str] = changeable(
        [],
        "Your own text, instead of --source: files, folders or globs of .txt .md .json .jsonl .csv .parquet .bin .ds.",
        common=True,
    )
    text_column: str = changeable("text", "Key or column with the text in .json, .jsonl, .csv and .parquet files.")
    front_matter: Literal["drop", "keep"] = changeable(
        "drop",
        "The YAML block between --- lines at the start of a .md file: leave it out, or train it as text (keep).",
    )
    source_split: str = changeable("train", "The split to read from a Hub dataset OWNER/NAME.")
    tokenizer: str = fixed(
        "openai-community/gpt2",
        "Hub id or folder of a tokenizer, char (one id per character), train:N (train a BPE with N ids), train "
        "(train a BPE with a size that suits the text), or none:N (N ids without text).",
        common=True,
    )
    dataset_dir: str = unnamed(
        "", "Prepared folder. (default: data/NAME, named after the files or source)", common=True
    )
    packing: Literal["concat", "wrap"] = changeable("concat", "Cut rows from the joined documents, or each document.")
    sequence_length: int = fixed(
        1024, "Predicted tokens (targets) per row. --packing wrap also makes shorter rows.", common=True
    )
    min_length: int = changeable(0, "With --packing wrap, drop rows with fewer predicted tokens than this.")
    separator: Literal["before", "after", "none"] = changeable("before", "Add end-of-text before or after documents.")
    split: Literal["head", "hash", "source"] = changeable(
        "head",
        "Validation documents: the first documents (head), those that a hash of the text chooses (hash), or the "
        "validation files of the source, such as files with val or validation in their name or folder (source).",
    )
    validation_tokens: TokenCount = changeable(
        TokenCount(100_000_000),
        "Tokens that --split head uses for validation (at most 10 % of all), and the maximum of each validation set.",
    )
    validation_fraction: float = changeable(0.01, "Fraction of the documents that --split hash uses for validation.")
    split_seed: int = changeable(2357, "Seed of the hash that --split hash uses.")
    validation_text: bool = option(False, "Also write the text of the validation split to text/validation.jsonl.")
    validation_sets: list[str] = changeable([], "More validation sets: NAME=SOURCE, such as books=pg19 mine='*.txt'.")
    max_tokens: TokenCount = changeable(
        TokenCount(0),
        "Stop after reading this many tokens. In a mixture, tokens of the training split. 0: no limit.",
        common=True,
    )

    @property
    def mixture(self) -> list[MixturePart]:
        """The parts of the mixture, or an empty list for a single source."""
        if self.data_files:
            return []
        return parse_mixture(self.source)

    def __post_init__(self) -> None:
        self.data_files = [_short_path(text) for text in self.data_files]
        parse_mixture(self.source)  # raises UserError
        self.dataset_dir = expand(self.dataset_dir) or default_folder(self)
        if self.packing != "wrap" and self.min_length:
            raise UserError(f"--min_length {self.min_length} needs --packing wrap.")
        if self.sequence_length < 1 or not 0 <= self.min_length <= self.sequence_length:
            raise UserError("--sequence_length must be at least 1, and --min_length from 0 to --sequence_length.")
        if not 0 < self.validation_fraction < 1:
            raise UserError(f"--validation_fraction {self.validation_fraction} is not between 0 and 1.")


def default_folder(data: DataArguments) -> str:
    """Return the default folder data/NAME, or "" if neither files nor source are set.

    For example, books/shakespeare.txt.gz gives data/shakespeare, and 'books/*.txt' gives data/books. The names of two
    or three files in the working directory are joined: a.txt, b.txt and c.txt give data/a+b+c. Other lists of files
    give the name of the common folder. A mixture has the names of its sources: data/fineweb-10bt+own.
    """
    mixture = data.mixture
    if mixture:
        return _folder_of_mixture([part.name for part in mixture])
    texts = data.data_files
    if not texts and data.source != "files":
        texts = [data.source]
    in_working_directory = not any("/" in text for text in texts)
    if len(texts) > 3 or (len(texts) > 1 and not in_working_directory):
        folders = [os.path.normpath(Path(text).absolute().parent) for text in texts]
        texts = [os.path.commonpath(folders)]
    names = [_name_for_folder(text) for text in texts]
    if not any(names):
        return ""
    return "data/" + "+".join(names)


def _folder_of_mixture(sources: list[str]) -> str:
    """Return data/NAME for the sources of a mixture. From the fourth source on, they are only counted."""
    names: list[str] = []
    for source in sources[:MOST_NAMES]:
        names.append(_name_for_folder(source) or "files")
    more = len(sources) - MOST_NAMES
    if more > 0:
        names.append(f"{more}-more")
    return "data/" + "+".join(names)


def _name_for_folder(text: str) -> str:
    """Return the name of a file, folder, glob or source, without extensions and special characters."""
    path = Path(text)
    if not path.exists():
        before_wildcard = re.split(r"[*?[#@:]", text)[0]
        path = Path(before_wildcard)
    name = path.name.lstrip(".").partition(".")[0]
    if path.is_dir():
        name = path.resolve().name
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")


def _short_path(text: str) -> str:
    """Return a path with variables replaced, without ./ at the start and / at the end."""
    path = expand(text).rstrip("/") or text
    return re.sub(r"^(\./+)+(?=.)", "", path)


def name_folder(data: DataArguments, typed: Collection[str]) -> DataArguments:
    """Return a copy of `data` with the default dataset_dir, or `data` itself.

    The copy is returned if --source or --data_files was passed without --dataset_dir. The default folder is named
    after the source or the files. `typed` has the names of the options from the command line.
    """
    if "dataset_dir" in typed or not {"source", "data_files"} & set(typed):
        return data
    return dataclasses.replace(data, dataset_dir="")


@dataclasses.dataclass(frozen=True)
class PreparationOptions:
    """Options of prepare_data.py that do not change the prepared rows."""

    num_proc: int = option(1, "Number of worker processes.", type=int, common=True)
    encoder: Literal["auto", "tokenizers"] = option(
        "auto",
        "Library that encodes the text. auto uses fastokens for byte-level BPE, and tokenizers otherwise.",
        choices=["auto", "tokenizers"],
    )
    max_bad_documents: int = option(0, "Skip at most this many files and rows without readable text.", type=int)
    keep_downloads: bool = option(False, "Keep downloaded files in the local Hugging Face cache.", action="store_true")
    overwrite: bool = option(
        False, "Replace an existing folder when the new folder is complete.", action="store_true", common=True
    )

    def __post_init__(self) -> None:
        if not 1 <= self.num_proc <= MOST_WORKERS or self.max_bad_documents < 0:
            raise UserError(f"--num_proc must be from 1 to {MOST_WORKERS}, and --max_bad_documents at least 0.")
