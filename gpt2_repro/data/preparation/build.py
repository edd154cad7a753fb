"""Build the files of a prepared folder in a temporary folder (staging folder)."""

import functools
import json
import logging
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpt2_repro.cli import Progress
from gpt2_repro.data.arguments import DataArguments, PreparationOptions
from gpt2_repro.data.preparation.splits import (
    MOST_HELD_OUT,
    Group,
    check_split,
    count_documents,
    stage_groups,
    streams_of,
)
from gpt2_repro.data.preparation.tokenizing import EXAMPLES, DamagedTokens, is_held_out
from gpt2_repro.data.preparation.workers import STREAMS, stage
from gpt2_repro.data.preparation.writing import split_hash, write_split
from gpt2_repro.data.prepared import first_difference, request_of
from gpt2_repro.data.reference_losses import MAX_TOKENS, reference_losses
from gpt2_repro.data.rows import open_rows
from gpt2_repro.data.sources.base import SourceFile
from gpt2_repro.data.sources.hub import HubFile
from gpt2_repro.data.sources.local_files import LocalFile
from gpt2_repro.data.sources.opening import Source, SourceOpener, Sources
from gpt2_repro.data.sources.presets import peak_bytes
from gpt2_repro.data.sources.token_files import read_header, separator_shown
from gpt2_repro.data.tokenizer import Encoder, obtain_tokenizer
from gpt2_repro.errors import UserError
from gpt2_repro.files import read_object, remove_folder, sha256_of, sync_folder, write_whole
from gpt2_repro.manifest import MANIFEST, SPLITS, Manifest, ReadCounts, Shard, SplitCounts
from gpt2_repro.text import size


logger = logging.getLogger(__name__)

# Marker file of a staging folder. It records the request and proves that prepare_data.py made the folder.
REQUEST = "request.json"
PACKAGES = ("datasets", "pyarrow", "numpy", "tokenizers")  # the manifest records their versions
COUNTED = ("documents", "empty_documents", "tokens")
# Bytes of text per byte of the file: 1.6 in FineWeb's parquet (46 GB in 28.5 GB); for English prose 2.7 with gzip and
# 3 with zstd.
TEXT_PER_BYTE = {".parquet": 1.6, ".gz": 2.7, ".zst": 3.0}
LEAST_TOKENS = 16  # with fewer tokens, the files have no text
NOISY_TOKENS = 2_000  # the loss of a token varies by about 3, so the mean of 2,000 tokens varies by 0.07
BYTES_PER_TOKEN = 4.5  # for English web text and GPT-2's tokenizer: 46.0 GB have 9.95B tokens


def build_folder(target: Path, staging: Path, args: DataArguments, options: PreparationOptions) -> None:
    """Write all files of a prepared folder into the subfolder "folder" of `staging`.

    Args:
        target: final path of the prepared folder, for error messages.
        staging: temporary folder, from which an interrupted preparation is resumed.
    """
    try:
        sources = _open_sources(staging, args, options)
        tokenizer = staging / "tokenizer"
        texts = functools.partial(_training_text, sources.training, args)
        text_bytes = functools.partial(_text_bytes, sources.training)
        obtain_tokenizer(
            args.tokenizer,
            tokenizer,
            texts,
            sequence_length=args.sequence_length,
            separator=args.separator,
            text_bytes=text_bytes,
        )
        encoder = Encoder(tokenizer, separator=args.separator, engine=options.encoder)
        _check_separator(sources.training, args, encoder)
        streams = [(stream.files, stream.limit) for kind in streams_of(sources, args) for stream in kind]
        needed = expected_peak(streams, itemsize=encoder.dtype.itemsize, characters=args.tokenizer == "char")
        check_disk(target, staging, needed)
        one_stage = functools.partial(stage, staging=staging, tokenizer=tokenizer, args=args, options=options)
        groups = stage_groups(sources, args, one_stage)
    except UserError:
        # Without tokens and downloads there is nothing to resume: only a tokenizer, which is quickly made again.
        if not _has_tokens(staging) and not any(path.is_file() for path in (staging / "downloads").rglob("*")):
            remove_folder(staging, REQUEST)
        raise
    try:
        _write_folder(staging, args, sources, groups, encoder)
    except DamagedTokens:
        raise  # the next start stages the damaged tokens again
    except UserError:
        remove_folder(staging, REQUEST)  # the same tokens would fail again
        raise


