"""Build a prepared folder: stage the tokens, cut them into rows, write the manifest last, rename into place."""

import contextlib
import errno
import functools
import glob
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gpt2_repro.data.arguments import DataArguments, PreparationOptions
from gpt2_repro.data.encoder import Encoder
from gpt2_repro.data.preparation.cutting import cut_split
from gpt2_repro.data.preparation.describe import Opened, describe, write_validation_text
from gpt2_repro.data.preparation.disk import check_disk, expected_peak
from gpt2_repro.data.preparation.order import count
from gpt2_repro.data.preparation.splits import Group, check_split, stage_groups, streams_of, validation_sets
from gpt2_repro.data.preparation.tokenizing import DamagedTokens, is_held_out
from gpt2_repro.data.preparation.workers import STREAMS, stage
from gpt2_repro.data.prepared import PreparedData, exclusive_lock, first_difference, request_of
from gpt2_repro.data.shards import WrittenRows
from gpt2_repro.data.sources.opening import Source, SourceOpener
from gpt2_repro.data.sources.text_files import TextForm
from gpt2_repro.data.sources.token_files import read_header, separator_shown
from gpt2_repro.data.tokenizer import obtain_tokenizer
from gpt2_repro.errors import UserError
from gpt2_repro.files import read_object, remove_folder, sync_folder, write_whole
from gpt2_repro.manifest import MANIFEST, SplitCounts


logger = logging.getLogger(__name__)

# The marker of a staging folder: it records the request, and proves that the folder is ours to delete.
REQUEST = "request.json"
PUBLISHED = "published.json"  # its name once the prepared folder is finished: nothing is left to resume


def prepare(args: DataArguments, options: PreparationOptions | None = None) -> PreparedData:
    """Prepare `args.dataset_dir`, or find it finished.

    Unfinished work is kept in `<dataset_dir>.staging`; a later call with the same arguments resumes it.
    Raises UserError for a folder prepared with other arguments, a folder that is not ours, an unknown source, an empty
    corpus or split, a full disk, and if a training reads the folder to be replaced.
    """
    options = options or PreparationOptions()
    target = Path(args.dataset_dir)
    request = request_of(args)
    if not target.name:
        raise UserError(f"--dataset_dir {args.dataset_dir} has no name of its own: name a folder, as in data/books")
    staging = target.with_name(target.name + ".staging")
    if target.exists() and not options.overwrite:
        data = PreparedData.read(target)
        if difference := first_difference(data.manifest.request, request):
            key, holds, value = difference
            raise UserError(
                f"{target} was prepared with {key} {holds}, not {value}: pass --overwrite or another --dataset_dir"
            )
        logger.info("%s is already prepared", target)
        _warn_of_changes(data, args)
        _clear_away(target, staging)
        return data
    with _replacement_lock(target), _staging_lock(staging):
        _claim(staging, request)
        try:
            if not (staging / "folder" / MANIFEST).is_file():
                _build(target, staging, args, options, request)
            _check_request(staging, read_object(staging / "folder" / MANIFEST)["request"], request)
            if (staging / REQUEST).is_file():
                (staging / REQUEST).replace(staging / PUBLISHED)
            _publish(staging / "folder", target)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(f"the disk of {target} is full: make space and start the same command again") from None
        remove_folder(staging, PUBLISHED)
    return PreparedData.read(target)


@contextlib.contextmanager
def _replacement_lock(target: Path) -> Iterator[None]:
    """Lock a prepared folder that will be replaced. Raises UserError if it is not ours, or something reads it."""
    if not target.exists():
        yield
        return
    if "request" not in read_object(target / MANIFEST):
        PreparedData.read(target)  # raises
    with exclusive_lock(
        target, f"{target} is open in a training: wait for it or end it, or name another --dataset_dir"
    ):
        yield


@contextlib.contextmanager
def _staging_lock(staging: Path) -> Iterator[None]:
    """Create the staging folder for this process alone. Raises UserError if another process has it, or on failure."""
    try:
        staging.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{staging} cannot be made ({error.strerror}): name another --dataset_dir") from None
    with exclusive_lock(staging, f"another process is preparing {staging.with_suffix('')}: wait for it or end it"):
        yield


def _claim(staging: Path, request: dict[str, Any]) -> None:
    """Mark an empty staging folder as ours. Raises UserError if it holds files and prepare_data.py did not make it."""
    found = sorted(path.name for path in staging.iterdir() if not path.name.startswith(f".{REQUEST}."))
    markers = (staging / REQUEST, staging / PUBLISHED, staging / "folder" / MANIFEST)
    if not found:
        write_whole(staging / REQUEST, json.dumps({"request": request}))
    elif not any("request" in read_object(marker) for marker in markers):
        raise UserError(f"{staging} holds {found[0]}, which is not ours. Move it away or pass another --dataset_dir.")


