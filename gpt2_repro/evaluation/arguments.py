"""Parse the command line of evaluate.sh."""

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2_repro.cli import CommandParser, positive_count
from gpt2_repro.config import parse_recipe, values_of
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.output import TABLES
from gpt2_repro.fields import settings_of
from gpt2_repro.launchers import EVALUATE
from gpt2_repro.recipe import SUITES, EvaluationArguments, EvaluationRecipe
from gpt2_repro.run_record.layout import RECIPE


# Options that do not change the scores, apart from rounding.
SAME_SCORES = ("checkpoints", "follow", "no_cache", "output_dir", "device", "processes", "batch_size", "table")


def parse_options(argv: Sequence[str], *, description: str | None) -> argparse.Namespace:
    """Return the command line of evaluate.sh. Recipe fields that were not passed are None."""
    parser = CommandParser(prog=EVALUATE, usage="%(prog)s CHECKPOINT... [--key value ...]", description=description)
    models = "A run directory (final/ or a newer checkpoint), a checkpoint-N/ or final/, any Hugging Face folder, or a Hub id."
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help=models)
    defaults = "default: the value in the run's recipe; without a run, the value shown here"
    group = parser.add_argument_group(f"section `evaluation` of the recipe ({defaults})")
    _add_recipe_fields(group)
    parser.add_argument("--local_data", type=Path, metavar="DIR", help="Folder with jsonl task data, for offline use.")
    parser.add_argument("--suite", choices=SUITES, help="Tasks to score. core: DCLM's 22 tasks.")
    parser.add_argument("--bits_per_byte", type=Path, metavar="DIR", help="Also score the text files in DIR.")
    parser.add_argument("--check_overlap", action="store_true", help="Also score without texts in the training data.")
    table = "Also write comparison.csv, with one line per score, or comparison.tex, for the package booktabs."
    parser.add_argument("--table", choices=TABLES, help=table)
    follow = "Score each checkpoint of a run, or of its copies at a place, while it trains."
    parser.add_argument("--follow", action="store_true", help=follow)
    parser.add_argument("--no_cache", action="store_true", help="Do not read or write scores in .cache/evaluation.")
    parser.add_argument("--limit", type=positive_count, metavar="N", help="Smoke test of N documents per task.")
    parser.add_argument("--output_dir", type=Path, metavar="DIR", help="Default: RUN/evaluation, or evaluations/NAME.")
    parser.add_argument("--device", metavar="D", help="cpu, cuda, cuda:N or mps. Default: cuda (all GPUs), if any.")
    processes = "Processes that share the texts. Default: one per GPU; on CPUs one."
    parser.add_argument("--processes", type=positive_count, metavar="N", help=processes)
    parser.add_argument("--batch_size", type=positive_count, metavar="N", help="Windows per pass. GPU: 32, CPU: 1.")
    options = parser.parse(argv)
    if options.tasks is not None:
        text = " ".join(options.tasks)
        words = re.split("[, ]", text)
        options.tasks = [task for task in words if task]
    return options


def _add_recipe_fields(group: Any) -> None:
    """Add the fields of the section `evaluation` of a recipe to a group of options."""
    settings = settings_of(EvaluationArguments)
    for name, default in values_of(EvaluationArguments()).items():
        kind: Any = str
        if name == "max_length":
            kind = positive_count
        nargs = None
        if isinstance(default, list):
            nargs = "+"
            default = " ".join(default)
        help_text = f"{settings[name]} (default: {default})"
        group.add_argument(f"--{name}", type=kind, nargs=nargs, help=help_text)


def options_of_scores(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that scores depend on, apart from rounding, as JSON values."""
    relevant: dict[str, Any] = {}
    for name, value in vars(options).items():
        if name not in SAME_SCORES:
            relevant[name] = value
    text = json.dumps(relevant, default=str)
    return dict(json.loads(text))


def arguments_of_run(run_directory: Path | None) -> EvaluationArguments:
    """Return a run's recipe section `evaluation:`, or the defaults if `run` is None."""
    if run_directory is None:
        return EvaluationArguments()
    path = run_directory / RECIPE
    recipe = parse_recipe(EvaluationRecipe, [str(path)])
    return recipe.evaluation


def override_arguments(section: EvaluationArguments, options: argparse.Namespace) -> EvaluationArguments:
    """Return the recipe section `evaluation:`, with values replaced by passed options, and each task once."""
    if options.suite and options.tasks:
        raise UserError("--suite and --tasks both choose the tasks. Pass one of them.")
    passed: dict[str, Any] = {}
    for name in values_of(section):
        value = getattr(options, name)
        if value is not None:
            passed[name] = value
    if options.suite:
        passed["tasks"] = SUITES[options.suite]
    arguments = dataclasses.replace(section, **passed)
    unique = dict.fromkeys(arguments.tasks)
    return dataclasses.replace(arguments, tasks=list(unique))
