"""Datasets on the Hub, read parquet file by parquet file."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2_repro.data.files import Batch, LocalFile, SourceFile
from gpt2_repro.errors import UserError


@dataclasses.dataclass(frozen=True)
class HubPreset:
    """A dataset on the Hub whose parquet files lie in one folder of its repository."""

    repository: str
    folder: str
    about: str


HUB_PRESETS = {
    "fineweb-10bt": HubPreset(
        "HuggingFaceFW/fineweb", "sample/10BT", "web text, about 10B GPT-2 tokens; llm.c's reference curves use it"
    ),
    "fineweb-edu-10bt": HubPreset(
        "HuggingFaceFW/fineweb-edu", "sample/10BT", "web text chosen as educational, about 10B GPT-2 tokens"
    ),
}


def list_preset(name: str, staging: Path, *, revision: str | None) -> tuple[dict[str, Any], list[SourceFile]]:
    """A preset's description and its files, at `revision` or at the newest. `staging` takes their downloads.

    Raises UserError where the Hub cannot be reached or holds nothing there.
    """
    from huggingface_hub import HfApi

    preset = HUB_PRESETS[name]
    try:
        api = HfApi()
        revision = revision or api.dataset_info(preset.repository).sha
        listing = api.list_repo_tree(
            preset.repository, preset.folder, repo_type="dataset", revision=revision, recursive=True
        )
        files = sorted(entry.path for entry in listing if entry.path.endswith(".parquet"))
    except _network_errors() as error:
        raise UserError(
            f"cannot list {preset.repository} on the Hub ({first_line(error)}): connect and try again, or prepare "
            "text of your own with --data_files GLOB"
        ) from None
    if not files:
        raise UserError(f"{preset.repository} has no parquet files under {preset.folder}")
    description = {"name": name, "repository": preset.repository, "folder": preset.folder, "revision": revision}
    return description, [HubFile(path, preset.repository, str(revision), str(staging)) for path in files]


def first_line(error: Exception) -> str:
    """What an exception says, without the rest of it."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _network_errors() -> tuple[type[Exception], ...]:
    # HTTPError is the HTTP client's own, from a refused connection to a bad status, whichever client the Hub's is.
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    return (HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError)


@dataclasses.dataclass(frozen=True)
class HubFile(SourceFile):
    """A parquet file on the Hub, downloaded when it is read and dropped afterwards."""

    name: str
    repository: str
    revision: str
    staging: str

    def read(self) -> Iterator[Batch]:
        from huggingface_hub import hf_hub_download

        folder = Path(self.staging, self.name.replace("/", "-"))
        try:
            path = hf_hub_download(
                self.repository, self.name, repo_type="dataset", revision=self.revision, local_dir=folder
            )
        except _network_errors() as error:
            raise UserError(
                f"cannot fetch {self.name} of {self.repository} ({first_line(error)}): start the same command again, "
                "it goes on with this file"
            ) from None
        yield from LocalFile(path).read()
        shutil.rmtree(folder)
