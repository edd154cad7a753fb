"""Find the files of the sources that --source and other options ask for.

A source is a preset of this project, a Hub dataset or a set of local files.
"""

import dataclasses
import difflib
import glob
import itertools
import json
import logging
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.sources.base import SourceFile, TextForm
from gpt2_repro.data.sources.hub import Repository
from gpt2_repro.data.sources.local_files import KINDS, LocalFile, kind_of
from gpt2_repro.data.sources.presets import OTHER_SOURCES, PRESETS
from gpt2_repro.data.sources.small_texts import CHARACTERS, TRAINING, Docstrings, Shakespeare, Topics
from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.manifest import MANIFEST


SOURCE_NAMES = [*PRESETS, *OTHER_SOURCES]
_HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[^@:]+))?(@(?P<revision>\S+))?")
_VALIDATION_NAME = re.compile(r"(^|[_.-])(val|valid|validation)([_.-]|$)")
_TEST_NAME = re.compile(r"(^|[_.-])test([_.-]|$)")
OTHER_FORMATS = {
    ".tsv": "Save it as CSV, with commas between the columns",
    **dict.fromkeys([".zip", ".tar", ".tgz", ".7z", ".rar", ".gz", ".zst"], "Unpack it, and pass the files in it"),
    **dict.fromkeys([".pdf", ".docx", ".doc", ".epub", ".odt", ".rtf"], "Convert it to plain text (.txt)"),
}
COLUMNS = {".json", ".jsonl", ".csv", ".parquet"}
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Source:
    """A source of documents: its description and its files.

    Args:
        description: what the manifest records about the source, including the revision of a Hub dataset.
        validation_files: the source's own validation files, if any.
        weight: share of the tokens in a mixture; 1 for a single source.
    """

    description: dict[str, Any]
    files: list[SourceFile]
    validation_files: list[SourceFile]
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Sources:
    """The sources of a preparation.

    Args:
        training: the training sources.
        validation_sets: for each name in --validation_sets, the source of the set.
    """

    training: list[Source]
    validation_sets: dict[str, Source]

    def described(self) -> dict[str, Any]:
        """Return the descriptions of all sources, converted to JSON types."""
        sets = {name: source.description for name, source in self.validation_sets.items()}
        of_training = [source.description | {"weight": source.weight} for source in self.training]
        return json.loads(json.dumps({"sources": of_training, "validation_sets": sets}))

    def changed(self) -> list[int]:
        """Return when each local file was last changed (`st_mtime_ns`)."""
        sources = [*self.training, *self.validation_sets.values()]
        files = [file for source in sources for file in [*source.files, *source.validation_files]]
        return [Path(file.name).stat().st_mtime_ns for file in files if isinstance(file, LocalFile)]


