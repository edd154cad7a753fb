"""Define the recipe of prepare_data.py."""

import dataclasses

from gpt2_repro.config import Recipe
from gpt2_repro.data.arguments import DataArguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataRecipe(Recipe):
    """A recipe of which only the section `data:` is read."""

    data: DataArguments
