"""Build a prepared folder in a temporary folder, then move it to the final path."""

import contextlib
import errno
import functools
import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gpt2_repro.cli import Progress
from gpt2_repro.data.arguments import DataArguments, PreparationOptions
from gpt2_repro.data.preparation.estimates import row_bytes, staged_bytes, text_bytes
from gpt2_repro.data.preparation.lost_text import describe_losses
from gpt2_repro.data.preparation.mixing import Mixture, mixture_bytes, stage_mixture
from gpt2_repro.data.preparation.splits import Group, check_split, groups_of, groups_of_sets, stage_groups
from gpt2_repro.data.preparation.staging import STREAMS, is_held_out
from gpt2_repro.data.preparation.writing import write_folder
from gpt2_repro.data.prepared import PreparedData, check_request, exclusive_lock, request_of
from gpt2_repro.data.sources.base import Source, SourceFile
from gpt2_repro.data.sources.local_files import LocalFile, paths_of
from gpt2_repro.data.sources.opening import SourceOpener, Sources
from gpt2_repro.data.sources.token_files import CHECKED_IDS, TOKENS, TokenPart, read_header, separator_shown
from gpt2_repro.data.tokenizer import TRAINING_BYTES, Encoder, obtain_tokenizer
from gpt2_repro.errors import UserError
from gpt2_repro.files import read_object, size_of, write_whole
from gpt2_repro.manifest import MANIFEST
from gpt2_repro.text import size


logger = logging.getLogger(__name__)

# Marker of a staging folder: the request and the sources. It proves that prepare_data.py made the folder.
REQUEST = "request.json"
REPLACED = "replaced"  # in the staging folder: a prepared folder that --overwrite replaces
STAGED = (".", REQUEST, REPLACED, STREAMS, "downloads", "folder", "tokenizer")  # starts of names in a staging folder


def prepare(args: DataArguments, options: PreparationOptions | None = None) -> PreparedData:
    """Prepare the folder `args.dataset_dir` and return it.

    A folder that was already prepared with the same arguments is returned unchanged. An interrupted preparation is
    resumed from the folder `<dataset_dir>.staging`, if the arguments are the same.
    """
    options = options or PreparationOptions()
    target = Path(args.dataset_dir).resolve()  # otherwise the finished folder would replace a link
    if args.source == "files" and not args.data_files:
        raise UserError("No text was passed. Pass --data_files with your files, folders or globs.")
    staging = target.with_name(target.name + ".staging")
    is_prepared = _is_prepared(target, overwrite=options.overwrite)
    if is_prepared and not options.overwrite:
        return _finished(staging, args)
    with contextlib.ExitStack() as locks:
        if target.exists():
            message = f"A training run reads {target}. Wait until it ends or pass another --dataset_dir."
            locks.enter_context(exclusive_lock(target, message))
        locks.enter_context(_staging_lock(staging))
        try:
            if _has_tokens(staging):  # they can be the result of hours of work
                fix = "Pass the same options to resume it, or delete the folder."
                recorded = read_object(staging / REQUEST)["request"]
                check_request(recorded, request_of(args), f"{staging} has a preparation that was started", fix)
            if not _is_complete(staging):
                _build(staging, args, options)
            _publish(staging, target)
        except UserError:
            if not _has_tokens(staging) and not _has_downloads(staging):
                _remove(staging)  # nothing to resume
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(f"The disk of {target} is full. Free some space and run the same command again.") from None
        _remove(staging)
    return PreparedData.read(args.dataset_dir)


def _is_prepared(target: Path, *, overwrite: bool) -> bool:
    """Return whether a folder is prepared. Raises UserError if it is not empty and belongs to others.

    If it is to be replaced (`overwrite`), it may have only files of this project and hidden files.
    """
    if not target.exists():
        return False
    manifest = read_object(target / MANIFEST)
    is_ours = "request" in manifest
    known = {MANIFEST}
    for file in manifest.get("files", ()):
        first_part = Path(file).parts[0]
        known.add(first_part)
    names = [target.name]
    if target.is_dir():
        names = [path.name for path in target.iterdir()]
    for name in names:
        is_known = name in known or name.startswith(".")
        would_be_lost = overwrite and not is_known
        if not is_ours or would_be_lost:
            raise UserError(f"{target} is not only a prepared folder: it has {name}. Pass another --dataset_dir.")
    return bool(names)