def check_request(staging: Path, kept: dict[str, Any], args: DataArguments) -> None:
    """Raise UserError if an unfinished preparation was started with other options.

    Args:
        kept: options of the unfinished preparation, as returned by `request_of`.
    """
    # The temporary files can be the result of hours of work, so they are not deleted if an option has changed.
    if difference := first_difference(kept, request_of(args)):
        key, holds, value = difference
        fix = f"Pass --{key} {holds} to resume this preparation, or delete the folder."
        raise UserError(f"{staging} has an unfinished preparation with {key} {holds}, not {value}. {fix}")


def _open_sources(staging: Path, args: DataArguments, options: PreparationOptions) -> Sources:
    """Open the sources, and delete outdated files in `staging`.

    All files are outdated if the sources have changed since the unfinished preparation was started. All files are also
    outdated if `args` has changed and `staging` has no tokens yet. Raises UserError if `args` has changed and
    `staging` already has tokens.
    """
    note, request = staging / REQUEST, request_of(args)
    kept = read_object(note)
    if "opened" not in kept:  # killed before the sources were opened, or while an older request was deleted
        kept = {}
    elif _has_tokens(staging):
        check_request(staging, kept["request"], args)
    elif first_difference(kept["request"], request):
        kept = {}
    known = [*kept["opened"]["sources"], *kept["opened"]["validation_sets"].values()] if kept else []
    revisions = {source["repository"]: source["revision"] for source in known if "revision" in source}
    sources = SourceOpener(args, staging / "downloads", options.keep_downloads, revisions).open_all()
    check_split(args, sources)
    found = {"opened": sources.described(), "changed": sources.changed()}
    if kept and found == {key: kept.get(key) for key in found}:
        logger.info("resuming the interrupted preparation in %s", staging)
        return sources
    if kept:
        logger.warning("the source has changed, so the preparation in %s starts from the beginning", staging)
    write_whole(note, json.dumps({"request": request}))  # keeps the marker while all other files are deleted
    for path in set(staging.iterdir()) - {note}:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_whole(note, json.dumps({"request": request, **found}, indent=2))
    return sources


def _has_tokens(staging: Path) -> bool:
    return any(staging.glob(f"{STREAMS}/*/*.json"))


def _training_text(sources: Sequence[Source], args: DataArguments) -> Iterator[str]:
    """Yield the texts of the documents from which a tokenizer is made."""
    every = args.tokenizer == "char"
    files = [file for source in sources for file in [*source.files, *(source.validation_files if every else [])]]
    for file in Progress(files, desc="read for the tokenizer", unit="file"):
        file.fetch()
        for part in file.parts():
            for batch in part.read():
                for document in batch.documents:
                    if every or args.split != "hash" or not is_held_out(document, args):
                        yield document


def _text_bytes(sources: Sequence[Source]) -> float:
    """Return the bytes of text in the training files of all sources.

    For compressed files, the size of the text is an estimate.
    """
    return sum(
        file.size * TEXT_PER_BYTE.get(Path(file.name).suffix, 1.0) for source in sources for file in source.files
    )


def tokens_of(file: SourceFile, *, characters: bool) -> float:
    """Return the approximate number of tokens in a source file.

    Args:
        characters: whether each character is a token.
    """
    ending = Path(file.name).suffix
    if ending == ".bin":
        return file.size / 2
    text = file.size * TEXT_PER_BYTE.get(ending, 1.0)
    return text if characters else text / BYTES_PER_TOKEN


def expected_peak(streams: Iterable[tuple[list[SourceFile], int]], *, itemsize: int, characters: bool) -> float:
    """Return the estimated peak disk usage of a preparation in bytes.

    Args:
        streams: one pair per source: the list of its files, and the maximum number of tokens to use from them (0: no
            limit).
        itemsize: bytes per token id.
        characters: whether each character is a token.
    """
    staged = rows = downloads = 0.0
    for files, limit in streams:
        tokens = sum(tokens_of(file, characters=characters) for file in files)
        of_stream = itemsize * (min(tokens, limit) if limit else tokens)
        rows += of_stream
        if any(isinstance(file, LocalFile) and file.name.endswith(".bin") for file in files):
            continue  # local token files are read in place
        staged += of_stream
        fetched = [file.size for file in files if isinstance(file, HubFile) and not file.name.endswith(".bin")]
        downloads = max(downloads, sum(sorted(fetched)[-2:]))
    return peak_bytes(staged=staged, rows=rows, downloads=downloads)


