"""Score checkpoints and a baseline with lm-evaluation-harness.

All models are scored under the same settings. The result is one comparison table.

bash evaluate.sh runs/gpt2_124m                                   compare final/ with openai-community/gpt2
bash evaluate.sh runs/gpt2_124m/checkpoint-5000 runs/gpt2_124m --tasks hellaswag lambada_openai
bash evaluate.sh runs/gpt2_124m --all_checkpoints --baseline none         scores of each checkpoint
bash evaluate.sh openai-community/gpt2 --baseline none --limit 20
bash evaluate.sh runs/demo --local_data data/demo --tasks last_word document_perplexity --baseline untrained
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from gpt2_repro import cli
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation import output
from gpt2_repro.evaluation.arguments import arguments_of_run, override_arguments, parse_options
from gpt2_repro.evaluation.comparison import ComparedModel, EvaluationSettings
from gpt2_repro.evaluation.harness import choose_device, fetch_data, score_models
from gpt2_repro.evaluation.models import LoadedModel, common_window, open_model
from gpt2_repro.evaluation.references import SCORES
from gpt2_repro.evaluation.scores import compare, published_baseline
from gpt2_repro.evaluation.tasks import check_tasks, find_local_files, own_documents, with_completion
from gpt2_repro.launchers import forget_variables
from gpt2_repro.run_record.checkpoint import Checkpoint, all_checkpoints, resolve_checkpoint
from gpt2_repro.run_record.environment import TrainingRecord


SEED = 1234
UNTRAINED = "untrained"

logger = logging.getLogger("gpt2_repro.evaluation")


def main(argv: list[str]) -> None:
    """Score checkpoints and the baseline, and write the table (called by evaluate.sh)."""
    forget_variables()
    options = parse_options(argv, description=__doc__)
    checkpoints: dict[str, Checkpoint] = {}
    for name in options.checkpoints:
        every = all_checkpoints(name) if options.all_checkpoints else [resolve_checkpoint(name, unfinished=True)]
        checkpoints |= {checkpoint.name: checkpoint for checkpoint in every}
    first = next(iter(checkpoints.values()))
    run = next((checkpoint.run for checkpoint in checkpoints.values() if checkpoint.run), None)
    arguments = override_arguments(arguments_of_run(run), options)
    tasks = with_completion(arguments.tasks)
    folder = options.local_data or own_documents(run, tasks)
    local = find_local_files(folder, tasks) if folder else {}
    check_tasks(tasks, local)
    if from_hub := [task for task in tasks if task not in local]:
        fetch_data(from_hub)
    device = choose_device(options.device)
    models = [open_model(checkpoint) for checkpoint in checkpoints.values()]
    baseline = _open_baseline(arguments.baseline, first, models)
    window = common_window(models, arguments.max_length, explicit=options.max_length is not None)
    sizes = {"max_length": window, "batch_size": options.batch_size or (4 if device == "cpu" else 32)}
    settings = EvaluationSettings(**sizes, seed=SEED, device=device, limit=options.limit)
    output_dir = options.output_dir or output.default_output_dir(first, smoke_test=options.limit is not None)
    output.check_output(output_dir)

    scored = score_models(models, tasks, local, settings, output_dir / "lm_eval", cached=not options.no_cache)
    if not baseline and (published := published_baseline(arguments.baseline, window, scored[0][1])):
        baseline = published[0]
        scored.append(published)
    comparison = compare(scored, baseline, settings, output.run_metadata("bash evaluate.sh", argv))
    table = output.comparison_markdown(comparison)
    print(f"\n{table}")  # first, because the scores took hours and the disk may be full
    print(output.write_results(output_dir, "comparison", comparison.to_json(), table))
    for line in comparison.warnings:
        logger.error(line)


def _open_baseline(name: str, first: Checkpoint, models: list[LoadedModel]) -> ComparedModel | None:
    """Return the baseline's properties for the comparison table.

    Add the baseline to `models` if `models` does not contain it. Return None if `name` is "none", or if only
    published scores are available.
    """
    if name == "none":
        return None
    if name == UNTRAINED:
        checkpoint = dataclasses.replace(first, name=UNTRAINED, source=UNTRAINED, record=TrainingRecord())
        models.append(open_model(checkpoint, lambda: _load_untrained(first.source)))
        logger.info("The baseline is an untrained copy of %s, with random weights.", first.name)
        return models[-1].column
    checkpoint = resolve_checkpoint(name)
    if same := [model.column for model in models if model.column.name == checkpoint.name]:
        if len(models) == 1:
            logger.warning("The baseline is the scored model itself, so the table has no differences.")
        return same[0]
    try:
        models.append(open_model(checkpoint))
    except UserError as error:
        if name in SCORES and not Path(name).exists():
            logger.warning("%s The table compares with published scores, if there are any, without verdicts.", error)
            return None
        raise UserError(f"{error} To score without a baseline, pass --baseline none.") from None
    return models[-1].column


def _load_untrained(source: str) -> tuple[Any, Any]:
    """Return an untrained model with the architecture of `source`, and its tokenizer."""
    from gpt2_repro.model.export import load_pair, untrained_like

    model, tokenizer = load_pair(source)
    return untrained_like(model, seed=SEED), tokenizer


if __name__ == "__main__":
    cli.run(main)
