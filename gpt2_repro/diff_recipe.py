"""How a run deviates from a recipe, and what each deviation is known to do: `train.py --diff_recipe RECIPE`."""

import dataclasses
import enum
import textwrap
from pathlib import Path
from typing import Any, Literal

from gpt2_repro import reference_band
from gpt2_repro.data.manifest import read_manifest
from gpt2_repro.errors import UserError
from gpt2_repro.known_effects import KNOWN_EFFECTS, known_effect
from gpt2_repro.recipe import ParsedRecipe, parse_recipe


WIDTH = 118  # columns of the longest printed line
# Fields that change how a run is measured, beside the whole section evaluation.
MEASURED = {
    "split",
    "validation_tokens",
    "validation_fraction",
    "split_seed",
    "eval_tokens",
    "eval_strategy",
    "logging_nan_inf_filter",
}
# Beginnings of the fields that change neither, but for rounding. Whatever stands nowhere counts as learned: nothing hides.
NEITHER = (
    "dataset_dir",
    "validation_text",
    "attn_implementation",
    "output_dir",
    "per_device_",
    "eval_steps",
    "eval_on_start",
    "eval_delay",
    "hellaswag_",
    "sample_",
    "logging_",
    "log_",
    "save_",
    "keep_",
    "resume_from",
    "allow_resume_change",
    "max_hours",
    "max_usd",
    "usd_per_hour",
    "hang_timeout",
    "report_to",
    "run_name",
    "project",
    "trackio_",
    "dataloader_",
    "ddp_",
    "torch_compile",
    "activation_checkpointing",
    "torch_empty_cache_steps",
    "use_cpu",
    "full_determinism",
    "debug",
    "disable_tqdm",
    "skip_memory_metrics",
)
# Fields that do nothing unless another one has this value in the run.
USED_WITH = {
    "validation_tokens": ("split", "head"),
    "validation_fraction": ("split", "hash"),
    "split_seed": ("split", "hash"),
    "min_length": ("packing", "wrap"),
}
# What leaves a run on the curve of its recipe: another draw, a part of the curve, a part of the same text.
SAME_CURVE = {"seed", "stop_at_step", "max_tokens"}


@dataclasses.dataclass(frozen=True)
class Deviation:
    """One value of a run that is not the recipe's."""

    section: str
    key: str
    run: Any
    recipe: Any
    group: Literal["learned", "measured", "neither"]

    @property
    def name(self) -> str:
        """The field with its section."""
        return f"{self.section}.{self.key}"

    @property
    def effect(self) -> str:
        """What the deviation is known to do, with its source, in one line."""
        return known_effect(self.key, self.run, self.recipe)


def diff_recipe(run: ParsedRecipe, other: str) -> None:
    """Print every deviation of `run` from the recipe `other`. Needs no data, no GPU, no launcher.

    Raises UserError where `other` is no recipe.
    """
    recipe = parse_recipe([other], sections=run.sections)
    typed = " ".join(f"--{name}" for name in sorted(run.typed - vars(run.extras).keys()))
    title = f"{run.path} {typed}".strip()
    found = deviations(run, recipe)
    if not found:
        print(f"{title} does not deviate from {other}")
        return
    print(textwrap.fill(f"{title}, with {other}'s values in parentheses", WIDTH, subsequent_indent="  "))
    shown = [deviation for deviation in found if deviation.group != "neither"]
    key_width = max((len(deviation.name) for deviation in shown), default=0)
    run_width = max((len(_shown(deviation.run)) for deviation in shown), default=0)
    for group, heading in (("learned", "What is learned"), ("measured", "How it is measured")):
        members = [deviation for deviation in shown if deviation.group == group]
        if members:
            print(f"\n{heading}")
        for deviation in members:
            values = f"{_shown(deviation.run):<{run_width}}  ({_shown(deviation.recipe)})"
            print(f"  {deviation.name:<{key_width}}  {values}\n      {deviation.effect}")
    if neither := [deviation.name for deviation in found if deviation.group == "neither"]:
        print("\n" + textwrap.fill(f"Changes neither: {', '.join(neither)}", WIDTH, subsequent_indent="  "))
    print("\n" + textwrap.fill(f"{_about_data(run)}The effects and their sources: docs/recipes.md", WIDTH))


