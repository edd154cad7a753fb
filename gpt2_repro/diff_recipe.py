"""The differences between a run and a recipe: `train.py --diff_recipe RECIPE`."""

import dataclasses
import enum
import re
from pathlib import Path
from typing import Any, Literal

from gpt2_repro import references
from gpt2_repro.recipe import DEFAULT, values_of
from gpt2_repro.training.arguments import TrainingRecipe, count_steps, load_recipe


DEFAULT_RECIPE = Path(__file__).parents[1] / DEFAULT
Group = Literal["learned", "measured", "neither"]
HEADINGS: dict[Group, str] = {
    "learned": "Change what is learned",
    "measured": "Change the measurement",
    "neither": "Change neither",
}
# Fields that change the measurement, in addition to the section evaluation.
MEASURED = re.compile(r"split|split_seed|validation_(tokens|fraction)|eval_(tokens|strategy)|logging_nan_inf_filter")
# Fields that change neither, except for rounding. A field that matches no pattern counts as learned, so nothing hides.
NEITHER = re.compile(
    r"(per_device|hellaswag|sample|logging|log|save|keep|trackio|dataloader|ddp)_.*"
    r"|(dataset|output)_dir|validation_text|attn_implementation|torch_compile.*|activation_checkpointing.*|use_cpu"
    r"|eval_(steps|on_start|delay)|resume_from.*|allow_resume_change|max_(hours|usd)|usd_per_hour|hang_timeout"
    r"|report_to|run_name|project|torch_empty_cache_steps|full_determinism|debug|disable_tqdm|skip_memory_metrics"
)
# Fields that keep the run on the loss curve of its recipe: another seed, a part of the steps, a part of the text.
SAME_CURVE = {"seed", "stop_at_step", "max_tokens"}


@dataclasses.dataclass(frozen=True)
class Deviation:
    """A value of a run that differs from the recipe's."""

    section: str
    key: str
    run: Any
    recipe: Any
    group: Group

    def as_text(self) -> dict[str, str]:
        """The field with its section, and both values."""
        return {"field": f"{self.section}.{self.key}", "run": _shown(self.run), "recipe": _shown(self.recipe)}


def diff_recipe(run: TrainingRecipe, other: str) -> None:
    """Print every difference between `run` and the recipe `other`. Needs no data, no GPU, no launcher.

    Raises UserError if `other` is not a recipe.
    """
    found = deviations(run, load_recipe([other]))
    print(f"{run.title} compared with {other}: {len(found)} differences")
    for group, heading in HEADINGS.items():
        rows = [deviation.as_text() for deviation in found if deviation.group == group]
        if rows:
            print(f"\n{heading}")
        for row in rows:
            print(f"  {row['field']:<38} {row['run']:<34} (recipe: {row['recipe']})")


def deviations(run: TrainingRecipe, recipe: TrainingRecipe) -> list[Deviation]:
    """Every field that differs, including defaults, by section."""
    found = []
    for section in run.sections:
        ours, theirs = _values(run, section), _values(recipe, section)
        changed = [key for key, value in ours.items() if value != theirs[key]]
        found += [Deviation(section, key, ours[key], theirs[key], _group(section, key)) for key in changed]
    return found


def compare_with_default(run: TrainingRecipe) -> dict[str, Any]:
    """Return what a run records about the default recipe.

    `deviations` are the fields that change what is learned. `reference` names the published loss curve that the run should
    follow; it is None if a deviation changes the validation loss.
    """
    found = deviations(run, load_recipe([str(DEFAULT_RECIPE)]))
    moving = {its.key for its in found if its.group != "neither" and its.section != "evaluation"} - SAME_CURVE
    if run.data.source == "fineweb-10bt-tokens":
        moving -= {"source", "split"}  # the same text; its validation shard is the default's head
    return {
        "reference": None if moving else references.NAME,
        "deviations": [its.as_text() for its in found if its.group == "learned"],
    }


def _values(recipe: TrainingRecipe, section: str) -> dict[str, Any]:
    """The values of a section, with `total_tokens` and `max_steps` both set to the length of the run."""
    values = values_of(recipe.sections[section])
    if section == "training":
        steps = count_steps(recipe.training)
        return values | {"max_steps": steps, "total_tokens": steps * recipe.training.tokens_per_step}
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