def _finished(staging: Path, args: DataArguments) -> PreparedData:
    """Check a finished folder against the arguments, and return it."""
    folder = args.dataset_dir
    data = PreparedData.read(folder)
    fix = "Pass --overwrite to replace it, or another --dataset_dir."
    check_request(data.manifest.request, request_of(args), f"{folder} was prepared", fix)
    data.check()
    logger.info("%s is already prepared with these options", folder)
    changed = _changed_files(data, args)
    if changed:
        logger.warning("%s was prepared before %s changed. Pass --overwrite to prepare it again.", folder, changed[0])
    # A process may have been killed after it moved the finished folder and before it deleted the staging folder.
    unfinished = {path.name for path in staging.glob("*")} - {REQUEST, REPLACED}
    if "request" in read_object(staging / REQUEST) and not unfinished:
        with contextlib.suppress(UserError), _staging_lock(staging):  # skipped if another process uses the folder
            _remove(staging)
    return data


def _changed_files(data: PreparedData, args: DataArguments) -> list[Path]:
    """Return the local files that are new, or have another size than when the folder was prepared.

    Deleted files do not count: their text is still in the folder.
    """
    description = data.manifest.source
    known: set[tuple[str, int]] = set()
    patterns = list(args.data_files)
    for source in description.get("sources", [description]):
        if not _is_local(source):
            continue
        for key in ("files", "unused_files"):
            for file in source.get(key, []):
                known.add((file["path"], file["bytes"]))
        if not args.data_files:
            patterns.append(source["name"])
    changed: list[Path] = []
    for pattern in patterns:
        for path in paths_of(pattern):
            if not path.is_file():
                continue
            size_on_disk = path.stat().st_size
            if (str(path), size_on_disk) not in known:
                changed.append(path)
    return changed


def _is_local(source: dict[str, Any]) -> bool:
    """Return whether a source was made by `local_source`, from its description."""
    return "repository" not in source and "files" in source


@contextlib.contextmanager
def _staging_lock(staging: Path) -> Iterator[None]:
    """Create the staging folder and lock it for this process.

    Raises UserError if the folder has files that prepare_data.py did not make.
    """
    try:
        staging.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{staging} cannot be created ({error.strerror}). Pass another --dataset_dir.") from None
    message = f"Another process is preparing {staging.with_suffix('')}. Wait for it or stop it."
    with exclusive_lock(staging, message):
        known: tuple[str, ...] = (f".{REQUEST}.",)
        if "request" in read_object(staging / REQUEST):
            known += STAGED
        for path in staging.iterdir():
            if not path.name.startswith(known):
                problem = f"{staging} has an unknown file {path.name}"
                raise UserError(f"{problem}. Move the file or pass another --dataset_dir.")
        yield


def _has_tokens(staging: Path) -> bool:
    if _is_complete(staging):
        return True
    return any(staging.glob(f"{STREAMS}/*/*.json"))


def _is_complete(staging: Path) -> bool:
    """Return whether only the publication of the finished folder is missing."""
    return (staging / "folder" / MANIFEST).is_file()


def _has_downloads(staging: Path) -> bool:
    downloads = staging / "downloads"
    return any(path.is_file() for path in downloads.rglob("*"))


