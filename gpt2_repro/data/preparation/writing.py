"""Write the files of a prepared folder: rows, tokenizer, validation text, manifest."""

import dataclasses
import hashlib
import itertools
import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gpt2_repro.cli import Progress
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.packing import Block, in_blocks, pack_rows, pack_windows
from gpt2_repro.data.preparation.mixing import Mixture
from gpt2_repro.data.preparation.splits import DocumentCounts, Group
from gpt2_repro.data.preparation.staging import EXAMPLES, StagedPart, Stream
from gpt2_repro.data.prepared import fingerprint_of, request_of
from gpt2_repro.data.reference_losses import MAX_TOKENS, reference_losses
from gpt2_repro.data.rows import open_rows
from gpt2_repro.data.sources.opening import Sources
from gpt2_repro.data.tokenizer import Encoder
from gpt2_repro.errors import UserError
from gpt2_repro.files import read_object, sha256_of, sync, sync_folder, write_whole
from gpt2_repro.manifest import MANIFEST, SPLITS, Manifest, MixedSource, ReadCounts, Shard, SplitCounts
from gpt2_repro.tokenization import ENCODING


logger = logging.getLogger(__name__)

PIECE_TOKENS = 2**22  # tokens in memory at once
BLOCK_IDS = 2**25  # targets per record batch: 64 MiB at 2 bytes per id
SHARD_BLOCKS = 4  # record batches per file: 2**17 rows of 1,025 ids
PACKAGES = ("datasets", "pyarrow", "numpy", "tokenizers")  # the manifest records their versions
NOISY_TOKENS = 2_000  # the loss of a token varies by about 3, so the mean of 2,000 tokens varies by 0.07


def write_folder(
    staging: Path, args: DataArguments, sources: Sources, groups: Sequence[Group | Mixture], encoder: Encoder
) -> None:
    """Write all files of a prepared folder into the subfolder "folder" of `staging`, and the manifest last.

    Raises UserError if a split has no row or an id that is not in the vocabulary.
    """
    folder = staging / "folder"
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted pass
    folder.mkdir()
    counts: dict[str, SplitCounts] = {}
    shards: dict[str, list[Shard]] = {}
    tokens_by_source: dict[str, dict[str, int]] = {}
    for group in groups:
        for split, counted in group.counts().items():
            tokens_by_source[split] = counted.tokens_by_source
            shards[split] = _write_split(folder / split, group, counted, args, encoder)
            counts[split] = _count_split(shards[split], counted, args)
        for remark in group.remarks:
            logger.info(remark)
    if args.validation_text:
        _write_validation_text(folder / "text", groups, encoder)
    names = {"splits": sorted(counts)}
    (folder / SPLITS).write_text(json.dumps(names), encoding="utf-8")  # for load_from_disk
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    for path in (staging / "tokenizer").iterdir():  # copytree would hide a full disk in shutil.Error
        shutil.copyfile(path, tokenizer / path.name)
    losses = None
    if counts["train"].tokens <= MAX_TOKENS:
        train = open_rows(folder / "train")
        validation = open_rows(folder / "validation")
        losses = reference_losses(train.joined(), validation.joined(), encoder.vocab_size)
    largest_id = 0
    split_hashes: dict[str, str] = {}
    for split, shards_of_split in shards.items():
        split_hashes[split] = split_hash(shards_of_split)
        for shard in shards_of_split:
            largest_id = max(largest_id, shard.largest_id)
    described = sources.described()
    manifest = Manifest(
        request=request_of(args),
        source=described["training"],
        validation_sets=described["validation_sets"],
        tokenizer_sha256=sha256_of(tokenizer / "tokenizer.json"),
        vocab_size=encoder.vocab_size,
        largest_id=largest_id,
        bytes_per_token=encoder.dtype.itemsize,
        counts=counts,
        read=_count_read(groups),
        sha256=split_hashes,
        shards=shards,
        files=_hash_other_files(folder),
        versions=_versions(encoder),
        reference_losses=losses,
        tokens_by_source=tokens_by_source,
        mixture=_mixed_sources(groups),
        encoding=ENCODING,
    )
    # Written last: the manifest marks the folder as complete.
    content = json.dumps(manifest.to_json(), indent=2)
    write_whole(folder / MANIFEST, content + "\n")
    sync_folder(folder)


def _mixed_sources(groups: Sequence[Group | Mixture]) -> list[MixedSource] | None:
    """Return the sources of the mixture, or None for a single source."""
    for group in groups:
        if isinstance(group, Mixture):
            return group.described()
    return None


