"""Define the manifest of a prepared folder: data settings, counts and hashes."""

import dataclasses
from typing import Any

from gpt2_repro.files import from_json


MANIFEST = "manifest.json"
SPLITS = "dataset_dict.json"  # names the splits, for datasets.load_from_disk


@dataclasses.dataclass(frozen=True)
class RowForm:
    """The options that determine how documents are cut into rows."""

    packing: str
    sequence_length: int
    min_length: int
    separator: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitCounts:
    """How many documents, tokens and rows a split contains."""

    documents: int
    empty_documents: int  # not counted in `documents`
    tokens: int
    rows: int
    row_tokens: int  # targets
    dropped_tokens: int  # targets that are not in a row


@dataclasses.dataclass(frozen=True)
class ReadCounts:
    """Counts of what was read from the source files, summed over all splits."""

    documents: int
    text_bytes: int
    longest_document_tokens: int
    bad_documents: int
    bad_examples: list[str]
    front_matter: int = 0  # documents whose front matter is left out


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file that contains rows of a split."""

    name: str
    rows: int
    targets: int  # all ids except the first of each row
    largest_id: int
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class MixedSource:
    """A source of a mixture, and what the training split has of it."""

    source: str  # as it was passed
    share: float  # requested, of the tokens of the training split
    passes: int  # how often a document may be used at most
    available: int | None  # training tokens of one pass. None if the source was not read to its end
    used: int  # tokens in the training split
    row_tokens: int | None  # targets in its rows. None with --packing concat, which drops less than a row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json. docs/data.md describes every field."""

    request: dict[str, Any]  # the recipe's section `data:` without dataset_dir
    source: dict[str, Any]  # its keys depend on the source; `name` is always present
    validation_sets: dict[str, dict[str, Any]]
    tokenizer_sha256: str
    vocab_size: int
    largest_id: int
    bytes_per_token: int
    counts: dict[str, SplitCounts]
    read: ReadCounts
    sha256: dict[str, str]  # hash of each split
    shards: dict[str, list[Shard]]  # files of each split
    files: dict[str, str]  # path: sha256 of every other file
    versions: dict[str, str]
    reference_losses: dict[str, float] | None = None  # None for long texts
    tokens_by_source: dict[str, dict[str, int]]  # of each split
    mixture: list[MixedSource] | None = None  # None for a single source
    encoding: int  # `tokenization.ENCODING` when the folder was prepared

    @property
    def form(self) -> RowForm:
        return from_json(RowForm, self.request)

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as a dict for manifest.json, without fields that are None."""
        content = dataclasses.asdict(self)
        for key in ("reference_losses", "mixture"):
            if content[key] is None:
                del content[key]
        return content
