"""Pre-train a GPT-2 on a folder that prepare_data.py has written.

Start train.py with python or with accelerate launch. Pass a recipe (default: recipes/gpt2_124m.yaml), and options
that override fields of the recipe:

    accelerate launch --config_file accelerate_configs/zero1.yaml train.py
    accelerate launch --config_file accelerate_configs/zero1.yaml --num_processes 1 train.py recipes/gpt2_124m.yaml
    python train.py recipes/own_text.yaml --dataset_dir data/shakespeare
    python train.py recipes/gpt2_124m.yaml --dry_run
    gpt2-repro train recipes/gpt2_124m.yaml --config_file zero1.yaml --num_processes 1      after `pip install .`

Run the same command again to resume an interrupted run. A finished run is not changed.
"""

from pathlib import Path
from typing import Any

from gpt2_repro import cli
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.launchers import check_variables
from gpt2_repro.manifest import MANIFEST
from gpt2_repro.training.launch_checks import end_with_launcher


OPTIONS: dict[str, dict[str, Any]] = {
    "dry_run": {"action": "store_true", "help": "Print all settings, model size, steps and FLOPs, then exit."},
    "diff_recipe": {"metavar": "RECIPE", "help": "Print the settings that differ from RECIPE, then exit."},
}


def main(argv: list[str]) -> Path:
    """Train from a recipe, or only print the output of --dry_run or --diff_recipe. Return the run directory."""
    check_variables()
    end_with_launcher()
    # Imports take seconds, so each mistake is reported before the next import.
    from gpt2_repro.recipe import check_trackers, load_recipe, output_dir_of

    recipe = load_recipe(argv, description=__doc__, options=OPTIONS)
    from gpt2_repro.planning.sizing import follow_data
    from gpt2_repro.training.deviations import differences

    if recipe.options.dry_run:
        dry_run(recipe)
    elif recipe.options.diff_recipe is not None:
        print(differences(recipe, recipe.options.diff_recipe))
    else:
        check_trackers(recipe.training.report_to)
        data = PreparedData.open(recipe)
        recipe = follow_data(recipe, data)
        from gpt2_repro.training.run import train

        train(recipe, data)
    return Path(output_dir_of(recipe))


def dry_run(requested: Any) -> None:
    """Print the resolved recipe and the numbers of its run.

    Raises UserError if the prepared data does not fit the recipe. Without prepared data, the tokenizer's name must
    determine the vocabulary size.
    """
    from gpt2_repro.data.tokenizer import expected_vocab_size
    from gpt2_repro.planning.plan import run_lines
    from gpt2_repro.planning.sizing import follow_data, plans_of
    from gpt2_repro.planning.workload import workload_of

    recipe = follow_data(requested)
    if Path(recipe.data.dataset_dir, MANIFEST).is_file() or expected_vocab_size(recipe.data.tokenizer) is None:
        PreparedData.open(recipe)
    lines = run_lines(recipe.data, recipe.model, workload_of(recipe), plans_of(recipe, requested))
    print("\n".join([recipe.to_yaml(), *lines]))


if __name__ == "__main__":
    cli.run(main, prints_results=False)
