"""Pre-train a GPT-2 on a folder that prepare_data.py has written.

Start train.py with python or with accelerate launch. Pass a recipe (default: recipes/gpt2_124m.yaml), and options
that override fields of the recipe:

    accelerate launch --config_file accelerate_configs/zero1.yaml train.py
    accelerate launch --config_file accelerate_configs/zero1.yaml --num_processes 1 train.py recipes/gpt2_124m.yaml
    python train.py recipes/own_text.yaml --dataset_dir data/shakespeare
    python train.py recipes/gpt2_124m.yaml --dry_run

Run the same command again to resume an interrupted run. A finished run is not changed.
"""

from typing import Any

from gpt2_repro import cli
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.errors import UserError
from gpt2_repro.launchers import check_variables
from gpt2_repro.training.launcher import check_cores, end_with_launcher


OPTIONS: dict[str, dict[str, Any]] = {
    "dry_run": {
        "action": "store_true",
        "help": "Print all settings, the model size, the steps and the FLOPs, then exit.",
    },
    "diff_recipe": {
        "metavar": "RECIPE",
        "help": "Print the settings of this command that differ from RECIPE, then exit.",
    },
}
# The options that --help lists, by heading. --help all lists every option.
HELP = {
    "Data and model": ("dataset_dir", "sequence_length", "n_layer", "n_head", "n_embd", "init_from"),
    "Length and batch": ("epochs", "total_tokens", "max_steps", "tokens_per_step", "per_device_train_batch_size"),
    "Optimization": ("learning_rate", "warmup_steps", "lr_scheduler_type", "weight_decay", "seed"),
    "Measurement": ("eval_steps", "hellaswag_steps", "report_to"),
    "Run": ("output_dir", "save_steps", "max_hours", "use_cpu", "activation_checkpointing", "dry_run"),
}


def main(argv: list[str]) -> None:
    """Train from a recipe, or only print the output of --dry_run or --diff_recipe."""
    check_variables()
    end_with_launcher()
    check_cores(argv)
    # Imports take seconds, so each mistake is reported before the next import.
    from gpt2_repro.training.arguments import load_recipe

    recipe = load_recipe(argv, description=__doc__, options=OPTIONS, groups=HELP)
    from gpt2_repro.diff_recipe import compare_with_default, diff_recipe
    from gpt2_repro.preflight.__main__ import dry_run
    from gpt2_repro.training.sizing import follow_data

    if recipe.options.dry_run and recipe.options.diff_recipe is not None:
        raise UserError("--dry_run and --diff_recipe print different things. Pass one of them.")
    if recipe.options.dry_run:
        return dry_run(recipe)
    if recipe.options.diff_recipe is not None:
        return diff_recipe(recipe, recipe.options.diff_recipe)
    data = PreparedData.open(recipe.data, typed=recipe.typed, recipe=recipe.path)
    recipe = follow_data(recipe, data)
    from gpt2_repro.training.pretrain import pretrain

    pretrain(recipe, data, deviations=compare_with_default(recipe))


if __name__ == "__main__":
    cli.run(main, prints_results=False)