def mixed(text: str) -> list[tuple[str, float]]:
    """Split the value of --source into pairs of a source and its share of the tokens.

    A share is the weight of the source divided by the sum of all weights. For example, "a=3,b=1" gives the shares
    0.75 and 0.25. Raises UserError if a source in a mixture has no valid weight.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 1 and not re.search(r"=[\d.e+-]+$", text):
        return [(text, 1.0)]
    pairs = []
    for part in parts:
        name, _, weight = part.rpartition("=")
        try:
            pairs.append((name, float(weight)))
        except ValueError:
            pairs.append((part, 0.0))
        if not name or not 0 < pairs[-1][1] < float("inf"):
            raise UserError(f"{part!r} in {text!r} has no valid weight. Use the form fineweb-edu-10bt=0.9,pg19=0.1.")
    total = sum(weight for _, weight in pairs)
    return [(name, weight / total) for name, weight in pairs]


def validation_sets(args: DataArguments) -> dict[str, str]:
    """Return a dict from the names of --validation_sets to their sources.

    Raises UserError if an entry is not NAME=SOURCE, or if a name occurs twice.
    """
    sets = {}
    for text in args.validation_sets:
        name, _, source = text.partition("=")
        if not re.fullmatch(r"[a-z0-9_]+", name) or not source:
            raise UserError(f"--validation_sets {text!r} is invalid. Pass NAME=SOURCE with a NAME of a-z, 0-9 and _.")
        if name in sets:
            raise UserError(f"--validation_sets names {name} twice. Pass each name once.")
        sets[name] = source
    return sets


@dataclasses.dataclass(frozen=True)
class SourceOpener:
    """Open the sources that a recipe names: look up their files and revisions.

    Args:
        keep_downloads: whether to download files to the local Hugging Face cache instead of the folder `downloads`.
        revisions: for each Hub repository, the revision that an interrupted preparation used.
    """

    args: DataArguments
    downloads: Path
    keep_downloads: bool
    revisions: dict[str, str]

    def open_all(self) -> Sources:
        """Open all sources in the recipe section `data:`.

        Raises UserError for an unknown name or a glob that matches no file.
        """
        if self.args.data_files:
            form = TextForm(self.args.text_column, self.args.sample_by)
            training = [self._local("files", self.args.data_files, form)]
        else:
            pairs = mixed(self.args.source)
            training = [dataclasses.replace(self.open(name), weight=weight) for name, weight in pairs]
        return Sources(training, {name: self.open(text) for name, text in validation_sets(self.args).items()})

    def open(self, text: str) -> Source:
        """Open one source: a name in --list_sources, a Hub dataset, or local files.

        `text` can be a path or a glob of local files. `#COLUMN` at the end of `text` selects the text column. Raises
        UserError if the source does not exist.
        """
        name, _, column = text.partition("#")
        form = TextForm(column or self.args.text_column, self.args.sample_by)
        described: dict[str, Any] = {"name": name}
        if name in PRESETS:
            preset = PRESETS[name]
            repository = self._repository(preset.repository)
            described |= {"repository": repository.name, "files": preset.train, "revision": repository.revision}
            own = repository.files(preset.validation, preset.form) if preset.validation else []
            return Source(described, repository.files(preset.train, preset.form), own)
        if name == "tiny-shakespeare":
            folder = str(self.downloads)
            parts = Shakespeare(0, TRAINING, folder), Shakespeare(TRAINING, CHARACTERS, folder)
            return Source(described, [parts[0]], [parts[1]])
        if name == "embedded":
            return Source(described | {"python": sysconfig.get_python_version()}, [Topics(), Docstrings()], [])
        if kind_of(Path(name)) in (*KINDS, ".bin") or glob.glob(name, recursive=True):
            return self._local(name, [name], form)
        if match := _HUB_ID.fullmatch(name):
            repository, split = self._repository(match["name"], match["revision"]), self.args.source_split
            files = repository.resolve(match["config"], split, form)
            described |= {"repository": repository.name, "config": match["config"], "split": split}
            return Source(described | {"revision": repository.revision}, files, [])
        fix = f"{did_you_mean(name, SOURCE_NAMES)} For a Hub dataset, pass OWNER/NAME."
        if "=" in name:
            fix = "In a mixture, write a number after each =, such as books/*.txt=0.5."
        raise UserError(f"Unknown source {name!r}. {fix}")

    def _repository(self, name: str, revision: str | None = None) -> Repository:
        folder = None if self.keep_downloads else self.downloads
        return Repository(name, self.revisions.get(name, revision), folder)

    def _local(self, name: str, globs: list[str], form: TextForm) -> Source:
        """Return a source of local files."""
        found: set[Path] = set()
        empty = []
        for pattern in globs:
            texts: list[Path] = []
            if not set("*?[") & set(pattern) and not Path(pattern).exists():
                names = [path.name for path in Path(pattern).parent.glob("*")]
                near = difflib.get_close_matches(Path(pattern).name, names, n=1, cutoff=0.8)
                hint = f"Did you mean {Path(pattern).with_name(near[0])}?" if near else "Check the path."
                if Path(pattern).is_symlink():
                    hint = "It is a link to a file that does not exist."
                # A name with spaces that was not quoted is in several parts.
                spaced = [name for name in names if name.startswith(f"{Path(pattern).name} ")]
                whole = Path(pattern).with_name(spaced[0]) if spaced else Path(" ".join(globs))
                if whole.exists():
                    hint = f'Quote names with spaces: "{whole}".'
                if set("\u201c\u201d\u2018\u2019") & set(pattern):
                    hint = "Replace the curly quotes by straight quotes."
                if "#" in pattern:
                    hint = "To choose a column, pass --text_column."
                if "," in pattern:
                    hint = "Separate files with spaces, without commas and brackets."
                if "://" in pattern:
                    hint = "URLs are not supported: download the file and pass its local path."
                raise UserError(f"There is no local file or folder {pattern!r}. {hint}")
            # An existing path is not used as a glob, because its name may contain [].
            for path in [Path(pattern)] if Path(pattern).exists() else _glob(pattern):
                if not path.is_file() and not path.is_dir():
                    raise UserError(f"{path} is not a regular file. Write the text to a .txt file and pass that file.")
                if (path / MANIFEST).is_file():
                    fix = f"Train on it with: python train.py RECIPE --dataset_dir {path}"
                    raise UserError(f"{path} is a folder that prepare_data.py has written. {fix}")
                if any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
                    fix = "Export the dataset with to_json or to_parquet, and pass the exported file."
                    raise UserError(f"{path} was written by save_to_disk of `datasets`. {fix}")
                texts += [path] if path.is_file() else _text_files_in(path)
            found.update(texts)
            empty += [] if texts else [pattern]
        # A file that is passed under two names is read once.
        paths = sorted({path.resolve(): path for path in sorted(found, reverse=True)}.values())
        if empty:
            for pattern in empty:
                if not (folder := _folder_of(pattern)).is_dir():
                    raise UserError(f"There is no folder {folder} (--data_files {pattern}). Check the path.")
            fix = "Pass --data_files with a file, a folder or a quoted glob such as 'books/*.txt'."
            raise UserError(f"{' '.join(empty)} contains no {', '.join(KINDS)} file. {fix}")
        for path in paths:
            if kind_of(path) not in (*KINDS, ".bin") or (path.suffix in (".gz", ".zst") and kind_of(path) == ".bin"):
                new = path.with_suffix(".jsonl") if path.suffix == ".ndjson" else f"{path}.txt"
                fix = f"If it is text, rename it to {Path(new).name}. Otherwise, convert it"
                fix = OTHER_FORMATS.get(path.suffix.lower(), fix)
                known = f"{', '.join(KINDS)} (also compressed as .gz or .zst) and .bin"
                raise UserError(f"The file type of {path} is not supported. Supported are {known}. {fix}.")
            if not os.access(path, os.R_OK):
                raise UserError(f"{path} cannot be read. Change its permissions, or pass other files.")
            if path.stat().st_size < 1024 and path.read_bytes().startswith(b"version https://git-lfs."):
                raise UserError(f"{path} is a Git LFS pointer, not the data. Run `git lfs pull` in its repository.")
        tests = [path for path in paths if self.args.split == "source" and _TEST_NAME.search(path.name)]
        if tests:
            logger.info(
                "These test files are not used, because --split source uses only training and validation files: %s",
                ", ".join(map(str, tests)),
            )
        sizes = {path: path.stat().st_size for path in paths if path not in tests}
        if form.text_column != TextForm().text_column and not {kind_of(path) for path in sizes} & COLUMNS:
            logger.warning("--text_column %s has no effect, because text files have no columns.", form.text_column)
        own = [path for path in sizes if self.args.split == "source" or path.suffix == ".bin"]
        validation = [path for path in own if _VALIDATION_NAME.search(path.name)]
        files: dict[Path, SourceFile] = {path: LocalFile(str(path), size, form) for path, size in sizes.items()}
        return Source(
            {"name": name, "files": [{"path": str(path), "bytes": size} for path, size in sizes.items()]},
            [file for path, file in files.items() if path not in validation],
            [files[path] for path in validation],
        )


def _folder_of(pattern: str) -> Path:
    """Return the folder in front of the first part of a path with a wildcard."""
    return Path(*itertools.takewhile(lambda part: not set("*?[") & set(part), Path(pattern).parts))


def _walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield each folder with the names of its subfolders and files, like os.walk.

    Hidden folders are omitted. Links to folders are followed, and each folder is visited once.

    Raises UserError if a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        fix = "Change its permissions, or pass other files."
        raise UserError(f"{error.filename} cannot be read ({error.strerror}). {fix}") from None

    seen: set[Path] = set()
    for name, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := Path(name).resolve()) in seen:
            folders.clear()
        else:
            seen.add(real)
            folders[:] = sorted(inner for inner in folders if not inner.startswith("."))
            yield Path(name), folders, names


def _glob(pattern: str) -> list[Path]:
    """Return the paths that match a pattern.

    Unlike in glob.glob, ** does not follow cycles of links, and does not skip folders that cannot be read.
    """
    before, stars, after = pattern.partition("**")
    if not stars or not f"/{before}".endswith("/") or after[:1] not in ("", "/"):
        return list(map(Path, glob.glob(pattern)))
    folders = [inner for outer in glob.glob(before or ".") for inner, _, _ in _walk(Path(outer))]
    return [path for inner in folders for path in _glob(glob.escape(str(inner)) + (after or "/*"))]


def _text_files_in(folder: Path) -> list[Path]:
    """Return the text files in a folder and its subfolders.

    Hidden files and prepared folders are omitted. A README.md is omitted if there are other text files.
    """
    found: list[Path] = []
    for inner, folders, names in _walk(folder):
        prepared = MANIFEST in names
        folders[:] = [name for name in folders if not prepared and not name.endswith(".staging")]
        found += [inner / name for name in names if not prepared and not name.startswith(".")]
    for path in found:
        if not path.is_file() and (path.is_symlink() or kind_of(path) in KINDS):
            raise UserError(f"{path} is neither a file nor a link to one. Remove it, or pass other files.")
    files = [path for path in sorted(found) if kind_of(path) in KINDS]
    others = [str(path) for path in sorted(found) if kind_of(path) not in KINDS]
    if files and others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        logger.info("not used, because of their file types: %s", ", ".join(others[:3]) + more)
    texts = [path for path in files if path.name != "README.md"]
    if texts and len(texts) < len(files):
        why = "because the folder has other text files. To use it, also pass its path to --data_files."
        logger.info("README.md in %s is not used, %s", folder, why)
    return texts or files
