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
}


def list_preset(name: str, staging: Path) -> tuple[dict[str, Any], list[SourceFile]]:
    """A preset's description, with the revision it has now, and its files. `staging` takes their downloads.

    Raises UserError where the Hub cannot be reached or holds nothing there.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    preset = HUB_PRESETS[name]
    try:
        api = HfApi()
        revision = api.dataset_info(preset.repository).sha
        listing = api.list_repo_tree(
            preset.repository, preset.folder, repo_type="dataset", revision=revision, recursive=True
        )
        files = sorted(entry.path for entry in listing if entry.path.endswith(".parquet"))
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"cannot list {preset.repository} on the Hub ({reason}): connect and try again, or prepare text of your "
            "own with --data_files GLOB"
        ) from None
    if not files:
        raise UserError(f"{preset.repository} has no parquet files under {preset.folder}")
    description = {"name": name, "repository": preset.repository, "folder": preset.folder, "revision": revision}
    return description, [HubFile(path, preset.repository, str(revision), str(staging)) for path in files]


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
        path = hf_hub_download(
            self.repository, self.name, repo_type="dataset", revision=self.revision, local_dir=folder
        )
        yield from LocalFile(path).read()
        shutil.rmtree(folder)
