"""Pre-train a GPT-2 from a prepared folder. A run is a sentence: launcher, story, recipe, overrides.

    accelerate launch --config_file accelerate_configs/zero1.yaml train.py
    accelerate launch --config_file accelerate_configs/zero1.yaml --num_processes 1 train.py recipes/gpt2_124m.yaml
    python train.py recipes/gpt2_124m.yaml --dry_run

Start the same command again to resume; a finished run is left as it is.
"""

from typing import Any

from gpt2_repro import cli, diff_recipe, dry_run
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.prepared import PreparedData, require_prepared
from gpt2_repro.evaluation.arguments import EvaluationArguments
from gpt2_repro.model.arguments import ModelArguments, check_documents, follow_checkpoint
from gpt2_repro.recipe import parse_recipe
from gpt2_repro.training.launcher import end_with_launcher


OPTIONS = ("data", "model", "training")
EXTRAS: dict[str, dict[str, Any]] = {
    "dry_run": {"action": "store_true", "help": "Print the resolved recipe and what it derives, and stop."},
    "diff_recipe": {"metavar": "RECIPE", "help": "Print how the run deviates from this recipe, and stop."},
}


def main(argv: list[str]) -> None:
    """Parse, check, build, train, save."""
    end_with_launcher()
    require_prepared(argv)

    from gpt2_repro.training.arguments import PretrainingArguments

    sections = dict(
        data=DataArguments, model=ModelArguments, training=PretrainingArguments, evaluation=EvaluationArguments
    )
    recipe = parse_recipe(argv, sections=sections, options=OPTIONS, description=__doc__, extras=EXTRAS)
    recipe = follow_checkpoint(recipe)
    data_args, model_args = DataArguments(**recipe.values["data"]), ModelArguments(**recipe.values["model"])
    check_documents(model_args, packing=data_args.packing, separator=data_args.separator)
    if recipe.extras.dry_run:
        return dry_run.dry_run(recipe, data_args, model_args)
    if recipe.extras.diff_recipe is not None:
        return diff_recipe.diff_recipe(recipe, recipe.extras.diff_recipe)
    data = PreparedData.open(data_args, typed=recipe.typed, recipe=recipe.path)

    from gpt2_repro.training.pretrain import pretrain

    pretrain(recipe, data_args, model_args, data, beside_default=diff_recipe.beside_default(recipe))


if __name__ == "__main__":
    cli.run(main)
