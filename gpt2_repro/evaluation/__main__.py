"""Score checkpoints and a baseline with lm-evaluation-harness.

All models are scored under the same settings. The result is one comparison table.

bash evaluate.sh runs/gpt2_124m                                   compare final/ with openai-community/gpt2
bash evaluate.sh runs/gpt2_124m/checkpoint-5000 runs/gpt2_124m --tasks hellaswag lambada_openai
bash evaluate.sh runs/gpt2_124m/checkpoint-* runs/gpt2_124m --baseline none          scores of each checkpoint
bash evaluate.sh runs/gpt2_124m --follow                                  score each checkpoint while the run trains
bash evaluate.sh openai-community/gpt2 --baseline none --limit 20
bash evaluate.sh runs/demo --local_data data/demo --tasks last_word document_perplexity --baseline untrained
bash evaluate.sh runs/a-seed1 runs/a-seed2 runs/b-seed1 runs/b-seed2 --baseline runs/a-seed1 --suite standard
bash evaluate.sh runs/gpt2_124m --bits_per_byte texts/                    bits per byte of each file and folder in texts/
"""

import argparse
import dataclasses
import functools
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpt2_repro import cli
from gpt2_repro.errors import BadCheckpoint, UserError
from gpt2_repro.evaluation import output
from gpt2_repro.evaluation.arguments import arguments_of_run, options_of_scores, override_arguments, parse_options
from gpt2_repro.evaluation.comparison import UNTRAINED, ComparedModel, Comparison, EvaluationSettings
from gpt2_repro.evaluation.core import core_score
from gpt2_repro.evaluation.follow import follow
from gpt2_repro.evaluation.harness import choose_devices, score_models
from gpt2_repro.evaluation.models import OpenedModel, common_window, load_untrained, open_model
from gpt2_repro.evaluation.overlap import add_clean, overlapping_documents, training_data
from gpt2_repro.evaluation.scores import ScoredModel, compare, join_seeds
from gpt2_repro.evaluation.tasks import open_tasks
from gpt2_repro.launchers import EVALUATE, forget_variables
from gpt2_repro.model.checkpoint import Checkpoint, resolve_checkpoint
from gpt2_repro.run_record.environment import TrainingRecord


SEED = 1234

logger = logging.getLogger("gpt2_repro.evaluation")


def main(argv: list[str]) -> Comparison | None:
    """Score checkpoints and the baseline, and write and return the table. With --follow, return None."""
    forget_variables()
    options = parse_options(argv, description=__doc__)
    if options.follow:
        _follow(options, argv)
        return None
    by_name: dict[str, Checkpoint] = {}  # each once
    for name in options.checkpoints:
        checkpoint = resolve_checkpoint(name, unfinished=True)
        by_name[checkpoint.name] = checkpoint
    checkpoints = list(by_name.values())
    output_dir = options.output_dir
    if output_dir is None:
        is_test = options.limit is not None
        output_dir = output.default_output_dir(checkpoints[0], smoke_test=is_test)
    return _evaluate(options, argv, checkpoints, output_dir)


def _follow(options: argparse.Namespace, argv: list[str]) -> None:
    """Score the checkpoints of a run while it trains."""
    if len(options.checkpoints) > 1:
        raise UserError("--follow needs one run directory or place.")
    source = options.checkpoints[0]
    if not options.baseline:
        options.baseline = "none"
    if not options.device and Path(source).exists():
        options.device = "cpu"  # the run may need the memory of the GPU

    def score(checkpoint: Checkpoint, folder: Path) -> None:
        _evaluate(options, argv, [checkpoint], folder)

    follow(source, options.output_dir, score, options_of_scores(options))


