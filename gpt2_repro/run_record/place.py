"""Read and write the copy of a run at another place: a folder, another machine, or another URL of fsspec."""

import contextlib
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.files import expand, sync
from gpt2_repro.run_record import checkpoints
from gpt2_repro.run_record.layout import CHECKPOINT_MANIFEST, step_of


HOST = re.compile(r"((?:[\w.-]+@)?[\w.-]+):(.+)")  # a folder on another machine, as in the arguments of scp
SFTP = "gpt2_repro.run_record.sftp.SafeSFTP"


def absolute(name: str) -> str:
    """Return the name of a place as a URL or an absolute path, or raise UserError if it contains a password."""
    if re.search(r"://[^/]*:[^/]*@", name):
        raise UserError("--sync_to contains a password, which the run would record. Pass it in the environment.")
    name = expand(name)
    if "://" not in name and (match := HOST.fullmatch(name)):
        return f"sftp://{match[1]}{Path('/~', match[2].removeprefix('~/'))}"
    return name if "://" in name else os.path.abspath(name)  # noqa: PTH100


class Place:
    """A folder on another disk, or a URL that fsspec supports. It has the layout of a run directory.

    Args:
        progress: a function that is called again and again while a file is copied to the place.
    """

    def __init__(self, name: str, progress: Callable[[], None] = lambda: None) -> None:
        from fsspec import register_implementation  # 0.1 s
        from fsspec.callbacks import Callback
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        for protocol in ("sftp", "ssh"):
            register_implementation(protocol, SFTP, clobber=True, errtxt="run pip install paramiko")
        try:
            self.fs, root = url_to_fs(absolute(name))
        except (ImportError, ValueError) as error:  # its messages name the missing package or the known protocols
            raise UserError(f"--sync_to {name} cannot be opened: {in_a_line(error)}.") from None
        self.root = root.removeprefix("/~/")  # SFTP starts in the home directory
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.callback = Callback(hooks={"progress": lambda *_: progress()})

    def manifest(self, name: str) -> dict[str, Any]:
        """Return the manifest of a checkpoint or final/, or {} if it is missing or damaged."""
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(FileNotFoundError):
            Path(folder, CHECKPOINT_MANIFEST).write_bytes(self.read(f"{name}/{CHECKPOINT_MANIFEST}"))
            return checkpoints.read_manifest(Path(folder))
        return {}

    def manifests(self) -> dict[int, dict[str, Any]]:
        """Return the manifests ({} if missing or damaged) of all checkpoints by step, newest first."""
        self.fs.invalidate_cache()
        folders: list[Path] = []
        with contextlib.suppress(FileNotFoundError):
            folders = [Path(path) for path in self.fs.ls(self.root, detail=False)]
        folders = sorted(folders, key=step_of, reverse=True)
        return {step: self.manifest(folder.name) for folder in folders if (step := step_of(folder)) >= 0}

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError if it is missing."""
        return self.fs.cat_file(f"{self.root}/{name}")

    def get(self, name: str, path: Path) -> None:
        """Copy a file to a local path. Raises FileNotFoundError if it is missing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.fs.get_file(f"{self.root}/{name}", str(path))

    def put(self, path: Path, name: str) -> None:
        """Copy a local file. It appears when it is complete."""
        target = f"{self.root}/{name}"
        self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        if not self.is_local:
            return self.fs.put_file(str(path), target, callback=self.callback)
        partial = Path(f"{target}.partial")
        self.fs.put_file(str(path), str(partial))
        sync(partial)
        partial.replace(target)
        return sync(partial.parent)

    def remove(self, name: str) -> None:
        """Delete the folder of a checkpoint, its manifest first."""
        for path, options in ((f"{name}/{CHECKPOINT_MANIFEST}", {}), (name, {"recursive": True})):
            if self.fs.exists(f"{self.root}/{path}"):
                self.fs.rm(f"{self.root}/{path}", **options)