def deviations(run: ParsedRecipe, recipe: ParsedRecipe) -> list[Deviation]:
    """Every field that differs, defaults included, in the order of KNOWN_EFFECTS within its section.

    A length is compared as what it comes to: total_tokens and max_steps stand for the tokens and steps of the run.
    A folder that was typed is the data: where it is prepared, its manifest speaks for the section.
    """
    found = []
    rank = {key: index for index, key in enumerate(KNOWN_EFFECTS)}
    for section in run.sections:
        ours, theirs = _section(run, section), _section(recipe, section)
        for key in sorted(ours, key=lambda key: rank.get(key, len(rank))):
            if ours[key] != theirs[key]:
                found.append(Deviation(section, key, ours[key], theirs[key], _group(section, key, ours)))
    return found


def beside_default(run: ParsedRecipe) -> dict[str, Any]:
    """How a run stands to `recipes/gpt2_124m.yaml`: `deviations`, and `reference`, whose curve is to be expected.

    A deviation that changes what is learned is there in words: field, run, recipe, effect. The reference is None where
    a deviation moves the validation loss.
    """
    default = Path(__file__).parents[1] / "recipes" / "gpt2_124m.yaml"  # wherever the command is typed
    found = deviations(run, parse_recipe([str(default)], sections=run.sections))
    moving = {its.key for its in found if its.group != "neither" and its.section != "evaluation"} - SAME_CURVE
    if run.values["data"]["source"] == "fineweb-10bt-tokens":  # the same text; its own validation shard is the head
        moving -= {"source", "split"}
    return {
        "reference": None if moving else reference_band.NAME,
        "deviations": [
            {"field": its.name, "run": _shown(its.run), "recipe": _shown(its.recipe), "effect": its.effect}
            for its in found
            if its.group == "learned"
        ],
    }


def _section(recipe: ParsedRecipe, section: str) -> dict[str, Any]:
    values = recipe.values[section]
    if section == "data":
        request = (_manifest(recipe) or {}).get("request", {})
        return values | {key: value for key, value in request.items() if key in values}
    if section == "training":
        steps = values["max_steps"] or values["total_tokens"] // max(1, values["tokens_per_step"])
        return values | {"max_steps": steps, "total_tokens": steps * values["tokens_per_step"]}
    return values


def _manifest(recipe: ParsedRecipe) -> dict[str, Any] | None:
    if "dataset_dir" not in recipe.typed:
        return None
    try:
        return read_manifest(recipe.values["data"]["dataset_dir"], prepare="")
    except UserError:
        return None


def _about_data(recipe: ParsedRecipe) -> str:
    if "dataset_dir" not in recipe.typed:
        return ""
    folder = recipe.values["data"]["dataset_dir"]
    if _manifest(recipe):
        return f"The data section is that of {folder}'s manifest. "
    return f"{folder} is not prepared here: what it holds was taken from the options. "


def _group(section: str, key: str, values: dict[str, Any]) -> Literal["learned", "measured", "neither"]:
    other, needed = USED_WITH.get(key, ("", None))
    if other in values and values[other] != needed:
        return "neither"
    if section == "evaluation" or key in MEASURED:
        return "measured"
    return "neither" if key.startswith(NEITHER) else "learned"


def _shown(value: Any, width: int = 34) -> str:
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, int):
        text = f"{value:,}"
    elif isinstance(value, list):
        text = " ".join(map(str, value)) or "-"
    else:
        text = "-" if value in (None, "") else str(value)
    return text if len(text) <= width else f"{text[: width - 1]}…"