def _check_request(staging: Path, kept: dict[str, Any], request: dict[str, Any]) -> None:
    """Raise UserError where the staging is of another request, so that hours of work never vanish by a changed option."""
    if difference := first_difference(kept, request):
        key, holds, value = difference
        raise UserError(
            f"{staging} holds unfinished work with {key} {holds}, not {value}: pass {holds} to resume, or delete it"
        )


def _clear_away(target: Path, staging: Path) -> None:
    """Remove the staging folder of a process that was killed after it had renamed the finished folder into place."""
    if "request" in read_object(staging / PUBLISHED) and not (staging / "folder").exists():
        with contextlib.suppress(UserError), _staging_lock(staging):  # unless another process starts there
            remove_folder(staging, PUBLISHED)


def _publish(folder: Path, target: Path) -> None:
    """Rename a finished folder into place. The one it replaces moves into the staging folder and is deleted with it."""
    if target.exists():
        replaced = folder.with_name("replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    folder.rename(target)


def _warn_of_changes(data: PreparedData, args: DataArguments) -> None:
    """Local files that came or changed after the preparation are not in the folder; those that went are."""
    paths = [Path(path) for pattern in args.data_files for path in glob.glob(pattern, recursive=True)]
    known = {(file["path"], file["bytes"]) for file in data.manifest.source.get("files", []) if args.data_files}
    changed = [path for path in paths if path.is_file() and (str(path), path.stat().st_size) not in known]
    if changed:
        logger.warning("%s does not hold %s as it is now: --overwrite prepares it anew", data.path, changed[0])


def _build(
    target: Path, staging: Path, args: DataArguments, options: PreparationOptions, request: dict[str, Any]
) -> None:
    """Everything of the finished folder in `staging`, the manifest last."""
    try:
        opened = _take_up(staging, request, args, options)
        tokenizer = staging / "tokenizer"
        texts = functools.partial(_training_text, opened.sources, args)
        obtain_tokenizer(args.tokenizer, tokenizer, texts, sequence_length=args.sequence_length)
        encoder = Encoder(tokenizer, separator=args.separator, engine=options.encoder)
        _check_separator(opened.sources, args, encoder)
        streams = [(stream.files, stream.limit) for stream in streams_of(opened.sources, opened.sets, args)]
        needed = expected_peak(streams, itemsize=encoder.dtype.itemsize, characters=args.tokenizer == "char")
        check_disk(target, staging, needed)
        one_stage = functools.partial(stage, staging=staging, tokenizer=tokenizer, args=args, options=options)
        groups = stage_groups(opened.sources, opened.sets, args, one_stage)
    except UserError:
        # Nothing is there that the next start could take up: a tokenizer is soon made again.
        if not _has_tokens(staging) and not any(path.is_file() for path in (staging / "downloads").rglob("*")):
            remove_folder(staging, REQUEST)
        raise
    try:
        _write_folder(staging, args, opened, groups, encoder)
    except DamagedTokens:
        raise  # the next start stages them again
    except UserError:
        remove_folder(staging, REQUEST)  # the same tokens would fail again
        raise


def _take_up(staging: Path, request: dict[str, Any], args: DataArguments, options: PreparationOptions) -> Opened:
    """Open the sources, and keep what an interrupted preparation of the same request has staged.

    Raises UserError where another request has staged tokens.
    """
    note = staging / REQUEST
    kept = read_object(note)
    if "opened" not in kept:  # killed before the sources were opened, or while an older request was deleted
        kept = {}
    elif _has_tokens(staging):
        _check_request(staging, kept["request"], request)
    elif first_difference(kept["request"], request):
        kept = {}
    known = [*kept["opened"]["sources"], *kept["opened"]["validation_sets"].values()] if kept else []
    revisions = {of["repository"]: of["revision"] for of in known if "revision" in of}
    form = TextForm(text_column=args.text_column, sample_by=args.sample_by)
    opener = SourceOpener(args, form, staging / "downloads", options, revisions)
    sources = opener.open_all()
    sets = {name: opener.open(text) for name, text in validation_sets(args).items()}
    check_split(args, sources, sets)
    opened = Opened(sources, sets)
    found = {"opened": opened.described(), "changed": opened.changed()}
    if kept and found == {key: kept.get(key) for key in found}:
        logger.info("taking up the interrupted preparation in %s", staging)
        return opened
    if kept:
        logger.warning("the source has changed since the preparation in %s was interrupted: starting anew", staging)
    write_whole(note, json.dumps({"request": request}))  # the marker, while the rest is deleted
    for path in set(staging.iterdir()) - {note}:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_whole(note, json.dumps({"request": request, **found}, indent=2))
    return opened


def _has_tokens(staging: Path) -> bool:
    return any(staging.glob(f"{STREAMS}/*/*.json"))


def _training_text(sources: Sequence[Source], args: DataArguments) -> Iterator[str]:
    """What a tokenizer may be made of: of characters all, of a trained one nothing that the hash holds out."""
    every = args.tokenizer == "char"
    files = [file for source in sources for file in [*source.files, *(source.validation_files if every else [])]]
    for file in tqdm(files, desc="read for the tokenizer", unit="file"):
        file.fetch()
        for part in file.parts():
            for batch in part.read():
                for document in batch.documents:
                    if every or args.split != "hash" or not is_held_out(document, args):
                        yield document


def _check_separator(sources: Sequence[Source], args: DataArguments, encoder: Encoder) -> None:
    """Raise UserError where files of tokens have the separator elsewhere than the recipe says."""
    for source in sources:
        ends = [file.name for file in (source.files[0], source.files[-1])]
        if encoder.end_of_text is None or not all(name.endswith(".bin") and Path(name).is_file() for name in ends):
            continue
        first, last = (read_header(Path(name)) for name in ends)
        shown = separator_shown(first, last, encoder.end_of_text)
        if shown is not None and shown != args.separator:
            raise UserError(f"{first.name} has its separators {shown} the documents: type --separator {shown}")


def _write_folder(
    staging: Path, args: DataArguments, opened: Opened, groups: Sequence[Group], encoder: Encoder
) -> None:
    folder = staging / "folder"
    if folder.exists():
        shutil.rmtree(folder)  # of a pass that was interrupted
    folder.mkdir()
    written: dict[str, WrittenRows] = {}
    counts: dict[str, SplitCounts] = {}
    counted = [count(group.found()) for group in groups]
    for group, of_streams in zip(groups, counted, strict=True):
        if not sum(of_stream["tokens"] for of_stream in of_streams.values()):
            raise UserError(f"the source {', '.join(group.names)} holds no text: an empty corpus cannot be prepared")
    for group, of_streams in zip(groups, counted, strict=True):
        for split in group.splits:
            of_split = [of_streams.get((split, number), _NOTHING) for number in range(len(group.streams))]
            total = {key: sum(of_stream[key] for of_stream in of_split) for key in _NOTHING}
            runs = (run for run in group.found() if run.split == split)
            tokens = total["tokens"]
            rows = cut_split(folder / split, runs, group.streams, args, tokens=tokens, dtype=encoder.dtype)
            if not rows.rows:
                raise UserError(_no_rows(split, tokens, args))
            if rows.largest_id >= encoder.vocab_size:
                raise UserError(f"{split} holds the id {rows.largest_id} of another tokenizer: pass its --tokenizer")
            written[split] = rows
            # The whole split is cut, or each document; its first id is no target.
            firsts = 1 if args.packing == "concat" else total["documents"]
            counts[split] = SplitCounts(
                **total,
                sources=dict(zip(group.names, of_split, strict=True)) if len(group.names) > 1 else None,
                rows=rows.rows,
                row_tokens=rows.targets,
                dropped_tokens=tokens - firsts - rows.targets,
            )
    if args.validation_text:
        write_validation_text(folder / "text", groups)
    (folder / "tokenizer").mkdir()
    for path in (staging / "tokenizer").iterdir():  # copytree hides a full disk in an error of its own
        shutil.copyfile(path, folder / "tokenizer" / path.name)
    manifest = describe(folder, args, opened, groups, encoder, counts, written)
    write_whole(folder / MANIFEST, json.dumps(manifest.to_json(), indent=2) + "\n")
    sync_folder(folder)


_NOTHING = {"documents": 0, "empty_documents": 0, "tokens": 0}


def _no_rows(split: str, tokens: int, args: DataArguments) -> str:
    least = max(1, args.min_length) if args.packing == "wrap" else args.sequence_length
    return (
        f"{split} has {tokens:,} tokens and no row of {least + 1}: use more text or another --validation_tokens, "
        "--validation_fraction, --split, --min_length or --sequence_length"
    )