def _build(staging: Path, args: DataArguments, options: PreparationOptions) -> None:
    """Write all files of a prepared folder into the subfolder "folder" of `staging`."""
    sources = _open_sources(staging, args, options)
    tokenizer = staging / "tokenizer"
    texts = functools.partial(_text_for_tokenizer, sources, args)
    files: list[SourceFile] = []
    for source in sources.training:
        files += source.files
    obtain_tokenizer(args, tokenizer, texts, text_bytes(files))
    encoder = Encoder(tokenizer, separator=args.separator, engine=options.encoder)
    _check_tokens(sources, args, encoder)
    if not _has_tokens(staging):
        for source in sources.training:
            _warn_of_losses(source, args, encoder)
    _check_disk(staging, sources, args, encoder.dtype.itemsize)
    groups: list[Group | Mixture] = []
    if sources.mixture:
        mixture = stage_mixture(sources, staging, args, options)
        groups.append(mixture)
    else:
        groups_of_source = groups_of(sources.training[0], args)
        stage_groups(groups_of_source, staging, args, options)
        groups += groups_of_source
    groups_of_validation = groups_of_sets(sources.validation_sets, args)
    stage_groups(groups_of_validation, staging, args, options)
    groups += groups_of_validation
    try:
        write_folder(staging, args, sources, groups, encoder)
    except UserError:  # the same tokens would fail again
        _empty(staging)
        raise


def _open_sources(staging: Path, args: DataArguments, options: PreparationOptions) -> Sources:
    """Open the sources, and delete files in `staging` that were made from other sources."""
    note = staging / REQUEST
    request = request_of(args)
    recorded = read_object(note)
    recorded_request = recorded.pop("request", None)
    if recorded_request != request and not _has_tokens(staging):
        recorded = {}
    revisions: dict[str, str] = {}
    recorded_training = recorded.get("training", {})
    recorded_sources = recorded_training.get("sources", [recorded_training])
    recorded_sets = recorded.get("validation_sets", {})
    for source in [*recorded_sources, *recorded_sets.values()]:
        if "revision" in source:
            revisions[source["name"]] = source["revision"]
    downloads = staging / "downloads"
    downloads_of_hub = None if options.keep_downloads else downloads
    opener = SourceOpener(args, downloads, downloads_of_hub, revisions)
    sources = opener.open_all()
    check_split(args, sources)
    opened = sources.described()
    opened["changed"] = sources.changed()
    if recorded == opened:
        logger.info("resuming the interrupted preparation in %s", staging)
        return sources
    if "training" in recorded:
        logger.warning("the source has changed, so the preparation in %s starts from the beginning", staging)
    write_whole(note, json.dumps({"request": request}))  # without sources while files are deleted
    _empty(staging)
    write_whole(note, json.dumps({"request": request, **opened}, indent=2))
    return sources


def _empty(staging: Path, *, keep: str = REQUEST) -> None:
    """Delete everything in the staging folder except its marker and the file or folder `keep`."""
    paths = list(staging.iterdir())
    for path in paths:
        if path.name in (REQUEST, keep):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _remove(staging: Path) -> None:
    """Delete the staging folder. Its marker is deleted last, so that a rest is still recognized as ours."""
    _empty(staging)
    (staging / REQUEST).unlink(missing_ok=True)
    staging.rmdir()


def _text_for_tokenizer(sources: Sources, args: DataArguments) -> Iterator[str]:
    """Yield the documents from which a tokenizer is made. Those of a mixture alternate by their shares."""
    needs_all_text = args.tokenizer == "char"
    files_of_sources: list[list[SourceFile]] = []
    total = 0.0
    for source in sources.training:
        files = list(source.files)
        if needs_all_text:
            files += source.validation_files
        files_of_sources.append(files)
        total += text_bytes(files)
    if not needs_all_text:
        total = min(total, TRAINING_BYTES)
    shares = [float(part.share) for part in sources.mixture] or [1.0]
    leaves_out_validation = args.split == "hash" and not needs_all_text
    readers = {number: _documents_of(files) for number, files in enumerate(files_of_sources)}
    taken = dict.fromkeys(readers, 0.0)  # bytes of each source, divided by its share
    with Progress(total=total, desc="read for the tokenizer", unit="B", unit_scale=True, unit_divisor=1000) as bar:
        while readers:
            behind = min(readers, key=taken.__getitem__)
            document = next(readers[behind], None)
            if document is None:
                del readers[behind]
                continue
            if leaves_out_validation and is_held_out(document, args):
                continue
            yield document
            document_bytes = len(document.encode())
            taken[behind] += document_bytes / shares[behind]
            bar.update(document_bytes)


