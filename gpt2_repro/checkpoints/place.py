"""Read and write the copy of a run at another place: a folder, or a URL of fsspec."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt2_repro.checkpoints.manifest import intact_manifest
from gpt2_repro.checkpoints.writer import PIECE, HashedFile
from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.files import expand, parse_object, sha256_of, sync
from gpt2_repro.run_record import layout
from gpt2_repro.run_record.layout import CHECKPOINT_MANIFEST, step_of


# Another machine, also as in the arguments of scp.
SSH = re.compile(r"(^|::)(sftp|ssh)://|^(?!.*://)([\w.-]+@)?[\w.-]+:")
SECRET = re.compile(r"://[^/]*:[^/]*@|://.*\?.*=")  # a password, or a query with a signature or token
PARTIAL = ".partial"  # suffix of a file that is being written
RELATIVE_URL = re.compile(r"(?:file|local)://(?!/)")  # its scheme, before a relative path
LOST = re.compile(r"(^|::)(memory|cached|\w+cache)(://|::)")  # fsspec's file systems that end with the process


def absolute(name: str, *, option: str = "--sync_to") -> str:
    """Return the name of a place as a URL or an absolute path.

    Raises UserError, which names the `option` with the place, if it contains a secret, if the place keeps nothing after
    the process ends, or if it needs SSH.
    """
    if SECRET.search(name):
        problem = f"{option} contains a password or a query (?key=value), which the run would record"
        raise UserError(f"{problem}. Pass it in the environment.")
    if LOST.search(name):
        raise UserError(f"{option} {name} keeps nothing after this process. Pass a folder or a URL.")

    def add_current_folder(scheme: re.Match[str]) -> str:
        return f"{scheme[0]}{Path.cwd()}/"

    # The process that copies has another current folder.
    name = RELATIVE_URL.sub(add_current_folder, expand(name))
    if SSH.search(name):
        raise UserError(f"{option} {name} needs SSH, which is not supported. Pass a folder, s3://… or hf://….")
    if "://" in name:
        return name
    return os.path.abspath(name)  # noqa: PTH100


class Place:
    """A folder on another disk, or a URL that fsspec supports. It has the layout of a run directory.

    Args:
        progress: a function that is called again and again while a file is copied.
        option: the option with the name, for messages.
    """

    def __init__(self, name: str, progress: Callable[[], None] = lambda: None, *, option: str = "--sync_to") -> None:
        from fsspec.callbacks import Callback  # 0.1 s
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        try:
            self.fs, root = url_to_fs(absolute(name, option=option))
        except (ImportError, ValueError) as error:  # its messages name the missing package or the known protocols
            raise UserError(f"{option} {name} cannot be opened: {in_a_line(error)}.") from None
        self.name = name
        self.root = root
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.is_bucket = self.fs.protocol == "hf" and root.startswith("buckets/")
        self.progress = progress
        self.callback = Callback(hooks={"progress": lambda *_: progress()})

    def names(self) -> list[str]:
        """Return the names of the files and folders at the place, without hidden and partly written ones."""
        self.fs.invalidate_cache()
        entries: list[dict[str, Any]] = []
        with contextlib.suppress(FileNotFoundError):
            entries = self.fs.ls(self.root, detail=True)
        root = self.root.strip("/")
        names: list[str] = []
        for entry in entries:
            is_root = entry["name"].strip("/") == root
            if is_root and not entry["size"]:
                continue  # some object stores list the folder itself, as an object of 0 bytes
            path = Path(entry["name"])
            is_hidden = path.name.startswith(".")
            if not is_hidden and path.suffix != PARTIAL:
                names.append(path.name)
        return names

    def manifest(self, name: str) -> dict[str, Any]:
        """Return the manifest of a checkpoint or final/, or {} if it is missing or damaged."""
        try:
            content = self.read(f"{name}/{CHECKPOINT_MANIFEST}")
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return intact_manifest(parse_object(content) or {})

    def manifests(self) -> dict[int, dict[str, Any]]:
        """Return the manifests ({} if missing or damaged) of all checkpoints by step, newest first."""
        steps = [step_of(Path(name)) for name in self.names()]
        manifests: dict[int, dict[str, Any]] = {}
        for step in sorted(steps, reverse=True):
            if step >= 0:  # a checkpoint
                folder = layout.checkpoint_path(Path(), step)
                manifests[step] = self.manifest(folder.name)
        return manifests

    def run_identity(self) -> dict[str, Any]:
        """Return the identity of the run that is copied to the place, or {} if there is none."""
        identity = self._environment().get("run_identity")
        if not identity:
            intact = [manifest for manifest in self.manifests().values() if manifest]
            if intact:
                newest = intact[0]
                identity = newest.get("run_identity")
            else:
                final = self.manifest(layout.FINAL)
                environment = final.get("environment", {})
                identity = environment.get("run_identity")
        if isinstance(identity, dict):
            return identity
        return {}

    def _environment(self) -> dict[str, Any]:
        """Return environment.json, or {} if it is missing or damaged."""
        try:
            content = self.read(layout.ENVIRONMENT)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return parse_object(content) or {}

    def size(self, name: str) -> int:
        """Return the size of a file in bytes. Raises FileNotFoundError if it is missing."""
        return self.fs.size(f"{self.root}/{name}")

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError if it is missing."""
        return self.fs.cat_file(f"{self.root}/{name}")

    def get(self, name: str, path: Path) -> str:
        """Copy a file to a local path, and return its SHA-256. Raises FileNotFoundError if it is missing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.is_local:
            return self._copy(Path(self.root, name), path)
        self.fs.get_file(f"{self.root}/{name}", str(path), callback=self.callback)
        return sha256_of(path)

    def put(self, path: Path, name: str) -> None:
        """Copy a local file. It appears when it is complete."""
        target = self._target(name)
        if self.is_bucket:
            self._add_to_bucket(path, target)
        elif self.is_local:
            partial = Path(target + PARTIAL)
            self._copy(path, partial)
            partial.replace(target)
            sync(partial.parent)
        else:
            self.fs.put_file(str(path), target, callback=self.callback)

    def write(self, content: bytes, name: str) -> None:
        """Write a small file. It appears when it is complete."""
        target = self._target(name)
        if self.is_bucket:
            self._add_to_bucket(content, target)
        elif self.is_local:
            partial = Path(target + PARTIAL)
            partial.write_bytes(content)
            sync(partial)
            partial.replace(target)
            sync(partial.parent)
        else:
            self.fs.pipe_file(target, content)

    def _target(self, name: str) -> str:
        """Return the path of a file at the place, whose folder then exists."""
        target = f"{self.root}/{name}"
        folder, _, _ = target.rpartition("/")
        self.fs.makedirs(folder, exist_ok=True)
        return target

    def _add_to_bucket(self, source: Path | bytes, target: str) -> None:
        # fsspec's methods (huggingface_hub 2.4) would first copy the file to TMPDIR, which can be small.
        from huggingface_hub import HfApi

        bucket = self.fs.resolve_path(target)
        api = HfApi(endpoint=self.fs.endpoint, token=self.fs.token)
        api.batch_bucket_files(bucket.bucket_id, add=[(source, bucket.path)])
        self.fs.invalidate_cache(bucket.unresolve())

    def _copy(self, source: Path, target: Path) -> str:
        with source.open("rb") as read, target.open("wb") as written:
            file = HashedFile(written, self.progress)
            shutil.copyfileobj(read, file, PIECE)
            facts = file.finish()
        return facts["sha256"]

    def invalidate(self, name: str) -> None:
        """Replace the manifest of a checkpoint that cannot be deleted, so that the copy is not complete."""
        self.fs.pipe_file(f"{self.root}/{name}/{CHECKPOINT_MANIFEST}", b"{}")

    def remove(self, name: str) -> None:
        """Delete the folder of a checkpoint or final/, its manifest first."""
        folder = f"{self.root}/{name}"
        if self.is_local and Path(folder).is_symlink():
            Path(folder).unlink()  # the files behind a link belong to others
            return
        files: list[str] = []
        folders: list[str] = []
        for path, entry in self.fs.find(folder, withdirs=True, detail=True).items():
            if entry.get("type") == "directory":
                folders.append(path)
            else:
                files.append(path)
        manifest = f"{folder}/{CHECKPOINT_MANIFEST}"
        if manifest in files:
            files.remove(manifest)
            files.insert(0, manifest)
        # fsspec's `rm` would expand *, ? and [ in the paths, and delete folders of other runs.
        for path in files:
            self.fs.rm_file(path)
        for path in sorted(folders, reverse=True):
            if self.fs.isdir(path):  # in an object store, folders end with their files
                self.fs.rmdir(path)
