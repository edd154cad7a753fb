"""Parse recipes and command lines as train.py and prepare_data.py do."""

from pathlib import Path
from typing import Any

from gpt2_repro import prepare, train
from gpt2_repro.config import parse_recipe
from gpt2_repro.config import values_of as section_values
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.recipe import DataRecipe
from gpt2_repro.evaluation.arguments import EvaluationArguments
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.training.arguments import TrainingRecipe, TrainingSection, load_recipe


ROOT = Path(__file__).parents[1]
# Those in recipes/after are for TRL.
RECIPES = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "after")
SECTIONS = (DataArguments, ModelArguments, TrainingSection, EvaluationArguments)


def parse_for_training(*words: object) -> TrainingRecipe:
    return load_recipe([str(word) for word in words], options=train.OPTIONS)


def parse_for_preparation(*words: object) -> DataRecipe:
    return parse_recipe(DataRecipe, [str(word) for word in words], options=prepare.OPTIONS)


def values_of(path: Path) -> dict[str, dict[str, Any]]:
    return {name: section_values(section) for name, section in parse_for_training(path).sections.items()}
