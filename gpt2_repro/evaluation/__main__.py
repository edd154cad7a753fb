"""Score checkpoints and a baseline with lm-evaluation-harness, by one command for all, and write one table.

bash evaluate.sh runs/gpt2_124m                                   its final/ beside openai-community/gpt2
bash evaluate.sh runs/gpt2_124m/checkpoint-5000 runs/gpt2_124m --tasks hellaswag lambada_openai
bash evaluate.sh runs/gpt2_124m --all_checkpoints --baseline none         a trend over the tokens trained
bash evaluate.sh openai-community/gpt2 --baseline none --limit 20
bash evaluate.sh runs/demo --local_data data/demo --tasks last_word document_perplexity --baseline untrained
"""

import dataclasses
import functools
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt2_repro.checkpoint import all_checkpoints, resolve_checkpoint
from gpt2_repro.cli import run
from gpt2_repro.comparison import to_markdown
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation import published
from gpt2_repro.evaluation.arguments import EvaluationArguments, parse_options, with_options
from gpt2_repro.evaluation.cache import FOLDER, Cache
from gpt2_repro.evaluation.compare import ComparedModel, compare
from gpt2_repro.evaluation.harness import Settings, choose_device
from gpt2_repro.evaluation.loaded_model import LoadedModel, open_model
from gpt2_repro.evaluation.provenance import common_window, default_output_dir
from gpt2_repro.evaluation.run_metadata import run_metadata
from gpt2_repro.evaluation.scores import TaskScores
from gpt2_repro.evaluation.scoring import Benchmark, score
from gpt2_repro.evaluation.tasks import check_tasks, find_local_files, with_completion, write_task_files
from gpt2_repro.files import read_object, write_whole
from gpt2_repro.model_card import add_results
from gpt2_repro.recipe import read_section
from gpt2_repro.run_record.environment import TrainingRecord
from gpt2_repro.run_record.layout import RECIPE


SEED = 1234
UNTRAINED = "untrained"

logger = logging.getLogger("gpt2_repro.evaluation")


def main(argv: list[str]) -> None:
    options = parse_options(argv, description=__doc__)
    # Below the options, so that --help and a mistyped option need not wait for torch.
    from gpt2_repro.model.export import load_pair

    names, every = options.checkpoints, options.all_checkpoints
    traced = [one for name in names for one in (all_checkpoints(name) if every else [resolve_checkpoint(name)])]
    recipe = next((known.run / RECIPE for known in traced if known.run), None)
    section = read_section(recipe, "evaluation", EvaluationArguments) if recipe else EvaluationArguments()
    settings = with_options(section, options)
    tasks = with_completion(settings.tasks)
    local = find_local_files(options.local_data, tasks) if options.local_data else {}
    check_tasks(tasks, local)
    device = choose_device(options.device)

    unique = {known.name: known for known in traced}.values()
    candidates = [open_model(known, functools.partial(load_pair, known.source)) for known in unique]
    baseline, stands_in = _add_baseline(candidates, settings.baseline)
    positions = {one.name: one.positions for one in candidates}
    trained = {one.name: one.known.window(one.positions) for one in candidates}
    max_length = common_window(settings.max_length, trained, positions, insist=options.max_length is not None)
    output = options.output_dir or default_output_dir(traced[0], smoke_test=options.limit is not None)
    check_output(output)
    run_settings = Settings(
        max_length=max_length,
        batch_size=options.batch_size or (4 if device == "cpu" else 32),
        seed=SEED,
        device=device,
        limit=options.limit,
    )
    scores = _score_all(candidates, tasks, local, run_settings, output, cached=not options.no_cache)
    columns = [_column(one) for one in candidates]
    if stands_in is not None:
        baseline = _add_published(stands_in, max_length, scores, columns)
    judged = candidates if options.limit is None else []
    warnings = [line for one in judged for line in published.check(one.known.source, max_length, scores[one.name])]
    about = dataclasses.asdict(run_settings) | run_metadata("bash evaluate.sh", argv)
    comparison = compare(scores, baseline, models=columns, warnings=warnings, **about)
    _write(comparison, output, candidates)


