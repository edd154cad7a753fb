"""The recipe section `data:`: which text, which tokenizer, how it becomes rows."""

import dataclasses
from typing import Literal

from gpt2_repro.errors import UserError
from gpt2_repro.recipe import TokenCount


@dataclasses.dataclass
class DataArguments:
    """Where the tokens come from and what form they take. Recorded in the manifest of the prepared folder."""

    source: str = dataclasses.field(
        default="fineweb-10bt",
        metadata={
            "help": "A source: fineweb-10bt, fineweb-edu-10bt (Hub), embedded (Python's own documentation), files "
            "(data_files)."
        },
    )
    data_files: list[str] = dataclasses.field(
        default_factory=list,
        metadata={
            "help": "Globs of your own text, in place of the source: .txt (a document a file), .jsonl and .parquet "
            "(a document a row, in the column `text`), each also .gz."
        },
    )
    tokenizer: str = dataclasses.field(
        default="openai-community/gpt2",
        metadata={"help": "A Hub id, a local folder, or train:N for a byte-level BPE of N ids trained on the source."},
    )
    dataset_dir: str = dataclasses.field(
        default="data/fineweb-10bt",
        metadata={"help": "The prepared folder. Typed for train.py, it names the data whatever its source."},
    )
    packing: Literal["concat", "wrap"] = dataclasses.field(
        default="concat",
        metadata={
            "help": "concat joins the documents and cuts rows of one length; wrap cuts each document alone into windows "
            "of at most sequence_length."
        },
    )
    sequence_length: int = dataclasses.field(
        default=1024,
        metadata={"help": "Tokens that one row trains, with packing wrap at most; a row on disk holds one more."},
    )
    min_length: int = dataclasses.field(
        default=0, metadata={"help": "Packing wrap drops windows that would train fewer tokens than this."}
    )
    separator: Literal["before", "after", "none"] = dataclasses.field(
        default="before", metadata={"help": "Where the end-of-text id goes: before or after each document, or none."}
    )
    split: Literal["head", "hash"] = dataclasses.field(
        default="head",
        metadata={"help": "Validation documents: the first ones (head, as llm.c) or by a seeded hash of the text."},
    )
    validation_tokens: TokenCount = dataclasses.field(
        default=TokenCount(100_000_000), metadata={"help": "Tokens held out by the split head, by whole documents."}
    )
    validation_fraction: float = dataclasses.field(
        default=0.01, metadata={"help": "Share of the documents held out by the split hash."}
    )
    split_seed: int = dataclasses.field(default=2357, metadata={"help": "Seed of the split hash."})
    validation_text: bool = dataclasses.field(
        default=False,
        metadata={"help": "Also write the validation documents to text/validation.jsonl, for evaluation from them."},
    )
    max_tokens: TokenCount = dataclasses.field(
        default=TokenCount(0), metadata={"help": "Stop after this many tokens of the source; 0 takes them all."}
    )

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise UserError(f"--sequence_length {self.sequence_length} must be at least 1")
        if self.packing != "wrap" and self.min_length:
            raise UserError(
                f"--min_length {self.min_length} belongs to --packing wrap: {self.packing} cuts all rows to one length; "
                "leave it out"
            )
        if not 0 <= self.min_length <= self.sequence_length:
            raise UserError(
                f"--min_length {self.min_length} must lie between 0 and --sequence_length {self.sequence_length}, the "
                "longest window"
            )
        if not 0 < self.validation_fraction < 1:
            raise UserError(f"--validation_fraction {self.validation_fraction} must lie between 0 and 1")
        if not 0 <= self.split_seed < 2**64:
            raise UserError(f"--split_seed {self.split_seed} must lie between 0 and 2**64")