def _evaluate(
    options: argparse.Namespace, argv: list[str], checkpoints: list[Checkpoint], output_dir: Path
) -> Comparison:
    """Score checkpoints and the baseline, write the results to `output_dir`, and return them."""
    # --- What to score
    run_directory = _run_of(checkpoints)
    arguments = override_arguments(arguments_of_run(run_directory), options)
    reference = _find_baseline(arguments.baseline, checkpoints[0])
    prepared = None
    if options.check_overlap:
        prepared = training_data(run_directory)
    devices = choose_devices(options.device, options.processes)
    device = devices[0]
    if len(devices) > 1:
        device = device.partition(":")[0]
    batch_size = options.batch_size
    if batch_size is None:
        batch_size = 1 if device == "cpu" else 32
    # A temporary folder, so that several evaluations can run at the same time.
    with tempfile.TemporaryDirectory(prefix="evaluation-") as folder:
        tasks = open_tasks(options, arguments.tasks, run_directory, Path(folder))
        models, baseline = _open_models(checkpoints, reference)
        is_explicit = options.max_length is not None
        settings = EvaluationSettings(
            max_length=common_window(models, arguments.max_length, explicit=is_explicit),
            batch_size=batch_size,
            seed=SEED,
            device=device,
            limit=options.limit,
        )
        output.create_output_folder(output_dir)

        # --- Scores
        scored = score_models(models, tasks, settings, devices, output_dir / "lm_eval", cached=not options.no_cache)

        # --- Table
        settings_of = {model.column.name: model.setting for model in models}
        seed_keys = {model.column.name: model.seed_key for model in models}

        def write_table(flagged: set[str] | None = None) -> Comparison:
            columns: list[ScoredModel] = []
            for column, metrics in scored:
                core = core_score(metrics, tasks.of_core)
                columns.append((column, add_clean(metrics, flagged or ()) + core))
            columns = join_seeds(columns, settings_of, seed_keys)
            base = _joined_column(baseline, columns)
            metadata = output.run_metadata(EVALUATE, argv)
            comparison = compare(columns, base, settings, metadata, flagged)
            table = output.comparison_markdown(comparison)
            print(f"\n{table}")  # first, because the scores took hours and the disk may be full
            print(output.write_results(output_dir, "comparison", comparison.to_json(), table))
            output.delete_tables(output_dir)
            if options.table:
                print(output.write_table(output_dir, comparison, options.table))
            return comparison

        comparison = write_table()  # before the search for overlaps, which takes minutes
        if prepared:
            comparison = write_table(overlapping_documents(prepared, tasks))
        return comparison


def _run_of(checkpoints: Sequence[Checkpoint]) -> Path | None:
    """Return the run of the first checkpoint that belongs to one."""
    for checkpoint in checkpoints:
        if checkpoint.run_directory:
            return checkpoint.run_directory
    return None


def _joined_column(model: ComparedModel | None, columns: Sequence[ScoredModel]) -> ComparedModel | None:
    """Return the column of a model, or of the mean over seeds that contains it."""
    if model is None:
        return None
    column_of: dict[str, ComparedModel] = {}
    for column, _ in columns:
        column_of[column.name] = column
        for name in column.seeds:
            column_of[name] = column
    return column_of[model.name]


def _find_baseline(name: str, first: Checkpoint) -> Checkpoint | None:
    if name == UNTRAINED:
        return dataclasses.replace(first, name=UNTRAINED, source=UNTRAINED, record=TrainingRecord())
    if name == "none":
        return None
    return resolve_checkpoint(name, unfinished=True)


def _open_models(
    checkpoints: list[Checkpoint], reference: Checkpoint | None
) -> tuple[list[OpenedModel], ComparedModel | None]:
    """Return all models to score, and the baseline's properties for the table (None without a baseline)."""
    models = [_open_model(checkpoint) for checkpoint in checkpoints]
    if reference is None:
        return models, None
    columns = {model.column.name: model.column for model in models}
    if reference.name not in columns:
        opened = _open_baseline(reference, checkpoints[0].source)
        models.append(opened)
        columns[reference.name] = opened.column
    settings = {model.setting for model in models}
    if len(settings) == 1:
        logger.warning("The baseline and all models are one column, so the table has no differences.")
    return models, columns[reference.name]


def _open_baseline(reference: Checkpoint, source: str) -> OpenedModel:
    """Load the baseline. An untrained one has the architecture of `source`."""
    load = None
    if reference.name == UNTRAINED:
        load = functools.partial(load_untrained, source, SEED)
    try:
        return open_model(reference, load)
    except UserError as error:
        raise UserError(f"{error} To score without a baseline, pass --baseline none.") from None


def _open_model(checkpoint: Checkpoint) -> OpenedModel:
    try:
        return open_model(checkpoint)
    except UserError as error:
        raise BadCheckpoint(str(error)) from None


if __name__ == "__main__":
    cli.run(main)
