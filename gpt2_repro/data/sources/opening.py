"""Open the sources that --source and other options name.

A source is a preset of this project, a Hub dataset or a set of local files.
"""

import dataclasses
import re
import sysconfig
from pathlib import Path
from typing import Any

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.sources.base import Source, SourceFile, TextForm
from gpt2_repro.data.sources.hub import Repository
from gpt2_repro.data.sources.local_files import KINDS, LocalFile, kind_of, local_source, paths_of
from gpt2_repro.data.sources.mixture import MixturePart
from gpt2_repro.data.sources.presets import BY_LANGUAGE, OTHER_SOURCES, PRESETS
from gpt2_repro.data.sources.small_texts import CHARACTERS, TRAINING, PythonDocumentation, Shakespeare
from gpt2_repro.data.sources.token_files import TOKENS
from gpt2_repro.errors import UserError, did_you_mean


SOURCE_NAMES = [*PRESETS, *BY_LANGUAGE, *OTHER_SOURCES]
_HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[^@:]+))?(@(?P<revision>\S+))?")


@dataclasses.dataclass(frozen=True)
class Sources:
    """The training sources, and the source of each set in --validation_sets."""

    training: list[Source]
    validation_sets: dict[str, Source]
    mixture: list[MixturePart]  # the part of each training source, or an empty list for a single source
    # Sets of --validation_sets that have the held-out documents of a source of the mixture: its number.
    held_out_sets: dict[str, int]

    def described(self) -> dict[str, Any]:
        """Return the descriptions of all sources. A mixture has its sources under `sources`."""
        sets: dict[str, Any] = {}
        for name, source in self.validation_sets.items():
            sets[name] = source.description
        for name, number in self.held_out_sets.items():
            sets[name] = self.training[number].description
        training = self.training[0].description
        if self.mixture:
            names = [part.source for part in self.mixture]
            training = {"name": " + ".join(names), "sources": [source.description for source in self.training]}
        return {"training": training, "validation_sets": sets}

    def changed(self) -> list[int]:
        """Return when each local file was last changed (`st_mtime_ns`)."""
        times: list[int] = []
        for source in [*self.training, *self.validation_sets.values()]:
            for file in [*source.files, *source.validation_files]:
                if isinstance(file, LocalFile):
                    status = Path(file.name).stat()
                    times.append(status.st_mtime_ns)
        return times


@dataclasses.dataclass(frozen=True)
class SourceOpener:
    """Open the sources that a recipe names: look up their files and revisions."""

    args: DataArguments
    folder: Path  # for a file that is not from the Hub
    downloads: Path | None  # folder for files of the Hub, or None for the local Hugging Face cache
    revisions: dict[str, str]  # for each name of a Hub dataset, the revision that an interrupted preparation used

    def open_all(self) -> Sources:
        """Open all sources in the recipe section `data:`."""
        args = self.args
        split_of_sets = "all"
        if args.split == "source":
            split_of_sets = "source"
        mixture = args.mixture
        names_of_parts = [part.source for part in mixture]
        sets: dict[str, Source] = {}
        held_out_sets: dict[str, int] = {}
        for text in args.validation_sets:
            name, _, source = text.partition("=")
            is_name = re.fullmatch(r"[a-z0-9_]+", name)
            if not is_name or not source or name in sets or name in held_out_sets:
                raise UserError(f"--validation_sets {text!r} is not NAME=SOURCE with a new NAME of a-z, 0-9 and _.")
            if source in names_of_parts:
                held_out_sets[name] = names_of_parts.index(source)
            else:
                sets[name] = self.open(source, split=split_of_sets)
        if args.data_files:
            training = [local_source("files", args.data_files, self._form(args.text_column), split=args.split)]
        else:
            training = [self.open(name, split=args.split) for name in names_of_parts or [args.source]]
        return Sources(training, sets, mixture, held_out_sets)

    def open(self, text: str, *, split: str) -> Source:
        """Open one source: a name in --list_sources, a Hub dataset, or local files.

        `#COLUMN` at the end of `text` selects the text column. `split` is that of `local_source`.
        """
        name, _, column = text.partition("#")
        form = self._form(column or self.args.text_column)
        if name in PRESETS:
            return self._open_preset(name)
        if name == "tiny-shakespeare":
            folder = str(self.folder)
            train = Shakespeare(0, TRAINING, folder)
            validation = Shakespeare(TRAINING, CHARACTERS, folder)
            return Source({"name": name}, [train], [validation])
        if name == "embedded":
            described = {"name": name, "python": sysconfig.get_python_version()}
            return Source(described, [PythonDocumentation()], [])
        kind = kind_of(Path(name))
        if kind in KINDS or kind in TOKENS or paths_of(name):
            return local_source(name, [name], form, split=split)
        return self._open_hub_dataset(name, form)

    def _form(self, column: str) -> TextForm:
        return TextForm(column, drops_front_matter=self.args.front_matter == "drop")

    def _open_hub_dataset(self, name: str, form: TextForm) -> Source:
        """Open OWNER/NAME[:CONFIG][@REVISION], or a short name of BY_LANGUAGE with a language."""
        short, colon, language = name.partition(":")
        hub_id = BY_LANGUAGE.get(short, short) + colon + language
        match = _HUB_ID.fullmatch(hub_id)
        if not match:
            hint = did_you_mean(name, SOURCE_NAMES)
            raise UserError(f"Unknown source {name!r}. {hint} For a Hub dataset, pass OWNER/NAME.")
        hub = self._repository(name, match["name"], match["revision"])
        config = match["config"]
        split = self.args.source_split
        described = {
            "name": name,
            "repository": hub.name,
            "config": config,
            "split": split,
            "revision": hub.revision,
        }
        files = hub.resolve(config, split, form)
        return Source(described, files, [])

    def _open_preset(self, name: str) -> Source:
        preset = PRESETS[name]
        hub = self._repository(name, preset.repository)
        form = TextForm()
        described = {
            "name": name,
            "repository": hub.name,
            "files": preset.train,
            "revision": hub.revision,
        }
        validation: list[SourceFile] = []
        if preset.validation:
            validation = hub.files(preset.validation, form)
        train = hub.files(preset.train, form)
        return Source(described, train, validation)

    def _repository(self, name: str, repository: str, requested: str | None = None) -> Repository:
        """Open a repository. `name` is that of the source: two sources can have two revisions of one repository."""
        revision = self.revisions.get(name, requested)
        return Repository(repository, revision, self.downloads)