def _warn_of_losses(source: Source, args: DataArguments, encoder: Encoder) -> None:
    """Warn if the tokenizer does not keep the first documents of the text as they are."""
    file = source.files[0]
    if file.name.endswith(TOKENS):
        return
    lost = describe_losses(_documents(file), encoder)
    if lost:
        logger.warning("The tokenizer %s changes the text: %s.", args.tokenizer, lost)


def _documents_of(files: Iterable[SourceFile]) -> Iterator[str]:
    for file in files:
        yield from _documents(file)


def _documents(file: SourceFile) -> Iterator[str]:
    """Yield the documents of a file, and download it first if necessary."""
    file.fetch()
    for part in file.parts():
        yield from part.documents()


def _check_disk(staging: Path, sources: Sources, args: DataArguments, itemsize: int) -> None:
    """Raise UserError if the disk is clearly too small for the staged tokens and the rows.

    `itemsize` is the number of bytes per token id.
    """
    needed = 0.0
    groups = groups_of_sets(sources.validation_sets, args)
    if sources.mixture:
        needed += mixture_bytes(sources, args, itemsize)
    else:
        groups += groups_of(sources.training[0], args)
    for group in groups:
        needed += staged_bytes(group.stream, args, itemsize) + row_bytes(group.stream, args, itemsize)
    # `needed` includes the files of an interrupted preparation, so their space counts as free.
    free = shutil.disk_usage(staging).free + size_of(staging)
    logger.info("the preparation needs about %s of disk space (free: %s)", size(needed), size(free))
    if 0.8 * needed > free:  # the estimate assumes English text
        fix = "Pass another --dataset_dir or a smaller --max_tokens."
        raise UserError(f"The preparation needs {size(needed)} of disk space, but only {size(free)} is free. {fix}")


def _check_tokens(sources: Sources, args: DataArguments, encoder: Encoder) -> None:
    """Raise UserError if local token files do not match --tokenizer or --separator."""
    is_text = not args.tokenizer.startswith("none:")
    for source in [*sources.training, *sources.validation_sets.values()]:
        for part in _local_tokens([*source.validation_files, *source.files]):
            part.check(encoder.vocab_size, is_text=is_text)
            if encoder.end_of_text is not None:
                part.check_separators(encoder.end_of_text, args.separator)
    for source in sources.training:
        _check_separator(source, args, encoder)


def _check_separator(source: Source, args: DataArguments, encoder: Encoder) -> None:
    """Raise UserError if the local token files of a source have another separator than --separator."""
    parts = _local_tokens(source.files)
    if not parts or encoder.end_of_text is None:
        return
    first = parts[0]
    last = parts[-1]
    first_ids = first.ids()[:CHECKED_IDS]
    if encoder.end_of_text not in first_ids:
        logger.warning("%s begins without end-of-text ids. Is it from another tokenizer?", first.name)
    shown = separator_shown(first, last, encoder.end_of_text)
    if shown not in (None, args.separator):
        raise UserError(f"{first.name} has end-of-text ids {shown} each document. Pass --separator {shown}.")


def _local_tokens(files: Iterable[SourceFile]) -> list[TokenPart]:
    """Return the token ids of the local token files, without empty files."""
    parts: list[TokenPart] = []
    for file in files:
        if isinstance(file, LocalFile) and file.name.endswith(TOKENS):
            part = read_header(Path(file.name))
            if part.tokens:
                parts.append(part)
    return parts


def _publish(staging: Path, target: Path) -> None:
    """Rename the finished folder in `staging` to its final path `target`."""
    # An interrupted publication is repeated by the next start, which needs only the finished folder.
    _empty(staging, keep="folder")
    if _is_prepared(target, overwrite=True):
        target.rename(staging / REPLACED)
    (staging / "folder").rename(target)
