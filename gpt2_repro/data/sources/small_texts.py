"""Read tiny Shakespeare, and the documentation that is installed with Python."""

import ast
import contextlib
import dataclasses
import hashlib
import http.client
import sysconfig
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from gpt2_repro.data.sources.base import Batch, WholeFile, in_batches
from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.files import write_whole


URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
CHARACTERS = 1_115_394
TRAINING = int(0.9 * CHARACTERS)  # nanoGPT, data/shakespeare_char/prepare.py: train on the first 90 %


@dataclasses.dataclass
class Shakespeare(WholeFile):
    """Characters `start` to `stop` (exclusive) of tiny Shakespeare, as one document."""

    start: int
    stop: int
    folder: str
    source: str = "tiny-shakespeare"

    def __post_init__(self) -> None:
        self.name = f"tiny-shakespeare from character {self.start}"
        self.size = self.stop - self.start
        self._path = Path(self.folder, "tiny-shakespeare.txt")

    def fetch(self) -> None:
        if self._path.is_file():
            return
        try:
            with urllib.request.urlopen(URL, timeout=60) as answer:
                content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            fix = "Check the network, or pass your own copy of the text: --data_files FILE --split head."
            raise UserError(f"Cannot fetch {URL} ({in_a_line(getattr(error, 'reason', error))}). {fix}") from None
        if hashlib.sha256(content).hexdigest() != SHA256:
            raise UserError(f"{URL} does not have the expected text. Pass your own copy as --data_files.")
        write_whole(self._path, content)

    def read(self) -> Iterator[Batch]:
        yield Batch([self._path.read_text(encoding="utf-8")[self.start : self.stop]])


@dataclasses.dataclass(frozen=True)
class PythonDocumentation(WholeFile):
    """The topics of Python's language reference, and the docstrings of each module of the standard library."""

    name: str = "documentation of Python"
    size: int = 2_500_000  # approximate, for the progress bar
    source: str = "embedded"
    # Installed packages, tests, tools and demonstrations are skipped: they are not documentation of Python.
    skipped = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"})

    def read(self) -> Iterator[Batch]:
        with contextlib.suppress(ImportError):  # some distributions of Python leave it out
            from pydoc_data.topics import topics

            yield from in_batches((text, "") for text in topics.values())
        root = Path(sysconfig.get_paths()["stdlib"])
        yield from in_batches((text, "") for text in self._docstrings_of_modules(root) if text)

    def _docstrings_of_modules(self, root: Path) -> Iterator[str]:
        for path in sorted(root.rglob("*.py")):
            if self.skipped.isdisjoint(path.relative_to(root).parts):
                yield module_docstrings(path)


def module_docstrings(path: Path) -> str:
    """Return all docstrings of a Python file, each after the name of its object."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    parts = []
    for node in ast.walk(tree):
        if not isinstance(node, documented):
            continue
        docstring = ast.get_docstring(node)
        if docstring:
            name = path.stem if isinstance(node, ast.Module) else node.name
            parts.append(f"{name}\n\n{docstring}")
    return "\n\n".join(parts)
