"""Build a prepared folder: stage the tokens, cut them into rows, write the manifest last, rename into place."""

import fcntl
import json
import logging
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.manifest import MANIFEST, first_difference, request_of
from gpt2_repro.data.ngram import MAX_TOKENS, reference_losses
from gpt2_repro.data.packing import pack_rows, pack_windows
from gpt2_repro.data.rows import Block, open_rows, write_rows
from gpt2_repro.data.sources import Source, open_source
from gpt2_repro.data.staging import StagedFile, is_held_out, tokenize_files
from gpt2_repro.data.tokenizer import Encoder, save_tokenizer, tokenizer_hash, train_tokenizer
from gpt2_repro.errors import UserError
from gpt2_repro.files import sync_folder, write_whole


logger = logging.getLogger(__name__)


def prepare(args: DataArguments, *, num_proc: int) -> dict[str, Any]:
    """Make `args.dataset_dir` or find it finished; return its manifest.

    Work goes on in `<dataset_dir>.staging`, which a later call with the same arguments takes up again.
    Raises UserError for a folder prepared otherwise, an unknown source, an empty corpus and an empty split.
    """
    target = Path(args.dataset_dir)
    request = request_of(args)
    if target.exists():
        return _finished(target, request)
    staging = target.with_name(target.name + ".staging")
    staging.mkdir(parents=True, exist_ok=True)
    with (staging / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another process is preparing {target}: wait for it or end it") from None
        try:
            source = _take_up(staging, request, args)
            _obtain_tokenizer(args, source, staging)
            encoder = Encoder(staging / "tokenizer", separator=args.separator)
            staged = tokenize_files(source.files, staging, staging / "tokenizer", args, num_proc=num_proc)
        except UserError:
            if not any(staging.glob("tokens-*.npz")):  # nothing is there that the next start could take up
                shutil.rmtree(staging)
            raise
        try:
            manifest = _write_folder(staging / "folder", args, source, staged, encoder)
        except UserError:
            shutil.rmtree(staging)  # the same tokens would fail again
            raise
        sync_folder(staging / "folder")
        (staging / "folder").rename(target)
    shutil.rmtree(staging)
    return manifest


def _finished(target: Path, request: dict[str, Any]) -> dict[str, Any]:
    path = target / MANIFEST
    if not path.is_file():
        raise UserError(f"{target} exists and is no prepared folder: name another --dataset_dir or move it away")
    manifest = json.loads(path.read_text())
    if difference := first_difference(manifest["request"], request):
        key, holds, value = difference
        raise UserError(
            f"{target} was prepared with {key} {holds}, not {value}: name another --dataset_dir or move it away"
        )
    logger.info("%s is already prepared", target)
    return manifest


def _take_up(staging: Path, request: dict[str, Any], args: DataArguments) -> Source:
    """Open the source, and keep what an interrupted preparation of the same request has staged.

    Raises UserError where another request has staged tokens, so that hours of work never vanish by a changed option.
    """
    note = staging / "request.json"
    kept = json.loads(note.read_text()) if note.is_file() else None
    begun = any(staging.glob("tokens-*.npz"))
    if kept and begun and (difference := first_difference(kept["request"], request)):
        key, holds, value = difference
        raise UserError(
            f"{staging} holds an interrupted preparation with {key} {holds}, not {value}: type the same options to "
            "go on with it, or delete that folder"
        )
    revision = kept["source"].get("revision") if kept and begun else None
    source = open_source(args, staging / "downloads", revision=revision)
    if kept and begun and kept["source"] == json.loads(json.dumps(source.description)):
        logger.info("taking up the interrupted preparation in %s", staging)
        return source
    if begun:
        logger.warning("the source has changed since the preparation in %s was interrupted: starting anew", staging)
    for path in staging.iterdir():
        if path.name != ".lock":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_whole(note, json.dumps({"request": request, "source": source.description}, indent=2))
    return source


def _obtain_tokenizer(args: DataArguments, source: Source, staging: Path) -> None:
    destination, partial = staging / "tokenizer", staging / "tokenizer.partial"
    if destination.is_dir():
        return
    shutil.rmtree(partial, ignore_errors=True)
    kind, _, size = args.tokenizer.partition(":")
    if kind == "train":
        if not size.isdigit():
            raise UserError(f"the tokenizer {args.tokenizer} needs a number of ids, as in train:4096")
        logger.info("training a tokenizer of %s ids", size)
        texts = (
            document
            for file in source.files
            for documents, _ in file.read()
            for document in documents
            if not (args.split == "hash" and is_held_out(document, args))
        )
        train_tokenizer(texts, int(size), partial, sequence_length=args.sequence_length)
    else:
        save_tokenizer(args.tokenizer, partial, sequence_length=args.sequence_length)
    partial.rename(destination)


def _write_folder(
    folder: Path, args: DataArguments, source: Source, staged: list[StagedFile], encoder: Encoder
) -> dict[str, Any]:
    """Everything of the finished folder, the manifest last."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    split_of, counts = _split_documents(args, staged)
    if not counts["train"]["tokens"] + counts["validation"]["tokens"]:
        raise UserError(f"the source {source.description['name']} holds no text: an empty corpus cannot be prepared")
    hashes, largest = {}, 0
    for split in ("validation", "train"):
        blocks = _blocks(_pieces(staged, split_of, split), args)
        row_length = args.sequence_length + 1 if args.packing == "concat" else None
        written = write_rows(folder / split, split, blocks, encoder.dtype, row_length)
        if not written.rows:
            raise UserError(_no_rows(split, counts[split]["tokens"], args))
        hashes[split] = written.sha256
        largest = max(largest, written.largest_id)
        # What is cut is the whole split or each document; the first id of it is no target.
        streams = 1 if args.packing == "concat" else counts[split]["documents"]
        counts[split]["rows"] = written.rows
        counts[split]["row_tokens"] = written.targets
        counts[split]["dropped_tokens"] = counts[split]["tokens"] - streams - written.targets
    if args.validation_text:
        _write_validation_text(folder / "text", source, staged, split_of)
    shutil.copytree(folder.parent / "tokenizer", folder / "tokenizer")
    manifest = {
        "request": request_of(args),
        "source": source.description,
        "tokenizer_sha256": tokenizer_hash(folder / "tokenizer"),
        "vocab_size": encoder.vocab_size,
        "largest_id": largest,
        "bytes_per_token": encoder.dtype.itemsize,
        "counts": counts,
        "sha256": hashes,
        "versions": {name: version(name) for name in ("datasets", "pyarrow", "tokenizers", "numpy")},
    }
    if counts["train"]["tokens"] <= MAX_TOKENS:
        train, validation = (open_rows(folder / split).joined() for split in ("train", "validation"))
        manifest["reference_losses"] = reference_losses(train, validation, encoder.vocab_size)
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    return manifest


def _split_documents(args: DataArguments, staged: list[StagedFile]) -> tuple[list[np.ndarray], dict[str, Any]]:
    """For each staged file the split of its documents: 0 none (past max_tokens), 1 train, 2 validation."""
    before = 0
    split_of = []
    counts = {split: {"documents": 0, "empty_documents": 0, "tokens": 0} for split in ("train", "validation")}
    for file in staged:
        lengths = file.lengths()
        starts = before + np.cumsum(lengths) - lengths
        held_out = file.held_out() if args.split == "hash" else starts < args.validation_tokens
        kept = starts < args.max_tokens if args.max_tokens else np.ones(len(lengths), bool)
        of_file = np.where(kept, np.where(held_out, 2, 1), 0).astype(np.int8)
        for code, split in ((1, "train"), (2, "validation")):
            of_split = lengths[of_file == code]
            counts[split]["documents"] += int((of_split > 0).sum())
            counts[split]["empty_documents"] += int((of_split == 0).sum())
            counts[split]["tokens"] += int(of_split.sum())
        split_of.append(of_file)
        before += int(lengths.sum())
    return split_of, counts


def _pieces(staged: list[StagedFile], split_of: list[np.ndarray], split: str) -> Iterator[Block]:
    """The documents of a split, a staged file at a time: their ids one after another, and the length of each."""
    code = {"train": 1, "validation": 2}[split]
    for file, of_file in zip(tqdm(staged, desc=f"pack {split}", unit="file"), split_of, strict=True):
        lengths = file.lengths()
        yield file.ids()[np.repeat(of_file == code, lengths)], lengths[of_file == code]


def _blocks(pieces: Iterator[Block], args: DataArguments) -> Iterator[Block]:
    """The documents cut into rows."""
    if args.packing == "wrap":
        yield from pack_windows(pieces, args.sequence_length, min_length=args.min_length)
        return
    for rows in pack_rows((ids for ids, _ in pieces), args.sequence_length):
        yield rows.ravel(), np.full(len(rows), args.sequence_length + 1)


def _no_rows(split: str, tokens: int, args: DataArguments) -> str:
    if args.packing == "wrap":
        return (
            f"{split} has {tokens:,} tokens and no document of {max(1, args.min_length) + 1} or more: use more text or "
            "another --validation_tokens, --validation_fraction or --min_length"
        )
    return (
        f"{split} has {tokens:,} tokens, too few for one row of {args.sequence_length + 1}: use more text or another "
        "--validation_tokens, --validation_fraction or --sequence_length"
    )


def _write_validation_text(folder: Path, source: Source, staged: list[StagedFile], split_of: list[np.ndarray]) -> None:
    folder.mkdir()
    with (folder / "validation.jsonl").open("w", encoding="utf-8") as out:
        for file, of_file in zip(source.files, split_of, strict=False):
            if not (of_file == 2).any():
                continue
            documents = (document for batch, _ in file.read() for document in batch)
            for document, code in zip(documents, of_file, strict=False):
                if code == 2:
                    out.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")
