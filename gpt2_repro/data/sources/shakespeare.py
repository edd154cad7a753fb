"""Karpathy's tiny Shakespeare, with nanoGPT's validation part."""

import dataclasses
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from gpt2_repro.data.sources.base import Batch, WholeFile
from gpt2_repro.data.sources.hub import hub_errors
from gpt2_repro.errors import UserError
from gpt2_repro.files import sha256_of


URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
CHARACTERS = 1_115_394
TRAINING = int(0.9 * CHARACTERS)  # nanoGPT, data/shakespeare_char/prepare.py: the first 90 % train


@dataclasses.dataclass
class Shakespeare(WholeFile):
    """Characters `start` to `stop` of the text, one document."""

    start: int
    stop: int
    folder: str

    name = "tiny-shakespeare"

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.stop - self.start

    @property
    def _path(self) -> Path:
        return Path(self.folder, "tiny-shakespeare.txt")

    def identity(self) -> tuple[str, ...]:
        return self.name, str(self.start)

    def fetch(self) -> None:
        if self._path.is_file():
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")

        with hub_errors(f"fetch {URL}"), urllib.request.urlopen(URL, timeout=60) as answer, partial.open("wb") as file:
            shutil.copyfileobj(answer, file)
        if sha256_of(partial) != SHA256:
            partial.unlink()
            raise UserError(f"{URL} does not hold the known text: fetch it by hand and name it with --data_files")
        partial.replace(self._path)

    def read(self) -> Iterator[Batch]:
        text = self._path.read_text(encoding="utf-8")
        yield Batch([text[self.start : self.stop]])
