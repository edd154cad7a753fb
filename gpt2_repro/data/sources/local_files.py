"""Find local files of text or tokens, and divide them into parts for the workers."""

import dataclasses
import glob
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from gpt2_repro.data.sources.base import Batch, Part, Source, SourceFile, TextForm, WholeFile
from gpt2_repro.data.sources.parquet_files import parquet_parts
from gpt2_repro.data.sources.split_names import DESCRIPTIONS, TEST, TRAIN, VALIDATION, split_of
from gpt2_repro.data.sources.text_files import COMPRESSIONS, MARKDOWN, TextPart, is_json_array
from gpt2_repro.data.sources.token_files import BESIDE_DATATROVE, TOKENS, read_header
from gpt2_repro.errors import UserError
from gpt2_repro.manifest import MANIFEST


KINDS = (".txt", ".md", ".markdown", ".json", ".jsonl", ".csv", ".parquet")
PART_BYTES = 2**25  # bytes of text per part: a worker needs a quarter of a second
FEW_PARTS = 100  # small files are not joined to fewer parts than this, so that all workers have work
MOST_SOURCES = 20  # entries of --data_files whose tokens are counted one by one
logger = logging.getLogger(__name__)


def kind_of(path: Path) -> str:
    """Return the extension of a file, such as .txt for both a.txt and a.txt.gz."""
    suffix = path.suffix
    if suffix in COMPRESSIONS:
        suffix = Path(path.stem).suffix
    return suffix.lower()


@dataclasses.dataclass(frozen=True)
class LocalFile(SourceFile):
    """A local file: text in one of the formats in KINDS, or tokens (TOKENS)."""

    name: str
    size: int
    form: TextForm = TextForm()
    source: str = ""

    def identity(self) -> tuple[str, ...]:
        """Return a key that is equal for all links to the same file."""
        path = str(Path(self.name).resolve())
        if self.name.endswith(TOKENS):
            return (path,)
        return path, self.form.text_column

    def parts(self) -> list[Part]:
        path = Path(self.name)
        kind = kind_of(path)
        if kind in TOKENS:
            return [read_header(path)]
        if kind == ".parquet":
            return parquet_parts(path, self.size, self.form, PART_BYTES)
        if kind == ".markdown":
            kind = MARKDOWN
        if kind == ".json" and not is_json_array(path):
            kind = ".jsonl"
        if kind != ".jsonl" or path.suffix in COMPRESSIONS:
            return [TextPart(self.name, kind, self.form, 0, self.size, self.size)]
        parts: list[Part] = []
        for start in range(0, max(1, self.size), PART_BYTES):
            stop = min(start + PART_BYTES, self.size)
            part = TextPart(self.name, kind, self.form, start, stop, stop - start)
            parts.append(part)
        return parts


