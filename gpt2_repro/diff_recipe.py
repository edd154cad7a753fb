"""Print the differences between a run and a recipe: `train.py --diff_recipe`."""

import dataclasses
import enum
import re
from pathlib import Path
from typing import Any, Literal

from gpt2_repro.errors import UserError
from gpt2_repro.evaluation import references
from gpt2_repro.recipe import DEFAULT, values_of
from gpt2_repro.training.arguments import TrainingRecipe, count_steps, load_recipe
from gpt2_repro.training.sizing import follow_data


DEFAULT_RECIPE = Path(__file__).parents[1] / DEFAULT
Group = Literal["learned", "measured", "neither"]
HEADINGS: dict[Group, str] = {
    "learned": "Fields that change the training",
    "measured": "Fields that change only the measurement",
    "neither": "Fields that change neither the training nor the measurement",
}
# Fields that change the measurement, in addition to all fields of the section `evaluation`.
MEASURED = re.compile(r"split|split_seed|validation_(tokens|fraction)|eval_(tokens|strategy)|logging_nan_inf_filter")
# Fields that change neither of them, except for rounding. Unmatched fields count as "learned": no change is hidden.
NEITHER = re.compile(
    r"(per_device|hellaswag|sample|logging|log|save|keep|trackio|dataloader|ddp)_.*"
    r"|(dataset|output)_dir|validation_text|attn_implementation|torch_compile.*|activation_checkpointing.*|use_cpu"
    r"|eval_(steps|on_start|delay)|resume_from.*|allow_resume_change|max_(hours|usd)|usd_per_hour|hang_timeout"
    r"|report_to|run_name|project|torch_empty_cache_steps|full_determinism|disable_tqdm|skip_memory_metrics"
)
# A run stays on the loss curve of its recipe if only these fields change: another seed, fewer steps or less text.
SAME_CURVE = {"seed", "stop_at_step", "max_tokens"}


@dataclasses.dataclass(frozen=True)
class Deviation:
    """A field whose value in a run differs from its value in a recipe."""

    section: str
    key: str
    run: Any
    recipe: Any
    group: Group

    def as_text(self) -> dict[str, str]:
        """Return the field's name, such as `training.seed`, and the two values as text."""
        return {"field": f"{self.section}.{self.key}", "run": _shown(self.run), "recipe": _shown(self.recipe)}


def diff_recipe(recipe: TrainingRecipe, other: str) -> None:
    """Print every difference between a run of `recipe` and the recipe `other`.

    Raises UserError if `other` is not a recipe.
    """
    against = load_recipe([other])
    try:
        run = follow_data(recipe)
    except UserError:
        run = recipe  # without prepared data, sizes of 0 cannot be derived
    found = deviations(run, against)
    print(f"fields of {run.title} that differ from {other}: {len(found)}")
    for group, heading in HEADINGS.items():
        rows = [deviation.as_text() for deviation in found if deviation.group == group]
        if rows:
            print(f"\n{heading}")
        for row in rows:
            print(f"  {row['field']:<38} {row['run']:<34} (recipe: {row['recipe']})")


def deviations(run: TrainingRecipe, recipe: TrainingRecipe) -> list[Deviation]:
    """Return every field whose value differs between a run and a recipe."""
    found = []
    for section in run.sections:
        ours, theirs = _values(run, section), _values(recipe, section)
        changed = [key for key, value in ours.items() if value != theirs[key]]
        found += [Deviation(section, key, ours[key], theirs[key], _group(section, key)) for key in changed]
    return found


def compare_with_default(run: TrainingRecipe) -> dict[str, Any]:
    """Return a comparison of a run with the default recipe, for environment.json.

    The result has two keys. `deviations` is a list of the changed fields that influence the training. `reference` is
    the name of the published loss curve that the run should follow, or None if the changed fields change the curve.
    """
    found = deviations(run, load_recipe([str(DEFAULT_RECIPE)]))
    moving = {its.key for its in found if its.group != "neither" and its.section != "evaluation"} - SAME_CURVE
    if run.data.source == "fineweb-10bt-tokens":
        moving -= {"source", "split"}  # the same text: the validation shard is the head of the default source
    return {
        "reference": None if moving else references.NAME,
        "deviations": [its.as_text() for its in found if its.group == "learned"],
    }


def _values(recipe: TrainingRecipe, section: str) -> dict[str, Any]:
    """Return a section's values by name, with computed `max_steps` and `total_tokens`."""
    values, training = values_of(recipe.sections[section]), recipe.training
    # A size of 0 is derived from the text when a run starts, so the number of steps is not known yet.
    if section == "training" and training.tokens_per_step and (training.max_steps or training.total_tokens):
        steps = count_steps(training)
        return values | {"max_steps": steps, "total_tokens": steps * training.tokens_per_step}
    return values


def _group(section: str, key: str) -> Group:
    if section == "evaluation" or MEASURED.fullmatch(key):
        return "measured"
    return "neither" if NEITHER.fullmatch(key) else "learned"


def _shown(value: Any, width: int = 34) -> str:
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, list):
        value = " ".join(map(str, value))
    elif isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, int):
        value = f"{value:,}"
    text = "-" if value in (None, "") else str(value)
    return text if len(text) <= width else f"{text[: width - 1]}…"
