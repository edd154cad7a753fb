"""The English documentation that every CPython ships, read as text and never imported."""

import ast
import dataclasses
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from gpt2_repro.data.sources.base import Batch, WholeFile, in_batches


@dataclasses.dataclass(frozen=True)
class Topics(WholeFile):
    """The topics of pydoc_data: the language reference as text, a document a topic. Parsed, never imported."""

    name: str = "pydoc_data.topics"
    size: int = 500_000  # about, for the progress bar

    def read(self) -> Iterator[Batch]:
        path = Path(sysconfig.get_paths()["stdlib"], "pydoc_data", "topics.py")
        if not path.is_file():
            return
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                yield from in_batches((text, "") for text in ast.literal_eval(node.value).values())


@dataclasses.dataclass(frozen=True)
class Docstrings(WholeFile):
    """The docstrings of the standard library, a document a module. Parsed, never imported."""

    name: str = "docstrings"
    size: int = 2_000_000  # about
    # Bundled installers and demonstrations hold no prose of their own.
    skipped = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"})

    def read(self) -> Iterator[Batch]:
        root = Path(sysconfig.get_paths()["stdlib"])
        modules = sorted(p for p in root.rglob("*.py") if not self.skipped & set(p.relative_to(root).parts))
        yield from in_batches((text, "") for path in modules if (text := module_docstrings(path)))


def module_docstrings(path: Path) -> str:
    """All docstrings of a module, each under the name it documents, in the order of the file; '' if it has none."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    parts = []
    for node in ast.walk(tree):
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
            parts.append(f"{getattr(node, 'name', path.stem)}\n\n{docstring}")
    return "\n\n".join(parts)
