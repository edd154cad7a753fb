"""Fixtures that several test files share: runs and prepared data."""

import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
import yaml

from gpt2_repro.checkpoints.manifest import seal
from gpt2_repro.checkpoints.rotation import publish
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.prepare import prepare


@pytest.fixture(scope="session")
def typed(type_warm, tiny_recipe: Path) -> Callable[..., CompletedProcess[str]]:
    """Return a function that runs train.py; a failure does not raise an exception."""

    def run(output: Path, *options: object, **environment: str) -> CompletedProcess[str]:
        return type_warm("python", "train.py", tiny_recipe, "--output_dir", output, *options, **environment)

    return run


@pytest.fixture(scope="session")
def straight(train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run with checkpoints of steps 4 and 8.

    Tests must not modify the run.
    """
    return train(tmp_path_factory.mktemp("straight") / "run")


@pytest.fixture
def finished(straight: Path, tmp_path: Path) -> Path:
    """Return a copy of a finished run, which the test may modify."""
    return Path(shutil.copytree(straight, tmp_path / "run"))


@pytest.fixture(scope="session")
def wrapped_data(tiny_recipe: Path, documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a prepared folder with rows of 8 to 32 targets, and an additional validation set.

    Each row contains text of a single document.
    """
    folder = tmp_path_factory.mktemp("wrapped")
    (folder / "few.txt").write_text(documents[0], encoding="utf-8")
    changes = {"dataset_dir": str(folder / "data"), "packing": "wrap", "min_length": 8}
    changes["validation_sets"] = [f"few={folder}/few.txt"]
    prepare(DataArguments(**yaml.safe_load(tiny_recipe.read_text(encoding="utf-8"))["data"] | changes))
    return folder / "data"


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that saves a small checkpoint in `tmp_path`.

    The function takes the step, the content of .pt files by name, and entries of the manifest.
    """

    def run(step: int, states: dict[str, dict] | None = None, **facts: object) -> Path:
        staged = tmp_path / "staging" / f"checkpoint-{step}"
        for name, state in (states or {"optimizer": {"m": torch.ones(step)}}).items():
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, staged / f"{name}.pt")
        seal(staged, {}, **{"run_identity": {"seed": 1, "max_steps": 8, "n_layer": 2}} | facts)
        publish(staged, tmp_path / f"checkpoint-{step}")
        return tmp_path / f"checkpoint-{step}"

    return run
