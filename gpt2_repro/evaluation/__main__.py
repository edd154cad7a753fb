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

from gpt2_repro.cli import run
from gpt2_repro.comparison import to_markdown
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation import published
from gpt2_repro.evaluation.arguments import EvaluationArguments, override_section, parse_options
from gpt2_repro.evaluation.compare import ComparedModel, compare
from gpt2_repro.evaluation.harness import EvaluationSettings, choose_device
from gpt2_repro.evaluation.models import (
    CheckpointInfo,
    EvaluatedModel,
    common_window,
    expand_checkpoints,
    inspect_checkpoint,
    open_model,
)
from gpt2_repro.evaluation.output import command_metadata, default_output_dir
from gpt2_repro.evaluation.scores import TaskScores
from gpt2_repro.evaluation.scoring import FOLDER, Benchmark, Cache, score
from gpt2_repro.evaluation.tasks import check_tasks, find_local_files, with_completion, write_task_files
from gpt2_repro.files import read_object, write_whole
from gpt2_repro.model_card import add_results
from gpt2_repro.recipe import read_section
from gpt2_repro.run_record.layout import FINAL, RECIPE


SEED = 1234
UNTRAINED = "untrained"

logger = logging.getLogger("gpt2_repro.evaluation")


def main(argv: list[str]) -> None:
    options = parse_options(argv, description=__doc__)
    # Below the options, so that --help and a mistyped option need not wait for torch.
    from gpt2_repro.model.export import load_pair, resolve_checkpoint

    named = [path for name in options.checkpoints for path in expand_checkpoints(name, every=options.all_checkpoints)]
    checkpoints = [inspect_checkpoint(resolve_checkpoint(checkpoint)) for checkpoint in named]
    recipe = next((checkpoint.run / RECIPE for checkpoint in checkpoints if checkpoint.run), None)
    section = read_section(recipe, "evaluation", EvaluationArguments) if recipe else EvaluationArguments()
    settings = override_section(section, options)
    tasks = with_completion(settings.tasks)
    local = find_local_files(options.local_data, tasks) if options.local_data else {}
    check_tasks(tasks, local)
    device = choose_device(options.device)

    unique = {checkpoint.name: checkpoint for checkpoint in checkpoints}.values()
    candidates = [open_model(checkpoint, functools.partial(load_pair, checkpoint.source)) for checkpoint in unique]
    baseline, published_id = _add_baseline(candidates, settings.baseline)
    positions = {one.name: one.positions for one in candidates}
    trained = {one.name: one.checkpoint.window(one.positions) for one in candidates}
    max_length = common_window(settings.max_length, trained, positions, insist=options.max_length is not None)
    output = options.output_dir or default_output_dir(checkpoints[0], smoke_test=options.limit is not None)
    check_output(output)
    run_settings = EvaluationSettings(
        max_length=max_length,
        batch_size=options.batch_size or (4 if device == "cpu" else 32),
        seed=SEED,
        device=device,
        limit=options.limit,
    )
    scores = _score_all(candidates, tasks, local, run_settings, output, cached=not options.no_cache)
    columns = [_column(one) for one in candidates]
    if published_id is not None:
        baseline = _add_published(published_id, max_length, scores, columns)
    judged = candidates if options.limit is None else []
    warnings = [line for m in judged for line in published.find_deviations(m.source, max_length, scores[m.name])]
    about = dataclasses.asdict(run_settings) | command_metadata("bash evaluate.sh", argv)
    comparison = compare(scores, baseline, models=columns, warnings=warnings, **about)
    _write(comparison, output, candidates)


def _column(model: EvaluatedModel) -> ComparedModel:
    checkpoint = model.checkpoint
    return ComparedModel(model.name, checkpoint.source, model.parameters, checkpoint.tokens_trained, model.revision)


def _score_all(
    candidates: Sequence[EvaluatedModel],
    tasks: list[str],
    local: Mapping[str, Path],
    settings: EvaluationSettings,
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
    found_scores, by = published.published_scores(source, max_length, scores[columns[0].name])
    if not found_scores:
        told = "nothing is published of %s for these documents in this window: the table has no baseline"
        logger.warning(told, source)
        return None
    name = f"{source} (published)"
    scores[name] = found_scores
    columns.append(ComparedModel(name, source, None, None, published_by=by))
    return name


def _write(comparison: dict[str, Any], output: Path, candidates: Sequence[EvaluatedModel]) -> None:
    """Write and print the comparison, and add the results to the cards of final models."""
    table = to_markdown(comparison)
    write_whole(output / "comparison.json", json.dumps(comparison, indent=2) + "\n")
    write_whole(output / "comparison.md", table)
    print(f"\n{table}\nWritten: {output / 'comparison.md'}, {output / 'comparison.json'}, {output / 'lm_eval'}/")
    for line in comparison["warnings"]:
        logger.error(line)
    for one in candidates:
        if one.checkpoint.run and Path(one.checkpoint.source).name == FINAL:
            add_results(Path(one.checkpoint.source), one.checkpoint.record, comparison, one.name)


def check_output(folder: Path) -> None:
    """Raise UserError if `folder` holds a comparison.json or comparison.md that evaluate.sh did not write."""
    names = [name for name in ("comparison.json", "comparison.md") if (folder / name).exists()]
    if names and "rows" not in read_object(folder / "comparison.json"):
        raise UserError(
            f"{folder / names[0]} is damaged or was not written by evaluate.sh. Delete it or pass another --output_dir."
        )


def _add_baseline(candidates: list[EvaluatedModel], name: str) -> tuple[str | None, str | None]:
    """Open the baseline beside the others; its name, and the Hub id that published numbers have to stand in for."""
    from gpt2_repro.model.export import load_pair, resolve_checkpoint

    if name == "none":
        return None, None
    if name == UNTRAINED:
        first = candidates[0].checkpoint
        like = dataclasses.replace(first, name=UNTRAINED, source=UNTRAINED, record={"tokens": 0})
        candidates.append(open_model(like, functools.partial(_load_untrained, first.source)))
        return UNTRAINED, None
    checkpoint: CheckpointInfo = inspect_checkpoint(resolve_checkpoint(name))
    if checkpoint.name in [one.name for one in candidates]:
        return checkpoint.name, None
    try:
        candidates.append(open_model(checkpoint, functools.partial(load_pair, checkpoint.source)))
    except UserError as error:
        if name in published.NUMBERS and not Path(name).exists():
            logger.warning("%s; its published numbers stand in for it, without a test of the difference", error)
            return None, name
        raise UserError(f"{error}; --baseline none leaves it out") from None
    return checkpoint.name, None


def _load_untrained(source: str) -> tuple[Any, Any]:
    """The same model with fresh weights."""
    from gpt2_repro.model.export import load_pair, untrained_like

    model, tokenizer = load_pair(source)
    return untrained_like(model, seed=SEED), tokenizer


if __name__ == "__main__":
    run(main)
