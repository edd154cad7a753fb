"""Read, write, sync, hash and delete files and folders."""

import codecs
import contextlib
import errno
import fcntl
import functools
import gzip
import hashlib
import json
import logging
import math
import os
import re
import stat
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from gpt2_repro.errors import UserError, in_a_line


logger = logging.getLogger(__name__)

# Errors of fsync for a folder on file systems that cannot sync it, such as CIFS, 9p and some of FUSE. PostgreSQL ignores
# the first two (fsync_fname_ext), SQLite all errors.
CANNOT_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP)
FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # five times as fast, if PyYAML has libyaml


def try_lock(descriptor: int, path: Path, *, shared: bool = False) -> bool:
    """Lock an open file or folder. Return False if another process has locked it.

    The lock lasts until all copies of the descriptor are closed. Other processes can have a `shared` lock at the same
    time. If the file system has no locks, a warning names `path`, and the result is True.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # NFS, FUSE and Lustre can be mounted without locks
        logger.warning("%s cannot be locked (%s). Do not let two commands write it at once.", path, error.strerror)
    return True


def sync_folder(folder: Path) -> None:
    """Fsync a folder and everything in it, for example before renaming the folder."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_file() or path.is_dir():
            sync(path)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the list of files of a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_SYNC or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
        _warn_of_folders(os.strerror(error.errno))
    finally:
        os.close(descriptor)


@functools.cache  # once per process
def _warn_of_folders(reason: str) -> None:
    logger.warning("This file system cannot sync folders (%s). After a power failure, new files can be lost.", reason)


def expand(path: str) -> str:
    """Replace `~` and environment variables in a path, or raise UserError if they are not defined."""
    # The shell does not expand paths that are quoted or written in a recipe.
    expanded = os.path.expandvars(os.path.expanduser(path))  # noqa: PTH111 (Path would turn "" into ".")
    unset = re.search(r"^~[^/]*|\$(\w+|\{[^}]*\})", expanded)
    if unset is not None and not os.path.lexists(expanded):
        raise UserError(f"{path}: {unset[0]} is not defined. Set it, or write the path without it.")
    return expanded


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically, and create its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Each of several processes that write the same file needs its own temporary file.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")
    data = content.encode() if isinstance(content, str) else content
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def to_json(value: Any, **options: Any) -> str:
    """Return a value as JSON, with null for each number that is not finite."""

    def finite(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {key: finite(item) for key, item in part.items()}
        if isinstance(part, list | tuple):
            return [finite(item) for item in part]
        if isinstance(part, float) and not math.isfinite(part):
            return None
        return part

    return json.dumps(finite(value), **options)


def parse_object(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object in a text, or None if the text is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if the file is missing or damaged."""
    if not path.is_file():
        return {}
    return parse_object(path.read_bytes()) or {}


T = TypeVar("T")


def from_json(kind: type[T], value: object, *, default: T | None = None) -> T:
    """Convert parsed JSON to a dataclass, or to a list or dict of dataclasses.

    Keys without a field are ignored. A value of another form gives `default`, or raises ValueError if that is None.
    """
    from pydantic import TypeAdapter  # takes 0.2 s, and few commands need it

    try:
        return TypeAdapter(kind).validate_python(value)
    except ValueError:
        if default is None:
            raise
        return default


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the line number and JSON value of each line in a .jsonl or .jsonl.gz file.

    Blank lines and a byte order mark are skipped. Raises UserError if a line is not JSON in UTF-8.
    """
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):  # only "\n" ends a line of bytes
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    value = json.loads(line.decode())
                    if b"\\u" in line:
                        json.dumps(value, ensure_ascii=False).encode()  # ValueError for half of a surrogate pair
                    yield number, value
    except (ValueError, RecursionError):
        fix = "Write one JSON value per line. If you downloaded the file, download the file again."
        raise UserError(f"{path}, line {number} is not JSON in UTF-8. {fix}") from None
    except (OSError, EOFError, zlib.error) as error:
        place = f"{path}, line {number + 1}," if number else str(path)
        raise UserError(f"{place} cannot be read: {in_a_line(error)}") from None


def read_table(module: str, name: str) -> Any:
    """Return the content of a YAML file next to a module, whose `__file__` is `module`."""
    return yaml.load(Path(module).with_name(name).read_text(encoding="utf-8"), Loader=FAST_LOADER)


def size_of(folder: Path) -> int:
    """Return the total size of the files in a folder in bytes, or 0 if the folder is missing."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def growth(folder: Path) -> Callable[[], bool]:
    """Return a function that tells whether a folder has grown since its last call."""
    size = 0

    def grows() -> bool:
        nonlocal size
        before = size
        with contextlib.suppress(FileNotFoundError):  # deleted or renamed meanwhile
            size = size_of(folder)
        return size != before

    return grows


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's content."""
    with path.open("rb") as file:
        # While another thread imports modules, each piece waits up to 5 ms for Python's lock.
        return hashlib.file_digest(file, "sha256", _bufsize=1 << 22).hexdigest()


def append_line(path: Path, line: str) -> None:
    """Append a line to a text file. If the last line has no line break, add one first."""
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":  # a full disk can have cut off the last line
                line = f"\n{line}"
        file.write(f"{line}\n".encode())
