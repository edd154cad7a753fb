"""Read and write the copy of a run at another place: a folder, a URL of fsspec, or a host with rsync."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.files import expand, sync
from gpt2_repro.run_record.layout import CHECKPOINT_MANIFEST
from gpt2_repro.run_record.side_process import end_with_parent


HOST = re.compile(r"([\w.-]+@)?[\w.-]+:.+")  # rsync's form of a folder on another machine
MISSING = 23  # exit code of rsync if a file does not exist


def open_place(name: str, progress: Callable[[], None] = lambda: None) -> "Place":
    """Return the place with this name, or raise UserError if it cannot be used here.

    Args:
        progress: a function that is called again and again while files are copied.
    """
    if re.search(r"://[^/]*:[^/]*@", name):
        raise UserError("--sync_to contains a password, which the run would record. Pass it in the environment.")
    return RsyncPlace(name, progress) if HOST.fullmatch(name) and "://" not in name else Place(name, progress)


def absolute(name: str) -> str:
    """Return the name of a place for a process with another working directory."""
    return name if "://" in name or HOST.fullmatch(name) else os.path.abspath(expand(name))  # noqa: PTH100


class Place:
    """A folder on another disk, or a URL that fsspec supports."""

    def __init__(self, name: str, progress: Callable[[], None]) -> None:
        from fsspec.callbacks import Callback  # 0.1 s
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        try:
            self.fs, self.root = url_to_fs(expand(name))
        except (ImportError, ValueError) as error:  # its messages name the missing package or the known protocols
            raise UserError(f"--sync_to {name} cannot be opened: {in_a_line(error)}.") from None
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.callback = Callback()
        self.callback.relative_update = lambda inc=1: progress()

    def names(self) -> list[str]:
        """Return the names of the files and folders."""
        self.fs.invalidate_cache()
        try:
            return [path.rstrip("/").rpartition("/")[2] for path in self.fs.ls(self.root, detail=False)]
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes:
        """Return the content of a file, or b"" if it does not exist."""
        try:
            return self.fs.cat_file(f"{self.root}/{name}")
        except FileNotFoundError:
            return b""

    def put(self, folder: Path, name: str, files: Sequence[str]) -> None:
        """Copy files of a local folder into the folder `name`."""
        for file in files:
            target = "/".join(filter(None, (self.root, name, file)))
            self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            if not self.is_local:  # an object appears when it is complete
                self.fs.put_file(str(folder / file), target, callback=self.callback)
                continue
            partial = Path(f"{target}.partial")
            self.fs.put_file(str(folder / file), str(partial), callback=self.callback)
            sync(partial)
            partial.replace(target)
            sync(Path(target).parent)

    def get(self, name: str, folder: Path, files: Sequence[str]) -> None:
        """Copy files of the folder `name` into a local folder. Raises FileNotFoundError if one is missing."""
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            self.fs.get_file("/".join(filter(None, (self.root, name, file))), str(folder / file))

    def remove(self, name: str) -> None:
        """Delete the folder of a checkpoint, its manifest first."""
        for path, options in ((f"{name}/{CHECKPOINT_MANIFEST}", {}), (name, {"recursive": True})):
            if self.fs.exists(f"{self.root}/{path}"):
                self.fs.rm(f"{self.root}/{path}", **options)


class RsyncPlace(Place):
    """A folder on another machine."""

    def __init__(self, name: str, progress: Callable[[], None]) -> None:
        if shutil.which("rsync") is None:
            raise UserError(f"--sync_to {name} needs rsync. Run: apt-get install rsync")
        self.root, self.progress = name.rstrip("/"), progress

    def names(self) -> list[str]:
        try:
            lines = self._rsync("--list-only", "--no-recursive", "--dirs", f"{self.root}/").splitlines()
        except FileNotFoundError:
            return []
        return [line.split(maxsplit=4)[4] for line in lines]

    def read(self, name: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            try:
                self._rsync(f"{self.root}/{name}", f"{folder}/content")
            except FileNotFoundError:
                return b""
            return Path(folder, "content").read_bytes()

    def put(self, folder: Path, name: str, files: Sequence[str]) -> None:
        self._rsync("--mkpath", "--files-from=-", f"{folder}/", f"{self.root}/{name}/", lines=files)

    def get(self, name: str, folder: Path, files: Sequence[str]) -> None:
        self._rsync("--files-from=-", f"{self.root}/{name}/", f"{folder}/", lines=files)

    def remove(self, name: str) -> None:
        folder = f"--include=/{name}/"
        with tempfile.TemporaryDirectory() as empty:
            for its in (f"{folder}{CHECKPOINT_MANIFEST}", f"{folder}***"):
                self._rsync("--delete", folder, its, "--exclude=*", f"{empty}/", f"{self.root}/")

    def _rsync(self, *words: str, lines: Sequence[str] = ()) -> str:
        """Run rsync, with a list of files as its input, and return its output."""
        environment = {"RSYNC_RSH": "ssh -o BatchMode=yes -o ConnectTimeout=20"} | os.environ
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = ["rsync", "--recursive", "--times", "--timeout=60", *words]
        with subprocess.Popen(command, **pipes, text=True, env=environment, preexec_fn=end_with_parent) as process:
            text: str | None = "".join(f"{line}\n" for line in lines)
            while True:
                try:
                    output, errors = process.communicate(text, timeout=1)
                    break
                except subprocess.TimeoutExpired:
                    text = None
                    self.progress()  # rsync ends by itself after --timeout without progress
        if process.returncode:
            kind = FileNotFoundError if process.returncode == MISSING else OSError
            raise kind(in_a_line(errors))
        return output
