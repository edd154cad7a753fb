"""The sections of a recipe, as train.py parses them."""

from pathlib import Path
from typing import Any

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.evaluation.arguments import EvaluationArguments
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.recipe import ParsedRecipe, parse_recipe
from gpt2_repro.training.arguments import PretrainingArguments


ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SECTIONS = {
    "data": DataArguments,
    "model": ModelArguments,
    "training": PretrainingArguments,
    "evaluation": EvaluationArguments,
}


def parse_for_training(*words: object) -> ParsedRecipe:
    return parse_recipe([str(word) for word in words], sections=SECTIONS, options=("data", "model", "training"))


def values_of(path: Path) -> dict[str, dict[str, Any]]:
    return parse_for_training(path).values