class JoinedFiles(WholeFile):
    """Consecutive small files, read in a single part to save time."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self.files = files
        self.size = sum(file.size for file in files)
        self.source = files[0].source
        self.name = f"{files[0].name} to {files[-1].name}"

    def read(self) -> Iterator[Batch]:
        for file in self.files:
            for part in file.parts():
                yield from part.read()


def paths_of(pattern: str) -> list[Path]:
    """Return the path with the name `pattern` if it exists, and otherwise the matches of the glob."""
    if pattern and Path(pattern).exists():
        return [Path(pattern)]
    if "**" in pattern:
        folder, _, _ = pattern.partition("**")
        _files_below(Path(folder))  # glob skips folders that cannot be read
    return [Path(match) for match in glob.glob(pattern, recursive=True)]


def join_small(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Return the files in order, with consecutive small text files of one source joined."""
    total = sum(file.size for file in files)
    limit = min(PART_BYTES, total // FEW_PARTS)
    joined: list[SourceFile] = []
    group: list[SourceFile] = []
    group_size = 0
    for file in files:
        size = limit + 1
        if isinstance(file, LocalFile) and kind_of(Path(file.name)) not in TOKENS:
            size = file.size
        group_size += size
        if group and (group_size > limit or group[-1].source != file.source):
            joined.append(_join(group))
            group = []
            group_size = size
        group.append(file)
    if group:
        joined.append(_join(group))
    return joined


def _join(files: Sequence[SourceFile]) -> SourceFile:
    if len(files) == 1:
        return files[0]
    return JoinedFiles(files)


def local_source(name: str, patterns: Sequence[str], form: TextForm, *, split: str) -> Source:
    """Return a source of local files.

    Raises UserError if a pattern matches nothing, if a file type is not supported, or if a file is named twice.

    Args:
        patterns: files, folders and globs.
        split: value of --split, or `all` to read the files of every split. With `source`, files that are named as
            validation files are validation files.
    """
    found = _find(patterns)
    for file in found:
        is_text = kind_of(file.path) in KINDS
        if not is_text and not file.has_tokens:
            raise UserError(
                f"{file.path} is not a file of {', '.join(KINDS)} (also as .gz, .zst) or {' or '.join(TOKENS)}."
            )
    with_train = {file.pattern for file in found if file.split == TRAIN}
    source = Source({"name": name, "files": []}, [], [])
    unused: list[_Found] = []
    for file in found:
        path = str(file.path)
        size = file.path.stat().st_size
        described = {"path": path, "bytes": size}
        if _is_unused(file, with_train, split):
            unused.append(file)
            source.description.setdefault("unused_files", []).append(described)
            continue
        source.description["files"].append(described)
        local = LocalFile(path, size, form, _source_of(file, patterns))
        if file.split == VALIDATION and (split == "source" or file.has_tokens):
            source.validation_files.append(local)
        else:
            source.files.append(local)
    if unused:
        _report_unused(unused, split)
    return source


def _is_unused(file: "_Found", with_train: Collection[str], split: str) -> bool:
    """Return whether a file belongs to a split that is not used.

    `with_train` has the patterns that name training files.
    """
    if split == "all":
        return False
    used = {None, TRAIN}
    if split == "source" or file.has_tokens:
        used.add(VALIDATION)
    if file.split in used:
        return False
    return file.pattern in with_train or (file.split == TEST and split == "source")


def _report_unused(unused: Sequence["_Found"], split: str) -> None:
    """Log which files are left out because of their names."""
    names = ", ".join(str(file.path) for file in unused[:3])
    more = ""
    if len(unused) > 3:
        more = f" and {len(unused) - 3} more"
    fix = ""
    if any(file.split == VALIDATION for file in unused):
        fix = " To validate on the validation files, pass --split source."
    logger.info("files of other splits are not used with --split %s: %s%s.%s", split, names, more, fix)


@dataclasses.dataclass(frozen=True)
class _Found:
    """A file that a pattern names."""

    path: Path
    pattern: str
    split: str | None  # that its name or folder names

    @property
    def has_tokens(self) -> bool:
        return self.path.suffix in TOKENS

    def __str__(self) -> str:
        if Path(self.pattern) == self.path:
            return self.pattern
        return f"{self.path} (from {self.pattern})"


def _find(patterns: Sequence[str]) -> list[_Found]:
    """Return the files of all patterns, sorted by path. Raises UserError if there is none, or one twice."""
    found: dict[tuple[int, int], _Found] = {}
    for pattern in patterns:
        files: list[Path] = []
        for path in paths_of(pattern):
            if path.is_file():
                files.append(path)
            else:
                files += _data_files_in(path)
        if not files:
            raise UserError(f"{pattern!r} does not exist or contains no {', '.join([*KINDS, *TOKENS])} file.")
        base = _fixed_part(pattern)
        for path in files:
            split = split_of(path.relative_to(base))
            file = _Found(path, pattern, split)
            status = path.stat()
            identity = (status.st_dev, status.st_ino)  # equal for all links to a file
            if identity in found:
                raise UserError(f"{file} is the same file as {found[identity]}. Pass each file once.")
            found[identity] = file
    return sorted(found.values(), key=lambda file: file.path)


def _fixed_part(pattern: str) -> Path:
    """Return the folder that a pattern names: its part before the first wildcard."""
    path = Path(pattern)
    if path.is_dir():
        return path
    if path.exists():
        return path.parent
    fixed: list[str] = []
    for part in path.parts:
        if glob.has_magic(part):
            break
        fixed.append(part)
    return Path(*fixed)


def _source_of(file: _Found, patterns: Sequence[str]) -> str:
    """Return the name under which the tokens of a file are counted: its pattern, or its folder.

    A shell may replace a glob by thousands of names.
    """
    if len(patterns) > MOST_SOURCES:
        return str(file.path.parent)
    return file.pattern


def _data_files_in(folder: Path) -> list[Path]:
    """Return the text files in a folder and its subfolders, or the token files if it has no text.

    Links to folders are followed. Hidden files and prepared folders are omitted. Files that describe a data set, such
    as README.md, are omitted if there are other text files. Raises UserError if a folder cannot be read or a link is broken.
    """
    texts: list[Path] = []
    token_files: list[Path] = []
    others: list[Path] = []
    for path in _files_below(folder):
        if not path.exists():
            raise UserError(f"{path} is a link to a missing file. Remove it, or pass other files.")
        if path.name.endswith(BESIDE_DATATROVE):
            continue  # read with its .ds file
        if kind_of(path) in KINDS:
            texts.append(path)
        elif path.suffix in TOKENS:
            token_files.append(path)
        else:
            others.append(path)
    # A folder of shards may have a README.md, and a folder of texts the weights of a model.
    are_descriptions = all(path.name in DESCRIPTIONS for path in texts)
    if token_files and are_descriptions:
        files = token_files
        others += texts
    else:
        files = [path for path in texts if path.name not in DESCRIPTIONS] or texts
        others += token_files
    if files and others:
        logger.info("%d files in %s are not used, because of their file types: %s …", len(others), folder, others[0])
    return files


def _files_below(folder: Path) -> list[Path]:
    """Return the files in a folder and in folders that it links to, or raise UserError."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}).") from None

    found: list[Path] = []
    seen: set[Path] = set()
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        real_path = Path(parent).resolve()
        if real_path in seen or MANIFEST in names:
            folders.clear()
            continue
        seen.add(real_path)
        visible = [name for name in sorted(folders) if not name.startswith(".")]
        # os.walk visits the folders that remain in this list.
        folders[:] = [name for name in visible if not name.endswith(".staging")]
        found += [Path(parent, name) for name in sorted(names) if not name.startswith(".")]
    return found