def check_disk(target: Path, staging: Path, needed: float) -> None:
    """Raise UserError if the disk is clearly too small for a preparation.

    Args:
        needed: estimated peak disk usage in bytes.
    """
    # `needed` includes the files of an interrupted preparation, so their space counts as free.
    staged = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
    free = shutil.disk_usage(staging).free + staged
    logger.info("preparing %s needs up to about %s of disk space (free: %s)", target, size(needed), size(free))
    if 0.8 * needed > free:  # the estimate assumes English text
        fix = "Pass another --dataset_dir or a smaller --max_tokens."
        raise UserError(f"{target} needs {size(needed)} of disk space, but only {size(free)} is free. {fix}")


def _check_separator(sources: Sequence[Source], args: DataArguments, encoder: Encoder) -> None:
    """Raise UserError if the separators in token files do not match --separator."""
    for source in sources:
        ends = [file.name for file in (source.files[0], source.files[-1])]
        if encoder.end_of_text is None or not all(name.endswith(".bin") and Path(name).is_file() for name in ends):
            continue
        first, last = (read_header(Path(name)) for name in ends)
        shown = separator_shown(first, last, encoder.end_of_text)
        if shown is not None and shown != args.separator:
            raise UserError(f"{first.name} has an end-of-text id {shown} each document. Pass --separator {shown}.")


def _write_folder(
    staging: Path, args: DataArguments, sources: Sources, groups: Sequence[Group], encoder: Encoder
) -> None:
    folder = staging / "folder"
    if folder.exists():
        shutil.rmtree(folder)  # left by an interrupted pass
    folder.mkdir()
    counts, shards = _write_splits(folder, args, groups, encoder)
    if args.validation_text:
        _write_validation_text(folder / "text", groups, staging / "tokenizer" / "tokenizer.json")
    (folder / SPLITS).write_text(json.dumps({"splits": sorted(counts)}), encoding="utf-8")  # for load_from_disk
    (folder / "tokenizer").mkdir()
    for path in (staging / "tokenizer").iterdir():  # copytree would hide a full disk in shutil.Error
        shutil.copyfile(path, folder / "tokenizer" / path.name)
    facts = [part.facts for group in groups for parts in group.streams for part in parts]
    described = sources.described()
    source = described["sources"][0]
    if len(described["sources"]) > 1:
        source = {"name": args.source, "sources": described["sources"]}
    kept = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".arrow"]
    losses = None
    if counts["train"].tokens <= MAX_TOKENS:
        train, validation = (open_rows(folder / split).joined() for split in ("train", "validation"))
        losses = reference_losses(train, validation, encoder.vocab_size)
    manifest = Manifest(
        request=request_of(args),
        source=source,
        validation_sets=described["validation_sets"],
        tokenizer_sha256=sha256_of(folder / "tokenizer" / "tokenizer.json"),
        vocab_size=encoder.vocab_size,
        largest_id=max(shard.largest_id for of_split in shards.values() for shard in of_split),
        bytes_per_token=encoder.dtype.itemsize,
        counts=counts,
        read=ReadCounts(  # counts over all files, for any split
            documents=sum(fact["documents"] for fact in facts),
            text_bytes=sum(fact["text_bytes"] for fact in facts),
            longest_document_tokens=max(fact["longest"] for fact in facts),
            bad_documents=sum(fact["bad"] for fact in facts),
            bad_examples=[line for fact in facts for line in fact["bad_examples"]][:EXAMPLES],
        ),
        sha256={split: split_hash(of_split) for split, of_split in shards.items()},
        shards=shards,
        files={str(path.relative_to(folder)): sha256_of(path) for path in sorted(kept)},
        versions={name: version(name) for name in sorted({*PACKAGES, encoder.engine})},
        reference_losses=losses,
    )
    # Written last: the manifest marks the folder as complete.
    write_whole(folder / MANIFEST, json.dumps(manifest.to_json(), indent=2) + "\n")
    sync_folder(folder)


