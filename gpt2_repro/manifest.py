"""The manifest of a prepared folder: what was asked for, counts and hashes. `manifest.json` is this object as JSON."""

import dataclasses
from typing import Any

from gpt2_repro.typed_json import from_json


MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class RowForm:
    """How documents are cut into rows."""

    packing: str
    sequence_length: int
    min_length: int
    separator: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitCounts:
    """What a split holds."""

    documents: int
    empty_documents: int  # not counted in `documents`
    tokens: int
    sources: dict[str, dict[str, int]] | None = None  # the same three counts of each source of a mixture
    rows: int
    row_tokens: int  # targets
    dropped_tokens: int  # targets in no row


@dataclasses.dataclass(frozen=True)
class ReadCounts:
    """What was read from all files, for whichever split."""

    documents: int
    text_bytes: int
    longest_document_tokens: int
    bad_documents: int
    bad_examples: list[str]


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of rows."""

    name: str
    rows: int
    targets: int  # ids but the first of each row
    largest_id: int
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """See docs/data.md for every field. A key that was added later has a default, so that older folders are read."""

    request: dict[str, Any]  # the recipe's section `data:` without dataset_dir
    source: dict[str, Any]  # its keys depend on the source; `name` is always there
    validation_sets: dict[str, dict[str, Any]]
    tokenizer_sha256: str
    vocab_size: int
    largest_id: int
    bytes_per_token: int
    counts: dict[str, SplitCounts]
    read: ReadCounts
    sha256: dict[str, str]  # of each split
    shards: dict[str, list[Shard]]  # of each split
    files: dict[str, str]  # path: sha256 of every other file
    versions: dict[str, str]
    reference_losses: dict[str, float] | None = None

    @property
    def form(self) -> RowForm:
        return from_json(RowForm, self.request)

    def to_json(self) -> dict[str, Any]:
        """The object of manifest.json, its keys in the order of the fields, without those that are None."""
        return dataclasses.asdict(
            self, dict_factory=lambda items: {key: value for key, value in items if value is not None}
        )
