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
from gpt2_repro.launchers import EVALUATE
from gpt2_repro.recipe import SUITES, EvaluationArguments, EvaluationRecipe
from gpt2_repro.run_record.layout import RECIPE


# Options that do not change the scores, apart from rounding.
SAME_SCORES = ("checkpoints", "follow", "no_cache", "output_dir", "device", "batch_size")


def parse_options(argv: Sequence[str], *, description: str | None) -> argparse.Namespace:
    """Return the command line of evaluate.sh. Recipe fields that were not passed are None."""
    parser = CommandParser(prog=EVALUATE, usage="%(prog)s CHECKPOINT... [--key value ...]", description=description)
    models = "A run directory (final/ or a newer checkpoint), a checkpoint-N/ or final/, any Hugging Face folder, or a Hub id."
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help=models)
    defaults = "default: the value in the run's recipe; without a run, the value shown here"
    recipe = parser.add_argument_group(f"section `evaluation` of the recipe ({defaults})")
    for name, default in values_of(EvaluationArguments()).items():
        shown, nargs = (" ".join(default), "+") if isinstance(default, list) else (default, None)
        text = f"{EvaluationArguments.__dataclass_fields__[name].metadata['help']} (default: {shown})"
        recipe.add_argument(f"--{name}", type=positive_count if name == "max_length" else str, nargs=nargs, help=text)
    parser.add_argument("--local_data", type=Path, metavar="DIR", help="Folder with jsonl task data, for offline use.")
    parser.add_argument("--suite", choices=SUITES, help="Tasks to score.")
    parser.add_argument("--bits_per_byte", type=Path, metavar="DIR", help="Also score the text files in DIR.")
    parser.add_argument("--check_overlap", action="store_true", help="Also score without texts in the training data.")
    follow = "Score each checkpoint of a run, or of its copies at a place, while it trains."
    parser.add_argument("--follow", action="store_true", help=follow)
    parser.add_argument("--no_cache", action="store_true", help="Do not read or write scores in .cache/evaluation.")
    parser.add_argument("--limit", type=positive_count, metavar="N", help="Smoke test of N documents per task.")
    parser.add_argument("--output_dir", type=Path, metavar="DIR", help="Default: RUN/evaluation, or evaluations/NAME.")
    parser.add_argument("--device", metavar="D", help="cpu, cuda, cuda:N or mps. Default: the first GPU, if any.")
    parser.add_argument("--batch_size", type=positive_count, metavar="N", help="Windows per pass. GPU: 32, CPU: 1.")
    options = parser.parse(argv)
    if options.tasks is not None:
        options.tasks = [task for word in options.tasks for task in re.split("[, ]", word) if task]
    return options


def options_of_scores(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that scores depend on, apart from rounding, as JSON values."""
    relevant = {name: value for name, value in vars(options).items() if name not in SAME_SCORES}
    return dict(json.loads(json.dumps(relevant, default=str)))


def arguments_of_run(run: Path | None) -> EvaluationArguments:
    """Return a run's recipe section `evaluation:`, or the defaults if `run` is None."""
    return parse_recipe(EvaluationRecipe, [str(run / RECIPE)]).evaluation if run else EvaluationArguments()


def override_arguments(section: EvaluationArguments, options: argparse.Namespace) -> EvaluationArguments:
    """Return the recipe section `evaluation:`, with values replaced by passed options, and each task once."""
    if options.suite and options.tasks:
        raise UserError("--suite and --tasks both choose the tasks. Pass one of them.")
    passed = {name: value for name in values_of(section) if (value := getattr(options, name)) is not None}
    if options.suite:
        passed["tasks"] = SUITES[options.suite]
    arguments = dataclasses.replace(section, **passed)
    return dataclasses.replace(arguments, tasks=list(dict.fromkeys(arguments.tasks)))
