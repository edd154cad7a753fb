"""Find local files of text or tokens, and divide them into parts for the workers."""

import dataclasses
import glob
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpt2_repro.data.sources.base import Batch, Part, Source, SourceFile, TextForm, WholeFile
from gpt2_repro.data.sources.parquet_files import parquet_parts
from gpt2_repro.data.sources.text_files import COMPRESSIONS, TextPart, is_json_array
from gpt2_repro.data.sources.token_files import TOKENS, read_header
from gpt2_repro.errors import UserError
from gpt2_repro.manifest import MANIFEST


KINDS = (".txt", ".md", ".json", ".jsonl", ".csv", ".parquet")
PART_BYTES = 2**25  # bytes of text per part: a worker needs a quarter of a second
FEW_PARTS = 100  # small files are not joined to fewer parts than this, so that all workers have work
_VALIDATION_NAME = re.compile(r"(^|[_.-])(val|valid|validation)([_.-]|$)")
_TEST_NAME = re.compile(r"(^|[_.-])test([_.-]|$)")
logger = logging.getLogger(__name__)


def kind_of(path: Path) -> str:
    """Return the extension of a file, such as .txt for both a.txt and a.txt.gz."""
    return (Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix).lower()


@dataclasses.dataclass(frozen=True)
class LocalFile(SourceFile):
    """A local file: text in one of the formats in KINDS, or tokens (TOKENS)."""

    name: str
    size: int
    form: TextForm = TextForm()

    def identity(self) -> tuple[str, ...]:
        """Return a key that is equal for all links to the same file."""
        return str(Path(self.name).resolve()), "" if self.name.endswith(TOKENS) else self.form.text_column

    def parts(self) -> list[Part]:
        path = Path(self.name)
        if (kind := kind_of(path).replace(".md", ".txt")) == TOKENS:
            return [read_header(path)]
        if kind == ".parquet":
            return parquet_parts(path, self.size, self.form, PART_BYTES)
        if kind == ".json" and not is_json_array(path):
            kind = ".jsonl"
        whole = max(1, self.size)
        step = PART_BYTES if kind == ".jsonl" and path.suffix not in COMPRESSIONS else whole
        ranges = [(start, min(start + step, self.size)) for start in range(0, whole, step)]
        return [TextPart(self.name, kind, self.form, start, stop, stop - start) for start, stop in ranges]


class JoinedFiles(WholeFile):
    """Consecutive small files, read in a single part to save time."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self.files, self.size = files, sum(file.size for file in files)
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
        _files_below(Path(pattern.partition("**")[0]))  # glob skips folders that cannot be read
    return [Path(match) for match in glob.glob(pattern, recursive=True)]


def join_small(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Return the files in order, with consecutive small text files joined."""
    limit = min(PART_BYTES, sum(file.size for file in files) // FEW_PARTS)
    groups: list[list[SourceFile]] = []
    group_size = 0
    for file in files:
        size = file.size if isinstance(file, LocalFile) and kind_of(Path(file.name)) != TOKENS else limit + 1
        group_size += size
        if not groups or group_size > limit:
            groups.append([])
            group_size = size
        groups[-1].append(file)
    return [group[0] if len(group) == 1 else JoinedFiles(group) for group in groups]


def local_source(name: str, patterns: Sequence[str], form: TextForm, *, split: str) -> Source:
    """Return a source of local files.

    Raises UserError if a pattern matches nothing, or if a file type is not supported.

    Args:
        patterns: files, folders and globs.
        split: value of --split. With `source`, files with `val` in their name are validation files.
    """
    paths: set[Path] = set()
    for pattern in patterns:
        files = [file for path in paths_of(pattern) for file in ([path] if path.is_file() else _text_files_in(path))]
        if not files:
            raise UserError(f"{pattern!r} does not exist or contains no {', '.join(KINDS)} file.")
        paths.update(files)
    # A file that is passed under two names is read once.
    sizes = {path: path.stat().st_size for path in sorted({p.resolve(): p for p in sorted(paths)[::-1]}.values())}
    if wrong := [path for path in sizes if kind_of(path) not in KINDS and path.suffix != TOKENS]:
        raise UserError(f"{wrong[0]} is not a file of {', '.join(KINDS)} (also as .gz, .zst) or .bin.")
    if split == "source" and (tests := [path for path in sizes if _TEST_NAME.search(path.name)]):
        logger.info("test files are not used with --split source: %s", ", ".join(map(str, tests)))
        sizes = {path: size for path, size in sizes.items() if path not in tests}
    described = {"name": name, "files": [{"path": str(path), "bytes": size} for path, size in sizes.items()]}
    source = Source(described, [], [])
    for path, size in sizes.items():
        held_out = (split == "source" or path.suffix == TOKENS) and _VALIDATION_NAME.search(path.name)
        (source.validation_files if held_out else source.files).append(LocalFile(str(path), size, form))
    return source


def _text_files_in(folder: Path) -> list[Path]:
    """Return the text files in a folder and its subfolders.

    Links to folders are followed. Hidden files and prepared folders are omitted. A README.md is omitted if there are
    other text files. Raises UserError if a folder cannot be read or a link is broken.
    """
    found = _files_below(folder)
    if broken := [path for path in found if not path.exists()]:
        raise UserError(f"{broken[0]} is a link to a missing file. Remove it, or pass other files.")
    files = [path for path in found if kind_of(path) in KINDS]
    if files and (others := [str(path) for path in found if kind_of(path) not in KINDS]):
        logger.info("%d files in %s are not used, because of their file types: %s …", len(others), folder, others[0])
    return [path for path in files if path.name != "README.md"] or files  # a dataset card is not text


def _files_below(folder: Path) -> list[Path]:
    """Return the files in a folder and in folders that it links to, or raise UserError."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}).") from None

    found: list[Path] = []
    seen: set[Path] = set()
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := Path(parent).resolve()) in seen or MANIFEST in names:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and not name.endswith(".staging"))
        found += [Path(parent, name) for name in sorted(names) if not name.startswith(".")]
    return found
