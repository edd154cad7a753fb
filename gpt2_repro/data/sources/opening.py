"""Open the sources that --source and other options name.

A source is a preset of this project, a Hub dataset or a set of local files.
"""

import dataclasses
import glob
import json
import re
import sysconfig
from pathlib import Path
from typing import Any

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.sources.base import Source, TextForm
from gpt2_repro.data.sources.hub import Repository
from gpt2_repro.data.sources.local_files import KINDS, LocalFile, kind_of, local_source
from gpt2_repro.data.sources.presets import OTHER_SOURCES, PRESETS
from gpt2_repro.data.sources.small_texts import CHARACTERS, TRAINING, Docstrings, Shakespeare, Topics
from gpt2_repro.errors import UserError, did_you_mean


SOURCE_NAMES = [*PRESETS, *OTHER_SOURCES]
_HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[^@:]+))?(@(?P<revision>\S+))?")


@dataclasses.dataclass(frozen=True)
class Sources:
    """The training sources, and the source of each set in --validation_sets."""

    training: list[Source]
    validation_sets: dict[str, Source]

    def described(self) -> dict[str, Any]:
        """Return the descriptions of all sources, converted to JSON types."""
        sets = {name: source.description for name, source in self.validation_sets.items()}
        training = [source.description | {"weight": source.weight} for source in self.training]
        return json.loads(json.dumps({"sources": training, "validation_sets": sets}))

    def changed(self) -> list[int]:
        """Return when each local file was last changed (`st_mtime_ns`)."""
        sources = [*self.training, *self.validation_sets.values()]
        files = [file for source in sources for file in [*source.files, *source.validation_files]]
        return [Path(file.name).stat().st_mtime_ns for file in files if isinstance(file, LocalFile)]


def mixed(text: str) -> list[tuple[str, float]]:
    """Split the value of --source into pairs of a source and its share of the tokens.

    For example, "a=3,b=1" gives the shares 0.75 and 0.25.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 1 and not re.search(r"=[\d.e+-]+$", text):
        return [(text, 1.0)]
    try:
        weights = {name: float(weight) for name, _, weight in (part.rpartition("=") for part in parts)}
    except ValueError:
        weights = {}
    if not all(name and 0 < weight < float("inf") for name, weight in weights.items()) or len(weights) < len(parts):
        raise UserError(f"{text!r} is not a mixture. Use the form fineweb-edu-10bt=0.9,pg19=0.1.")
    return [(name, weight / sum(weights.values())) for name, weight in weights.items()]


def validation_sets(args: DataArguments) -> dict[str, str]:
    """Return a dict from the names of --validation_sets to their sources."""
    sets: dict[str, str] = {}
    for text in args.validation_sets:
        name, _, source = text.partition("=")
        if not re.fullmatch(r"[a-z0-9_]+", name) or not source or name in sets:
            form = "Pass NAME=SOURCE with a different NAME of a-z, 0-9 and _ for each set."
            raise UserError(f"--validation_sets {text!r} is invalid. {form}")
        sets[name] = source
    return sets


@dataclasses.dataclass(frozen=True)
class SourceOpener:
    """Open the sources that a recipe names: look up their files and revisions."""

    args: DataArguments
    downloads: Path  # folder for downloaded files
    keep_downloads: bool  # whether to download files to the local Hugging Face cache instead
    revisions: dict[str, str]  # for each Hub repository, the revision that an interrupted preparation used

    def open_all(self) -> Sources:
        """Open all sources in the recipe section `data:`."""
        if self.args.data_files:
            training = [self._local("files", self.args.data_files)]
        else:
            pairs = mixed(self.args.source)
            training = [dataclasses.replace(self.open(name), weight=weight) for name, weight in pairs]
        return Sources(training, {name: self.open(text) for name, text in validation_sets(self.args).items()})

    def open(self, text: str) -> Source:
        """Open one source: a name in --list_sources, a Hub dataset, or local files.

        `#COLUMN` at the end of `text` selects the text column.
        """
        name, _, column = text.partition("#")
        described: dict[str, Any] = {"name": name}
        if name in PRESETS:
            preset = PRESETS[name]
            repository = self._repository(preset.repository)
            described |= {"repository": repository.name, "files": preset.train, "revision": repository.revision}
            own = repository.files(preset.validation, preset.form) if preset.validation else []
            return Source(described, repository.files(preset.train, preset.form), own)
        if name == "tiny-shakespeare":
            folder = str(self.downloads)
            train, validation = Shakespeare(0, TRAINING, folder), Shakespeare(TRAINING, CHARACTERS, folder)
            return Source(described, [train], [validation])
        if name == "embedded":
            return Source(described | {"python": sysconfig.get_python_version()}, [Topics(), Docstrings()], [])
        if kind_of(Path(name)) in (*KINDS, ".bin") or glob.glob(name, recursive=True):
            return self._local(name, [name], column)
        if match := _HUB_ID.fullmatch(name):
            repository, split = self._repository(match["name"], match["revision"]), self.args.source_split
            files = repository.resolve(match["config"], split, self._form(column))
            described |= {"repository": repository.name, "config": match["config"], "split": split}
            return Source(described | {"revision": repository.revision}, files, [])
        raise UserError(
            f"Unknown source {name!r}. {did_you_mean(name, SOURCE_NAMES)} For a Hub dataset, pass OWNER/NAME."
        )

    def _form(self, column: str) -> TextForm:
        return TextForm(column or self.args.text_column, self.args.sample_by)

    def _repository(self, name: str, revision: str | None = None) -> Repository:
        folder = None if self.keep_downloads else self.downloads
        return Repository(name, self.revisions.get(name, revision), folder)

    def _local(self, name: str, patterns: list[str], column: str = "") -> Source:
        return local_source(name, patterns, self._form(column), split=self.args.split)
