"""Files of datasets on the Hub: list them, fetch one at a time, check it and drop it after use."""

import contextlib
import dataclasses
import fnmatch
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2_repro.data.sources.base import Part, SourceFile, TextForm
from gpt2_repro.data.sources.local_files import KINDS, LocalFile, kind_of
from gpt2_repro.errors import UserError
from gpt2_repro.files import sha256_of
from gpt2_repro.hub import check_hub, hub_reason


class Repository:
    """A dataset repository at one revision."""

    def __init__(self, name: str, revision: str | None, folder: Path | None) -> None:
        """Look the repository up. Raises UserError if the Hub does not know it or cannot be reached.

        Args:
            folder: for downloads, dropped after use; None leaves them in the Hub's cache.
        """
        from huggingface_hub import HfApi

        check_hub()
        self.name, self.folder = name, folder
        self._api = HfApi()
        self._listing = functools.partial(hub_errors, f"list {name} on the Hub")
        with self._listing():
            self.revision = str(self._api.dataset_info(name, revision=revision).sha)

    def files(self, pattern: str, form: TextForm) -> list[SourceFile]:
        """The files whose path matches, by name. Raises UserError if there are none."""
        folder = pattern.rpartition("/")[0] or None
        where: dict[str, Any] = {"repo_type": "dataset", "revision": self.revision, "recursive": folder is not None}
        with self._listing():
            tree = self._api.list_repo_tree(self.name, folder, **where)
            found = [entry for entry in tree if fnmatch.fnmatch(entry.path, pattern)]
        if not found:
            raise UserError(f"{self.name} has no files {pattern} at revision {self.revision}")
        return [self._file(entry, form) for entry in sorted(found, key=lambda entry: entry.path)]

    def resolve(self, config: str | None, split: str, form: TextForm) -> list[SourceFile]:
        """The files of a split as `datasets` finds them. Raises UserError for an unknown config, split or form."""
        from datasets import load_dataset_builder
        from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError

        with self._listing():
            try:
                found = load_dataset_builder(self.name, config, revision=self.revision).config.data_files or {}
            except (ValueError, RuntimeError, DataFilesNotFoundError, DatasetNotFoundError) as error:
                with_script = "script" in str(error)  # which `datasets` no longer runs
                other = "@refs/convert/parquet, the Hub's copy of it" if with_script else ":CONFIG with another config"
                line = " ".join(str(error).split())[:300]
                raise UserError(f"{self.name} cannot be opened ({line}): try {self.name}{other}") from None
        if split not in found:
            raise UserError(f"{self.name} has no split {split!r}: --source_split can be {', '.join(found)}")
        paths = [url.split(f"@{self.revision}/", 1)[1] for url in found[split]]
        if wrong := [path for path in paths if kind_of(Path(path)) not in KINDS]:
            raise UserError(f"{self.name} holds {wrong[0]}: {', '.join(KINDS)} are read")
        with self._listing():
            entries = self._api.get_paths_info(self.name, paths, repo_type="dataset", revision=self.revision)
        by_path = {entry.path: entry for entry in entries}
        return [self._file(by_path[path], form) for path in paths]

    def _file(self, entry: Any, form: TextForm) -> SourceFile:
        return HubFile(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else None, self, form)


@dataclasses.dataclass
class HubFile(SourceFile):
    """A file on the Hub: taken from its cache, or fetched into the folder of downloads and dropped afterwards."""

    name: str
    size: int
    sha256: str | None
    repository: Repository
    form: TextForm
    path: Path | None = None

    def identity(self) -> tuple[str, ...]:
        return self.repository.name, self.name, self.form.text_column

    def fetch(self) -> None:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        of = self.repository
        where: dict[str, Any] = {"repo_type": "dataset", "revision": of.revision}
        cached = try_to_load_from_cache(of.name, self.name, **where)
        if isinstance(cached, str):
            self.path = Path(cached)
            return
        with hub_errors(f"fetch {self.name} of {of.name}"):
            path = Path(hf_hub_download(of.name, self.name, local_dir=of.folder, **where))
        if path.stat().st_size != self.size or (self.sha256 is not None and sha256_of(path) != self.sha256):
            path.resolve().unlink()  # in the cache, the blob that the path links to
            path.unlink(missing_ok=True)
            raise UserError(f"{self.name} of {of.name} arrived damaged: start the same command again")
        self.path = path

    def parts(self) -> list[Part]:
        assert self.path is not None
        return LocalFile(str(self.path), self.size, self.form).parts()

    def drop(self) -> None:
        """Ready-made tokens stay until their rows are cut."""
        folder = self.repository.folder
        if folder and self.path and self.path.suffix != ".bin" and self.path.is_relative_to(folder):
            self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Turn errors of the Hub and of the network into a UserError. Errors of this disk stay an OSError."""
    from huggingface_hub import errors as hub

    try:
        yield
    except (hub.HTTPError, hub.EntryNotFoundError, OSError) as error:
        from_network = isinstance(error, hub.HTTPError | hub.EntryNotFoundError | ConnectionError | TimeoutError)
        if not from_network and error.errno is not None:
            raise
        fix = "Check the name, the network and HF_TOKEN and run the command again, or pass --data_files GLOB."
        raise UserError(f"Cannot {what} ({hub_reason(error)}). {fix}") from None