def _column(model: LoadedModel) -> ComparedModel:
    known = model.known
    return ComparedModel(model.name, known.source, model.parameters, known.tokens_trained, model.revision)


def _score_all(
    candidates: Sequence[LoadedModel],
    tasks: list[str],
    local: Mapping[str, Path],
    settings: Settings,
    output: Path,
    *,
    cached: bool,
) -> dict[str, list[TaskScores]]:
    """Return the scores of each model by its name. Other evaluations may run at the same time: task files are private."""
    with tempfile.TemporaryDirectory(prefix="tasks-") as folder:
        task_files = write_task_files(local, Path(folder), tasks)
        benchmark = Benchmark(tasks, Path(folder), task_files, settings=settings)
        cache = Cache(FOLDER, dataclasses.asdict(settings)) if cached else None
        return {one.name: score(one, benchmark, cache, output / "lm_eval") for one in candidates}


def _add_published(
    source: str, max_length: int, scores: dict[str, list[TaskScores]], columns: list[ComparedModel]
) -> str | None:
    """Add the published numbers of a baseline that could not be loaded. Returns their name, None if there are none."""
    known_scores, by = published.stand_in(source, max_length, scores[columns[0].name])
    if not known_scores:
        told = "nothing is published of %s for these documents in this window: the table has no baseline"
        logger.warning(told, source)
        return None
    name = f"{source} (published)"
    scores[name] = known_scores
    columns.append(ComparedModel(name, source, None, None, published_by=by))
    return name


def _write(comparison: dict[str, Any], output: Path, candidates: Sequence[LoadedModel]) -> None:
    """Write and print the comparison, and add the results to the cards of final models."""
    table = to_markdown(comparison)
    write_whole(output / "comparison.json", json.dumps(comparison, indent=2) + "\n")
    write_whole(output / "comparison.md", table)
    print(f"\n{table}\nWritten: {output / 'comparison.md'}, {output / 'comparison.json'}, {output / 'lm_eval'}/")
    for line in comparison["warnings"]:
        logger.error(line)
    for one in candidates:
        add_results(one.known, comparison)


def check_output(folder: Path) -> None:
    """Raise UserError if `folder` holds a comparison.json or comparison.md that evaluate.sh did not write."""
    names = [name for name in ("comparison.json", "comparison.md") if (folder / name).exists()]
    if names and "rows" not in read_object(folder / "comparison.json"):
        raise UserError(
            f"{folder / names[0]} is damaged or was not written by evaluate.sh. Delete it or pass another --output_dir."
        )


def _add_baseline(candidates: list[LoadedModel], name: str) -> tuple[str | None, str | None]:
    """Open the baseline beside the others; its name, and the Hub id that published numbers have to stand in for."""
    from gpt2_repro.model.export import load_pair

    if name == "none":
        return None, None
    if name == UNTRAINED:
        first = candidates[0].known
        like = dataclasses.replace(first, name=UNTRAINED, source=UNTRAINED, record=TrainingRecord())
        candidates.append(open_model(like, functools.partial(_load_untrained, first.source)))
        return UNTRAINED, None
    known = resolve_checkpoint(name)
    if known.name in [one.name for one in candidates]:
        return known.name, None
    try:
        candidates.append(open_model(known, functools.partial(load_pair, known.source)))
    except UserError as error:
        if name in published.NUMBERS and not Path(name).exists():
            logger.warning("%s; its published numbers stand in for it, without a test of the difference", error)
            return None, name
        raise UserError(f"{error}; --baseline none leaves it out") from None
    return known.name, None


def _load_untrained(source: str) -> tuple[Any, Any]:
    """The same model with fresh weights."""
    from gpt2_repro.model.export import load_pair, untrained_like

    model, tokenizer = load_pair(source)
    return untrained_like(model, seed=SEED), tokenizer


if __name__ == "__main__":
    run(main)