def _hash_other_files(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file in a folder and its subfolders that has no rows."""
    hashes: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".arrow":
            name = str(path.relative_to(folder))
            hashes[name] = sha256_of(path)
    return hashes


def _versions(encoder: Encoder) -> dict[str, str]:
    """Return the versions of the packages on which the rows depend."""
    packages = {*PACKAGES, encoder.engine}
    return {name: version(name) for name in sorted(packages)}


def _count_read(groups: Sequence[Group | Mixture]) -> ReadCounts:
    """Return the counts over all files, for any split."""
    documents = 0
    text_bytes = 0
    longest = 0
    bad = 0
    bad_examples: list[str] = []
    front_matter = 0
    streams: list[Stream] = []
    for group in groups:
        streams += group.streams
    for stream in streams:
        for part in stream.parts:
            summary = part.summary
            documents += summary.documents
            text_bytes += summary.text_bytes
            longest = max(longest, summary.longest)
            bad += summary.bad
            bad_examples += summary.bad_examples
            front_matter += summary.front_matter
    return ReadCounts(
        documents=documents,
        text_bytes=text_bytes,
        longest_document_tokens=longest,
        bad_documents=bad,
        bad_examples=bad_examples[:EXAMPLES],
        front_matter=front_matter,
    )


def _write_split(
    folder: Path, group: Group | Mixture, counted: DocumentCounts, args: DataArguments, encoder: Encoder
) -> list[Shard]:
    """Write the rows of one split, and check that the split can be used."""
    split = folder.name
    length = args.sequence_length
    with Progress(total=counted.tokens, desc=f"pack {split}", unit="tok", unit_scale=True) as bar:
        pieces = _read(group, split, args, bar)
        if args.packing == "wrap":
            rows = pack_windows(pieces, length, min_length=args.min_length)
            row_length = None
            option = "min_length"
            fewest_targets = args.min_length
        else:
            rows = pack_rows(pieces, length)
            row_length = length + 1
            option = "sequence_length"
            fewest_targets = length
        # The rows of each record batch depend only on the recipe, so files are reproducible bit by bit.
        rows_per_block = max(1, BLOCK_IDS // length)
        blocks = in_blocks(rows, rows_per_block)
        shards = write_rows(folder, blocks, encoder.dtype, row_length)
    if not shards:
        few = f"The {split} split has {counted.tokens:,} tokens, but a row needs {fewest_targets + 1:,}"
        raise UserError(f"{few}. Pass more text, another --split or size of the split, or a smaller --{option}.")
    largest = max(shard.largest_id for shard in shards)
    if largest >= encoder.vocab_size:
        raise UserError(f"The {split} split has the id {largest}, not in the vocabulary. Pass another --tokenizer.")
    targets = sum(shard.targets for shard in shards)
    if split != "train" and targets < NOISY_TOKENS:
        logger.warning("The %s split has only %s tokens, so its loss is noisy.", split, f"{targets:,}")
    return shards


def _count_split(shards: Sequence[Shard], counted: DocumentCounts, args: DataArguments) -> SplitCounts:
    """Return the counts of a split for the manifest."""
    targets = sum(shard.targets for shard in shards)
    # The first id of the split (concat) or of each document (wrap) is not a target.
    first_ids = 1
    if args.packing == "wrap":
        first_ids = counted.documents
    return SplitCounts(
        documents=counted.documents,
        empty_documents=counted.empty_documents,
        tokens=counted.tokens,
        rows=sum(shard.rows for shard in shards),
        row_tokens=targets,
        dropped_tokens=counted.tokens - first_ids - targets,
    )


def _write_validation_text(folder: Path, groups: Sequence[Group | Mixture], encoder: Encoder) -> None:
    """Write the documents of the split `validation` to validation.jsonl."""
    folder.mkdir()
    with (folder / "validation.jsonl").open("w", encoding="utf-8") as out:
        for group in groups:
            if "validation" not in group.splits:
                continue
            for text in _validation_texts(group, encoder):
                line = json.dumps({"text": text}, ensure_ascii=False)
                out.write(line + "\n")


def _validation_texts(group: Group | Mixture, encoder: Encoder) -> Iterator[str]:
    """Yield the documents of the split `validation` in order."""
    open_parts: dict[int, _OpenTexts] = {}  # of each source
    for span in group.spans_of("validation"):
        opened = open_parts.get(span.source_number)
        if opened is None or opened.part is not span.part:
            opened = _OpenTexts(span.part, span.part.texts(), span.part.lengths())
            open_parts[span.source_number] = opened
        for number, length in enumerate(span.lengths.tolist(), start=span.first_document):
            text = opened.texts[number]
            if length != opened.lengths[number]:  # only the beginning of the document is held out
                text = encoder.cut(text, length)
            yield text


@dataclasses.dataclass(frozen=True)
class _OpenTexts:
    """The documents of a part."""

    part: StagedPart
    texts: list[str]
    lengths: np.ndarray  # [documents], in tokens


@dataclasses.dataclass(frozen=True)
class _OpenIds:
    """The mapped ids of a part."""

    part: StagedPart
    ids: np.ndarray


def _read(group: Group | Mixture, split: str, args: DataArguments, bar: Progress) -> Iterator[Block]:
    """Yield the ids and lengths of the documents of a split, a few million ids at a time."""
    open_parts: dict[int, _OpenIds] = {}  # of each source
    for span in group.spans_of(split):
        opened = open_parts.get(span.source_number)
        if opened is None or opened.part is not span.part:
            opened = _OpenIds(span.part, span.part.ids())
            open_parts[span.source_number] = opened
        edges = span.first_token + np.concatenate([[0], np.cumsum(span.lengths)])
        first = 0
        while first < len(span.lengths):
            start = edges[first]
            fitting = np.searchsorted(edges, start + PIECE_TOKENS, side="right")
            last = max(first + 1, int(fitting) - 1)
            end = edges[last]
            piece = opened.ids[start:end]
            if last > first + 1:
                yield piece, span.lengths[first:last]
            else:
                yield from _cut_document(piece, args)
            bar.update(len(piece))
            first = last


def _cut_document(ids: np.ndarray, args: DataArguments) -> Iterator[Block]:
    """Cut a long document at the boundaries of its rows, so that the rows stay the same."""
    rows = max(1, PIECE_TOKENS // args.sequence_length)
    step = rows * args.sequence_length
    shared = 0
    if args.packing == "wrap":
        shared = 1  # the last id of a row is the first id of the document's next row
    for start in range(0, len(ids) - shared, step):
        end = start + step + shared
        piece = ids[start:end]
        yield piece, np.array([len(piece)])


def write_rows(folder: Path, blocks: Iterable[Block], dtype: np.dtype[Any], row_length: int | None) -> list[Shard]:
    """Write the rows of a split to a new folder, and return a list of the files.

    The folder has the format of the `datasets` library.

    Args:
        folder: folder to create; its name is the name of the split.
        blocks: for each record batch, the concatenated ids and the lengths of its rows.
        row_length: number of ids of every row, or None if the rows have different lengths.
    """
    from datasets import Dataset, Features, List, Value, disable_progress_bars

    length = -1
    example = [0]
    if row_length is not None:
        length = row_length
        example = [0] * row_length
    ids = List(Value(dtype.name), length=length)
    features = Features({"input_ids": ids})
    # `datasets` writes the metadata of the folder. save_to_disk would need all rows as a dataset, so it is called with
    # a single row, whose file is then deleted.
    disable_progress_bars()
    dataset = Dataset.from_dict({"input_ids": [example]}, features, split=folder.name)
    dataset.save_to_disk(folder)
    for path in folder.glob("*.arrow"):
        path.unlink()
    shards: list[Shard] = []
    remaining = iter(blocks)
    for block in remaining:
        others = itertools.islice(remaining, SHARD_BLOCKS - 1)
        path = folder / f"data-{len(shards):05d}.arrow"
        blocks_of_shard = itertools.chain([block], others)
        shard = _write_shard(path, blocks_of_shard, features.arrow_schema)
        shards.append(shard)
    path = folder / "state.json"
    state = read_object(path)
    state["_data_files"] = [{"filename": shard.name} for shard in shards]
    state["_fingerprint"] = fingerprint_of(split_hash(shards))
    write_whole(path, json.dumps(state, indent=2))
    return shards


def split_hash(shards: Sequence[Shard]) -> str:
    """Return the sha256 of a split, computed from the hashes of its shards (files)."""
    lines = "".join(f"{shard.sha256}\n" for shard in shards)
    return hashlib.sha256(lines.encode()).hexdigest()


def _write_shard(path: Path, blocks: Iterable[Block], schema: pa.Schema) -> Shard:
    rows = 0
    targets = 0
    largest = 0
    field = schema.field("input_ids")
    with path.open("wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for ids, lengths in blocks:
            rows += len(lengths)
            targets += len(ids) - len(lengths)
            largest = max(largest, int(ids.max()))
            values = pa.array(ids)
            if pa.types.is_fixed_size_list(field.type):
                column = pa.FixedSizeListArray.from_arrays(values, field.type.list_size)
            else:
                edges = np.concatenate([[0], np.cumsum(lengths)])
                column = pa.ListArray.from_arrays(pa.array(edges, pa.int32()), values)
            column = column.cast(field.type, safe=False)
            batch = pa.record_batch([column], schema=schema)
            writer.write_batch(batch)
    sync(path)
    size = path.stat().st_size
    return Shard(path.name, rows, targets, largest, size, sha256_of(path))
