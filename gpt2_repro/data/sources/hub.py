"""List, download and check the files of Hub datasets, and delete the downloads."""

import contextlib
import dataclasses
import fnmatch
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2_repro.data.sources.base import Part, SourceFile, TextForm
from gpt2_repro.data.sources.local_files import KINDS, LocalFile, kind_of
from gpt2_repro.data.sources.token_files import TOKENS
from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.files import sha256_of
from gpt2_repro.hub import check_hub, hub_reason


MOST_PATHS = 1000  # of a request (huggingface_hub 2.4, _commit_api.py)


class Repository:
    """A dataset repository on the Hub at a fixed revision."""

    def __init__(self, name: str, revision: str | None, folder: Path | None) -> None:
        """Look up the repository on the Hub.

        Args:
            revision: branch, tag or commit; None for the default branch.
            folder: folder for downloaded files, or None to keep files in the local Hugging Face cache.
        """
        from huggingface_hub import HfApi

        check_hub()
        self.name = name
        self.folder = folder
        self._api = HfApi()
        self._listing = functools.partial(hub_errors, f"list {name} on the Hub")
        with self._listing():
            info = self._api.dataset_info(name, revision=revision)
        self.revision = str(info.sha)
        self.where: dict[str, Any] = {"repo_type": "dataset", "revision": self.revision}

    def files(self, pattern: str, form: TextForm) -> list[SourceFile]:
        """Return the files whose paths match a pattern, sorted by path."""
        folder, _, _ = pattern.rpartition("/")
        with self._listing():
            tree = self._api.list_repo_tree(self.name, folder or None, recursive=bool(folder), **self.where)
            paths = [entry.path for entry in tree]
        matching = sorted(fnmatch.filter(paths, pattern))
        if not matching:
            raise UserError(f"{self.name} has no files {pattern} at revision {self.revision}. Pass another --source.")
        return self._files(matching, form)

    def resolve(self, config: str | None, split: str, form: TextForm) -> list[SourceFile]:
        """Return the files of a split, as found by the `datasets` library."""
        from datasets import load_dataset_builder
        from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError

        with self._listing():
            try:
                builder = load_dataset_builder(self.name, config, revision=self.revision)
            except (ValueError, RuntimeError, DataFilesNotFoundError, DatasetNotFoundError) as error:
                fix = f"Pass another config (:CONFIG), or --source {self.name}@refs/convert/parquet, the Parquet copy."
                raise UserError(f"{self.name} cannot be opened ({in_a_line(error)}). {fix}") from None
        splits = builder.config.data_files or {}
        if split not in splits:
            raise UserError(f"{self.name} has no split {split!r}. Set --source_split to one of: {', '.join(splits)}.")
        paths: list[str] = []
        for url in splits[split]:
            _, _, path = url.partition(f"@{self.revision}/")
            if kind_of(Path(path)) not in KINDS:
                raise UserError(f"{path} of {self.name} is not a {', '.join(KINDS)} file. Pass another dataset.")
            paths.append(path)
        return self._files(paths, form)

    def _files(self, paths: list[str], form: TextForm) -> list[SourceFile]:
        infos: dict[str, Any] = {}
        for start in range(0, len(paths), MOST_PATHS):
            group = paths[start : start + MOST_PATHS]
            with self._listing():
                answer = self._api.get_paths_info(self.name, group, **self.where)
            for info in answer:
                infos[info.path] = info
        # The ids must equal those of other projects.
        form = dataclasses.replace(form, verbatim=True, drops_front_matter=False)
        files: list[SourceFile] = []
        for path in paths:
            info = infos[path]
            sha256 = getattr(info.lfs, "sha256", None)
            files.append(HubFile(path, info.size, sha256, self, form, self.name))
        return files


@dataclasses.dataclass
class HubFile(SourceFile):
    """A file of a Hub dataset. `path` is None before the file is fetched."""

    name: str
    size: int
    sha256: str | None
    repository: Repository
    form: TextForm
    source: str
    path: Path | None = None

    def identity(self) -> tuple[str, ...]:
        return self.repository.name, self.name, self.form.text_column

    def fetch(self) -> None:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        if self.path is not None:
            return
        repository = self.repository
        where = repository.where
        folder = repository.folder
        cached = try_to_load_from_cache(repository.name, self.name, **where)
        if isinstance(cached, str):
            folder = None
        with hub_errors(f"fetch {self.name} of {repository.name}"):
            path = Path(hf_hub_download(repository.name, self.name, local_dir=folder, **where))
        if not self._is_complete(path):
            path.resolve().unlink()  # in the cache, the blob that the path links to
            path.unlink(missing_ok=True)
            raise UserError(f"{self.name} of {repository.name} was damaged in the download. Run the command again.")
        self.path = path

    def _is_complete(self, path: Path) -> bool:
        """Return whether a downloaded file has the size and the hash that the Hub lists."""
        if path.stat().st_size != self.size:
            return False
        return self.sha256 is None or sha256_of(path) == self.sha256

    def parts(self) -> list[Part]:
        assert self.path is not None
        file = LocalFile(str(self.path), self.size, self.form)
        return file.parts()

    def drop(self) -> None:
        folder = self.repository.folder
        if folder is None or self.path is None:
            return
        # Token files are kept until the rows are cut, because their ids are not copied.
        if self.path.suffix not in TOKENS and self.path.is_relative_to(folder):
            self.path.unlink(missing_ok=True)


CHECK = "Check the name, the network and HF_TOKEN. Then run the command again, or pass local --data_files."


@contextlib.contextmanager
def hub_errors(what: str, fix: str = CHECK) -> Iterator[None]:
    """Convert errors of the Hub and of the network into a UserError.

    Args:
        what: the words after "Cannot" in the message, such as "fetch FILE".
    """
    from huggingface_hub import errors as hub

    of_hub = (hub.HTTPError, hub.EntryNotFoundError, hub.HFValidationError)
    try:
        yield
    except (*of_hub, OSError) as error:
        is_remote = isinstance(error, (*of_hub, ConnectionError, TimeoutError))
        if not is_remote and error.errno is not None:
            raise  # error of the local disk, such as a full disk
        raise UserError(f"Cannot {what} ({hub_reason(error)}). {fix}") from None