def _write_splits(
    folder: Path, args: DataArguments, groups: Sequence[Group], encoder: Encoder
) -> tuple[dict[str, SplitCounts], dict[str, list[Shard]]]:
    """Write the rows of every split.

    Returns two dicts with the split names as keys: the numbers of documents, tokens and rows, and the written files.
    """
    counted = [count_documents(group.spans()) for group in groups]
    for group, found in zip(groups, counted, strict=True):
        if (tokens := sum(of_stream["tokens"] for of_stream in found.values())) < LEAST_TOKENS:
            named = args.data_files if group.names == ["files"] else group.names
            facts = [part.facts for parts in group.streams for part in parts]
            examples = [line for fact in facts for line in fact["bad_examples"]]
            skipped = f" ({sum(fact['bad'] for fact in facts):,} were skipped: {examples[0]})" if examples else ""
            few = f"Only {tokens} tokens of text" if tokens else "No text"
            raise UserError(f"{few} found in {', '.join(named)}{skipped}. Pass files with more text.")
    shards: dict[str, list[Shard]] = {}
    counts: dict[str, SplitCounts] = {}
    for group, found in zip(groups, counted, strict=True):
        for split in group.splits:
            of_streams = [{key: found[split, stream][key] for key in COUNTED} for stream in range(len(group.streams))]
            total = {key: sum(of_stream[key] for of_stream in of_streams) for key in COUNTED}
            of_sources = dict(zip(group.names, of_streams, strict=True)) if len(of_streams) > 1 else None
            spans = (span for span in group.spans() if span.split == split)
            tokens = total["tokens"]
            shards[split] = write_split(folder / split, spans, group.streams, args, tokens=tokens, dtype=encoder.dtype)
            rows, targets = sum(shard.rows for shard in shards[split]), sum(shard.targets for shard in shards[split])
            if not rows:
                option = "sequence_length" if args.packing == "concat" else "min_length"
                needed, text = getattr(args, option) + 1, sum(of_stream["tokens"] for of_stream in found.values())
                fix = "Pass more text"
                if split == "validation" and args.split != "source":
                    fix = f"Pass a larger --validation_{'tokens' if args.split == 'head' else 'fraction'}"
                    if args.max_tokens > 0 and needed > MOST_HELD_OUT * args.max_tokens:
                        fix = f"Pass at least --max_tokens {math.ceil(needed / MOST_HELD_OUT)}"
                    elif needed > MOST_HELD_OUT * text:
                        fix = f"Pass at least {needed / MOST_HELD_OUT:,.0f} tokens of text"
                raise UserError(
                    f"The {split} split has {tokens:,} of {text:,} tokens, but a row needs {needed:,}. {fix}, or a "
                    f"smaller --{option}."
                )
            if (largest := max(shard.largest_id for shard in shards[split])) >= encoder.vocab_size:
                problem = f"The {split} split has the id {largest}, which is not in the vocabulary"
                raise UserError(f"{problem}. Pass another --tokenizer.")
            if split != "train" and targets < NOISY_TOKENS:
                fix = "Prepare more text, or use a larger part of it for validation (--validation_tokens, --validation_fraction)."
                logger.warning("The %s split has only %s tokens, so its loss is noisy. %s", split, f"{targets:,}", fix)
            # The first id of the split (concat) or of each document (wrap) is not a target.
            dropped = tokens - (1 if args.packing == "concat" else total["documents"]) - targets
            of_rows = {"rows": rows, "row_tokens": targets, "dropped_tokens": dropped}
            counts[split] = SplitCounts(**total, **of_rows, sources=of_sources)
        if group.remark:
            logger.info(group.remark)
    return counts, shards


def _write_validation_text(folder: Path, groups: Sequence[Group], tokenizer: Path) -> None:
    """Write the documents of the split `validation` to text/validation.jsonl."""
    from tokenizers import Tokenizer

    folder.mkdir()
    decode = Tokenizer.from_file(str(tokenizer)).decode
    group = next(group for group in groups if "validation" in group.splits)
    # Keep the texts of one part per stream in memory: the part that is being read.
    texts_of = functools.lru_cache(len(group.streams))(lambda stream, part: group.streams[stream][part].texts())
    with (folder / "validation.jsonl").open("w", encoding="utf-8") as out:
        for span in group.spans():
            if span.split == "validation":
                part, number, place = group.streams[span.stream][span.part], span.first_document, span.first_token
                lengths = part.lengths()
                for length in span.lengths.tolist():
                    text = texts_of(span.stream, span.part).get(number)
                    # With too few documents for --split hash, texts were not saved, and documents are cut.
                    if text is None or length != lengths[number]:
                        text = decode(part.ids()[place : place + length].tolist())
                    out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                    number, place = number + 1, place + length
