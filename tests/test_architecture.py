"""Imports go down only, and what upstream libraries are for stays in its room."""

import ast
from pathlib import Path

import pytest

import gpt2_repro


PACKAGE = Path(gpt2_repro.__file__).parent
ROOT = PACKAGE.parent
STORIES = [ROOT / "train.py", ROOT / "prepare_data.py"]
LAYERS = {
    -1: ("errors", "formatting"),
    0: ("files", "supervision", "time_breakdown", "references", "comparison"),
    1: ("recipe", "batch_plan", "run_record", "hardware"),
    2: ("model_card", "data", "model", "evaluation", "report", "preflight"),
    3: ("training",),
    4: ("cli", "dry_run", "diff_recipe", "machine"),
    5: ("diagnose", "generate", "export", "supervise"),
}
FLOORS = {name: floor for floor, names in LAYERS.items() for name in names}
TOP = 5  # entry scripts and the modules of `python -m`
PURE = [
    *("errors", "batch_plan", "comparison", "time_breakdown", "references"),
    *("formatting", "model_card", "data/packing", "data/manifest", "data/preparation/order", "data/sources/presets"),
    "evaluation/compare",
]


def files() -> list[Path]:
    return [*STORIES, *sorted(PACKAGE.rglob("*.py"))]


def room_of(path: Path) -> tuple[str, int]:
    if path in STORIES or path.name == "__main__.py":
        return path.stem, TOP
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return name, 0 if name == "__init__" else FLOORS[name]


def imports(path: Path) -> list[tuple[str, ast.AST]]:
    found: list[tuple[str, ast.AST]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from gpt2_repro import hardware` imports a room too.
            found += [(f"{node.module}.{alias.name}", node) for alias in node.names]
    return found


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    room, floor = room_of(path)
    for name, _ in imports(path):
        parts = name.split(".")
        if parts[0] != "gpt2_repro" or parts[1] not in FLOORS or parts[1] == room:
            continue
        below = FLOORS[parts[1]]
        # A room's __main__ composes: it may import its own room and everything below the top.
        assert below < floor, f"{path.name} ({room}, floor {floor}) imports {name} (floor {below})"


def importers(library: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in files()
        for name, _ in imports(path)
        if name == library or name.startswith(library + ".")
    }


def test_upstream_libraries_stay_in_their_rooms() -> None:
    assert importers("flash_attn") == importers("wandb") == set()
    assert importers("deepspeed") == {"gpt2_repro/training/engine.py"}
    assert all(path.startswith("gpt2_repro/evaluation/") for path in importers("lm_eval"))
    assert all(path.startswith("gpt2_repro/report/") for path in importers("matplotlib"))
    assert all(path.startswith("gpt2_repro/training/") for path in importers("transformers.Trainer"))


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_use_no_torch_network_or_environment(name: str) -> None:
    path = PACKAGE / f"{name}.py"
    imported = {name.split(".")[0] for name, _ in imports(path)}
    assert not imported & {"torch", "transformers", "requests", "urllib", "socket", "huggingface_hub", "os"}
