"""Parse recipes and command lines as train.py and prepare_data.py do."""

import contextlib
import subprocess
from pathlib import Path
from typing import Any

from gpt2_repro import prepare, train
from gpt2_repro.config import parse_recipe
from gpt2_repro.config import values_of as section_values
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.recipe import DataRecipe
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.recipe import EvaluationArguments, TrainingRecipe, TrainingSection, load_recipe


ROOT = Path(__file__).parents[1]


def shipped_recipes() -> list[Path]:
    """Return the recipes that are shipped, without those of the user. The recipes in recipes/after are for TRL."""
    names: list[str] = []
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # without git, all recipes
        tracked = ["git", "-C", str(ROOT), "ls-files", "recipes"]
        names = subprocess.check_output(tracked, text=True, stderr=subprocess.DEVNULL).splitlines()
    paths = [ROOT / name for name in names] or (ROOT / "recipes").rglob("*")
    return sorted(path for path in paths if path.suffix == ".yaml" and path.is_file() and path.parent.name != "after")


RECIPES = shipped_recipes()
SECTIONS = (DataArguments, ModelArguments, TrainingSection, EvaluationArguments)


def parse_for_training(*words: object) -> TrainingRecipe:
    return load_recipe([str(word) for word in words], options=train.OPTIONS)


def parse_for_preparation(*words: object) -> DataRecipe:
    return parse_recipe(DataRecipe, [str(word) for word in words], options=prepare.OPTIONS)


def values_of(path: Path) -> dict[str, dict[str, Any]]:
    return {name: section_values(section) for name, section in parse_for_training(path).sections.items()}
