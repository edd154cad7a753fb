"""Damaged or hostile files are loaded, or end with a one-line error.

FUZZ_CASES sets the number of cases of all tests together.
"""

import contextlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpt2_repro.checkpoints.manifest import manifest_hash, seal, training_record
from gpt2_repro.checkpoints.rotation import complete_checkpoints, newest_complete
from gpt2_repro.errors import RunFailed, UserError
from gpt2_repro.model.load import load_model
from gpt2_repro.model.pretraining import plain_model
from tests.model.families import build


CASES = int(os.environ.get("FUZZ_CASES", "50"))
RUNS_CODE = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_watched: list[Path] = []  # the folder of the case that is running
_forbidden: list[str] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched:
        return
    folder, subject = str(_watched[0]), arguments[0] if arguments else None
    runs = event in RUNS_CODE or (event == "exec" and folder in str(getattr(subject, "co_filename", "")))
    writes = event == "open" and isinstance(subject, str) and isinstance(arguments[2], int) and arguments[2] & WRITES
    if runs or (writes and not subject.startswith((folder, "/dev/")) and "__pycache__" not in subject):
        _forbidden.append(f"{event} {subject}")


@pytest.fixture(scope="module", autouse=True)
def audit() -> None:
    sys.addaudithook(_audit)  # cannot be removed, but does nothing outside of a case


VALUES = json.loads(
    '[null, true, 0, -1, 0.5, 1e308, 9223372036854775808, NaN, -Infinity, "", "gpt2", "../../x", "/etc/passwd", '
    '"a\\nb", "\\u0000", "1e3", "日本", [], {}, [null, 2.5, "x"], {"a": 1, "../b": null}]'
)


def changed(document: Any, source: random.Random) -> Any:
    """Return a copy of a JSON object with one to three random changes."""
    document = json.loads(json.dumps(document))
    for _ in range(source.randint(1, 3)):
        value = source.choice([*VALUES, source.randint(-(2**40), 2**40), source.uniform(-1e6, 1e6)])
        parent, key = source.choice(list(_places(document)) or [({"": 0}, "")])
        action = source.choice(["set", "delete", "add"])
        if action == "delete":
            parent.pop(key)
        else:
            parent[str(value) if action == "add" and isinstance(parent, dict) else key] = value
    return document


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(document) if isinstance(document, dict) else range(len(document)):
        yield document, key
        if isinstance(document[key], dict | list) and document[key]:
            yield from _places(document[key])


def survives(folder: Path, load: Callable[[], object]) -> None:
    """Check that `load` returns or raises a one-line error.

    It must not run code or write outside of `folder`.
    """
    _forbidden.clear()
    _watched.append(folder)
    try:
        with contextlib.suppress(RunFailed):
            load()
    except UserError as error:
        assert "\n" not in str(error)
    finally:
        _watched.clear()
    assert not _forbidden


def test_the_watch_sees_code_that_runs_and_files_written_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "case"
    folder.mkdir()
    survives(folder, lambda: (folder / "inside").write_text("x", encoding="utf-8"))
    for forbidden in (lambda: os.system("true"), lambda: (tmp_path / "outside").write_text("x", encoding="utf-8")):
        with pytest.raises(AssertionError):
            survives(folder, forbidden)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "model"
    trained = build("gpt2").eval()
    plain_model(trained.config, trained.state_dict()).save_pretrained(folder)
    load_model(str(folder))
    return folder


@pytest.mark.parametrize("case", range(max(1, CASES // 3)))
def test_files_of_a_model(model: Path, case: int) -> None:
    source = random.Random(case)
    path = model / source.choice(["config.json", "model.safetensors"])
    original = path.read_bytes()
    start = 0 if path.suffix == ".json" else 8
    end = 8 + int.from_bytes(original[:8], "little") if start else len(original)
    header = json.dumps(changed(json.loads(original[start:end]), source)).encode()
    path.write_bytes((len(header).to_bytes(8, "little") if start else b"") + header + original[end:])
    try:
        survives(model, lambda: load_model(str(model)))
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize("case", range(max(2, CASES // 3)))
def test_manifest_of_a_checkpoint(tmp_path: Path, case: int) -> None:
    folder, source = tmp_path / "checkpoint-3", random.Random(case)
    folder.mkdir()
    (folder / "weights.safetensors").write_bytes(b"x" * 100)
    seal(folder, {}, run_identity={"seed": 1, "max_steps": 10}, losses={"": 3.0}, tokens=300)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    # The first two ended in an AttributeError and a KeyError.
    manifests = [manifest | {"files": None}, {"tokens": 300}, changed(manifest, source)]
    manifest = manifests[min(case, 2)]
    if case < 2 or source.random() < 0.5:
        manifest["sha256"] = manifest_hash(manifest)
    path.write_text(json.dumps(manifest), encoding="utf-8")
    for read in (newest_complete, complete_checkpoints):
        survives(tmp_path, lambda: read(tmp_path))  # noqa: B023
    survives(tmp_path, lambda: training_record(folder))
