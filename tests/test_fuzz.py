"""Damaged or hostile files are loaded, or end with a one-line error.

FUZZ_CASES sets the number of cases of all tests together.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpt2_repro.errors import RunFailed, UserError
from gpt2_repro.model.export import load_model
from gpt2_repro.model.pretraining import plain_model
from gpt2_repro.run_record.checkpoints import complete_checkpoints, manifest_hash, seal, training_record
from gpt2_repro.training.arguments import load_recipe
from gpt2_repro.training.resuming import find_start
from tests.model.families import build


CASES = int(os.environ.get("FUZZ_CASES", "50"))
LONGEST = 10  # seconds of one case
RUNS_CODE = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_watched: list[Path] = []  # the folder of the case that is running
_forbidden: list[str] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched:
        return
    if event in RUNS_CODE or (event == "exec" and str(_watched[0]) in str(getattr(arguments[0], "co_filename", ""))):
        _forbidden.append(f"{event} {arguments[:1]}")
    elif event == "open" and isinstance(arguments[0], str) and isinstance(arguments[2], int):
        allowed = arguments[0].startswith((str(_watched[0]), "/dev/")) or "__pycache__" in arguments[0]
        if arguments[2] & WRITES and not allowed:
            _forbidden.append(f"{event} {arguments[0]}")


@pytest.fixture(scope="module", autouse=True)
def audit() -> None:
    sys.addaudithook(_audit)  # cannot be removed, but does nothing outside of a case


fuzz = settings(
    max_examples=max(1, CASES // 5),
    deadline=None,
    database=None,
    derandomize=CASES <= 50,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
numbers = st.one_of(st.integers(-(2**40), 2**40), st.floats(), st.sampled_from([0, -1, 2**63, 1e308]))
words = st.one_of(st.text(max_size=20), st.sampled_from(["../../x", "/etc/passwd", "a\nb", "gpt2", "\0", "1e3"]))
leaves = st.one_of(st.none(), st.booleans(), numbers, words)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(words, inner, max_size=4)),
    max_leaves=8,
)


@st.composite
def changes(draw: Any) -> list[tuple[float, str, Any]]:
    """Return up to three changes: a position in the document, what to do, a value."""
    one = st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(["set", "delete", "add", "text"]), values)
    return draw(st.lists(one, min_size=1, max_size=3))


def changed(document: Any, wanted: list[tuple[float, str, Any]]) -> Any:
    """Return a copy of a document of JSON values with the changes."""
    document = json.loads(json.dumps(document))
    for position, what, value in wanted:
        places = list(_places(document))
        parent, key = places[int(position * len(places))]
        if what == "delete":
            del parent[key]
        elif what == "add" and isinstance(parent, dict):
            parent[str(value)[:30]] = value
        else:
            parent[key] = str(value) if what == "text" else value
        if not document:
            break
    return document


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(document) if isinstance(document, dict) else range(len(document)):
        yield document, key
        if isinstance(document[key], dict | list) and document[key]:
            yield from _places(document[key])


def survives(folder: Path, load: Callable[[], object]) -> None:
    """Check that `load` returns or raises a one-line error.

    It must not run code, write outside of `folder` or take longer than LONGEST.
    """
    _forbidden.clear()
    _watched.append(folder)
    began = time.monotonic()
    try:
        with contextlib.suppress(RunFailed):
            load()
    except UserError as error:
        assert "\n" not in str(error)
    finally:
        _watched.clear()
    assert not _forbidden
    assert time.monotonic() - began < LONGEST


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "model"
    trained = build("gpt2").eval()
    plain_model(trained.config, trained.state_dict()).save_pretrained(folder)
    load_model(str(folder))
    return folder


def test_the_watch_sees_code_that_runs_and_files_written_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "case"
    folder.mkdir()
    survives(folder, lambda: (folder / "inside").write_text("x", encoding="utf-8"))
    for forbidden in (lambda: os.system("true"), lambda: (tmp_path / "outside").write_text("x", encoding="utf-8")):
        with pytest.raises(AssertionError):
            survives(folder, forbidden)


@fuzz
@given(wanted=changes())
def test_recipe(tiny_recipe: Path, tmp_path: Path, wanted: list) -> None:
    document = yaml.safe_load(tiny_recipe.read_text(encoding="utf-8"))
    (tmp_path / "fuzz.yaml").write_text(yaml.safe_dump(changed(document, wanted)), "utf-8", "replace")
    survives(tmp_path, lambda: load_recipe([str(tmp_path / "fuzz.yaml")]))


@fuzz
@given(data=st.binary(max_size=40), position=st.floats(0, 1), kept=st.floats(0, 1))
def test_bytes_of_a_recipe(tiny_recipe: Path, tmp_path: Path, data: bytes, position: float, kept: float) -> None:
    text = tiny_recipe.read_bytes()
    place, rest = int(position * len(text)), int(kept * len(text))
    (tmp_path / "fuzz.yaml").write_bytes(text[:place] + data + text[rest:])
    survives(tmp_path, lambda: load_recipe([str(tmp_path / "fuzz.yaml")]))


@fuzz
@given(wanted=changes())
def test_config_of_a_model(model: Path, wanted: list) -> None:
    path = model / "config.json"
    original = path.read_text(encoding="utf-8")
    path.write_text(json.dumps(changed(json.loads(original), wanted)), encoding="utf-8")
    try:
        survives(model, lambda: load_model(str(model)))
    finally:
        path.write_text(original, encoding="utf-8")


@fuzz
@given(wanted=changes(), length=st.one_of(st.none(), st.integers(0, 2**64 - 1)))
def test_header_of_a_safetensors_file(model: Path, wanted: list, length: int | None) -> None:
    path = model / "model.safetensors"
    original = path.read_bytes()
    end = 8 + int.from_bytes(original[:8], "little")
    header = json.dumps(changed(json.loads(original[8:end]), wanted)).encode()
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + original[end:])
    try:
        survives(model, lambda: load_model(str(model)))
    finally:
        path.write_bytes(original)


@fuzz
@example(wanted=[(0.55, "set", None)], hashed=True)  # `files` was null: AttributeError
@example(wanted=[(0.55, "delete", None)], hashed=True)  # without `files`: KeyError
@given(wanted=changes(), hashed=st.booleans())
def test_manifest_of_a_checkpoint(tmp_path: Path, wanted: list, hashed: bool) -> None:
    folder = tmp_path / "checkpoint-3"
    folder.mkdir(exist_ok=True)
    (folder / "weights.safetensors").write_bytes(b"x" * 100)
    seal(folder, {}, run_identity={"seed": 1, "max_steps": 10}, losses={"": 3.0}, tokens=300)
    path = folder / "manifest.json"
    manifest = changed(json.loads(path.read_text(encoding="utf-8")), wanted)
    if hashed and isinstance(manifest, dict):
        manifest["sha256"] = manifest_hash(manifest)
    path.write_text(json.dumps(manifest), encoding="utf-8")
    for read in (find_start, complete_checkpoints):
        survives(tmp_path, lambda: read(tmp_path))  # noqa: B023
    survives(tmp_path, lambda: training_record(folder))
