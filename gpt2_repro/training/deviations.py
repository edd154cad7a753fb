"""Compare a run with a recipe: `train.py --diff_recipe`, and the deviations in environment.json."""

import contextlib
from collections.abc import Mapping
from typing import Any

from gpt2_repro.config import DEFAULT
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation import references
from gpt2_repro.fields import settings_of
from gpt2_repro.launchers import ROOT
from gpt2_repro.planning.sizing import follow_data
from gpt2_repro.recipe import TrainingRecipe, count_steps, load_recipe


DEFAULT_RECIPE = ROOT / DEFAULT
# A run stays on the loss curve of its recipe if only these fields change: another seed, or less text.
SAME_CURVE = {"seed", "max_tokens"}


def differences(recipe: TrainingRecipe, other: str) -> str:
    """Return one line for each field that differs between a run of `recipe` and the recipe `other`."""
    against = load_recipe([other])
    with contextlib.suppress(UserError):  # without prepared data, sizes of 0 cannot be derived
        recipe = follow_data(recipe)
    lines: list[str] = []
    for section, key, ours, theirs in recipe.differences(against):
        field = f"{section}.{key}"
        lines.append(f"  {field:<38} {_shown(ours):<34} (recipe: {_shown(theirs)})")
    title = f"fields of {recipe.title} that differ from {other}: {len(lines)}"
    return "\n".join([title, *lines])


def compare_with_default(run: TrainingRecipe) -> tuple[str | None, list[Mapping[str, str]]]:
    """Return a comparison of a run with the default recipe.

    Returns:
        The name of the published loss curve that the run should follow, or None if its recipe has none, or if changed
        fields change the curve. The fields that differ and influence the training.
    """
    default = load_recipe([str(DEFAULT_RECIPE)])
    deviations = _changed(run, default)
    for name, curve in references.CURVES.items():
        path = ROOT / curve.recipe
        recipe = load_recipe([str(path)])
        if _is_on_curve(run, recipe):
            return name, deviations
    return None, deviations


def _changed(run: TrainingRecipe, recipe: TrainingRecipe) -> list[Mapping[str, str]]:
    """Return the fields that influence the training, and that differ between a run and a recipe."""
    settings = settings_of(*run.sections.values())
    same: set[str] = set()
    if count_steps(run.training) == count_steps(recipe.training):
        same |= {"max_steps", "total_tokens"}
    if run.training.asked_precision == recipe.training.asked_precision:
        same |= {"bf16", "precision"}
    changed: list[Mapping[str, str]] = []
    for section, key, ours, theirs in run.differences(recipe):
        if settings[key].is_trajectory and key not in same:
            deviation = {
                "field": f"{section}.{key}",
                "run": _shown(ours),
                "recipe": _shown(theirs),
            }
            changed.append(deviation)
    return changed


def _is_on_curve(run: TrainingRecipe, recipe: TrainingRecipe) -> bool:
    """Return whether a run should have the validation losses of a recipe."""
    changed: set[str] = set()
    for deviation in _changed(run, recipe):
        _, _, field = deviation["field"].partition(".")
        changed.add(field)
    changed -= SAME_CURVE
    sources = (run.data.source, recipe.data.source)
    if sources == ("fineweb-10bt-tokens", "fineweb-10bt"):
        changed -= {"source", "split"}  # the same text: the validation shard is the head of the default source
    if changed:
        return False
    return run.training.eval_tokens == recipe.training.eval_tokens


def _shown(value: Any) -> str:
    if isinstance(value, list):
        value = " ".join(map(str, value))
    elif isinstance(value, int) and not isinstance(value, bool):
        value = f"{value:,}"
    if value in (None, ""):
        return "-"
    return str(value)
