"""Where documents come from. A source is a description for the manifest and a list of files."""

import dataclasses
import glob
import sysconfig
from pathlib import Path
from typing import Any

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.embedded import Docstrings, Topics
from gpt2_repro.data.files import LocalFile, SourceFile, kind_of
from gpt2_repro.data.hub import HUB_PRESETS, list_preset
from gpt2_repro.errors import UserError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Source:
    """A source and what the manifest says of it."""

    description: dict[str, Any]
    files: list[SourceFile]


SOURCES = {
    **{name: preset.about for name, preset in HUB_PRESETS.items()},
    "embedded": "the English documentation inside every CPython, about 2 MB, another text for each version",
    "files": "your own text: --data_files",
}


def open_source(args: DataArguments, staging: Path, *, revision: str | None = None) -> Source:
    """The source that `args` names, on the Hub at `revision`. `staging` takes downloads, one file at a time.

    Raises UserError for an unknown source and for globs that match nothing or files of an unknown kind.
    """
    if args.data_files:
        return _local_files(args.data_files)
    if args.source in HUB_PRESETS:
        return Source(*list_preset(args.source, staging, revision=revision))
    if args.source == "embedded":
        return Source({"name": "embedded", "python": sysconfig.get_python_version()}, [Topics(), Docstrings()])
    if args.source == "files":
        raise UserError("source files needs --data_files GLOB")
    raise UserError(f"there is no source {args.source!r}: {did_you_mean(args.source, SOURCES)}")


def source_name(args: DataArguments) -> str:
    """The name under which a manifest records the source."""
    return "files" if args.data_files else args.source


def _local_files(globs: list[str]) -> Source:
    paths = sorted({Path(name) for pattern in globs for name in glob.glob(pattern, recursive=True)})
    files = [path for path in paths if path.is_file()]
    if not files:
        raise UserError(f"--data_files {' '.join(globs)} matches no file")
    for path in files:
        if kind_of(path) not in (".txt", ".jsonl", ".parquet"):
            raise UserError(f"{path} is no .txt, .jsonl or .parquet file (each may end in .gz)")
    described = [{"path": str(path), "bytes": path.stat().st_size} for path in files]
    return Source({"name": "files", "files": described}, [LocalFile(str(path)) for path in files])
