"""Score checkpoints and a baseline with lm-evaluation-harness, by one command for all, and write one table.

bash evaluate.sh runs/gpt2_124m                                   its final/ beside openai-community/gpt2
bash evaluate.sh runs/gpt2_124m/checkpoint-5000 runs/gpt2_124m --tasks hellaswag lambada_openai
bash evaluate.sh openai-community/gpt2 --baseline none --limit 20
bash evaluate.sh runs/demo --local_data data/demo --tasks last_word document_perplexity --baseline untrained
"""

import dataclasses
import json
import logging
from typing import Any

from gpt2_repro.entry import run
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.arguments import EvaluationArguments, parse_options, with_options
from gpt2_repro.evaluation.comparison import ComparedModel, compare
from gpt2_repro.evaluation.harness import choose_device, evaluate_model
from gpt2_repro.evaluation.provenance import Provenance, common_window, default_output_dir, file_name, trace
from gpt2_repro.evaluation.stamp import stamp
from gpt2_repro.evaluation.table import to_markdown
from gpt2_repro.evaluation.tasks import check_tasks, find_local_files, write_task_files
from gpt2_repro.files import write_whole
from gpt2_repro.recipe import read_section


SEED = 1234

logger = logging.getLogger("gpt2_repro.evaluation")


def main(argv: list[str]) -> None:
    options = parse_options(argv, description=__doc__)
    # Below the options, so that --help and a mistyped option need not wait for torch.
    from gpt2_repro.model.export import resolve_checkpoint

    traced = [trace(resolve_checkpoint(checkpoint)) for checkpoint in options.checkpoints]
    recipe = next((known.run / "recipe.yaml" for known in traced if known.run), None)
    section = read_section(recipe, "evaluation", EvaluationArguments) if recipe else EvaluationArguments()
    settings = with_options(section, options)
    local = find_local_files(options.local_data, settings.tasks) if options.local_data else {}
    check_tasks(settings.tasks, local)
    baseline = None if settings.baseline == "none" else settings.baseline
    if baseline not in (None, "untrained"):
        traced.append(trace(resolve_checkpoint(baseline)))
        baseline = traced[-1].name
    device = choose_device(options.device)
    batch_size = options.batch_size or (4 if device == "cpu" else 32)

    models = _load(traced, baseline)
    windows = {known.name: known.window(model.config.max_position_embeddings) for known, model, _ in models}
    max_length = common_window(settings.max_length, windows)
    output = options.output_dir or default_output_dir(traced[0])
    task_folder = output / "tasks" if local else None
    if task_folder:
        write_task_files(options.local_data, task_folder, settings.tasks)
    results = {}
    for known, model, tokenizer in models:
        logger.info("%s: %s on %s", known.name, ", ".join(settings.tasks), device)
        results[known.name] = evaluate_model(
            model,
            tokenizer,
            tasks=settings.tasks,
            task_folder=task_folder,
            max_length=max_length,
            batch_size=batch_size,
            device=device,
            limit=options.limit,
            seed=SEED,
        )
        write_whole(output / "lm_eval" / file_name(known.name, ".json"), json.dumps(results[known.name], indent=2))

    columns = [ComparedModel(of.name, of.source, model.num_parameters(), of.tokens_trained) for of, model, _ in models]
    comparison = compare(results, baseline, models=columns, max_length=max_length, limit=options.limit, **stamp(argv))
    table = to_markdown(comparison)
    write_whole(output / "comparison.json", json.dumps(comparison, indent=2) + "\n")
    write_whole(output / "comparison.md", table)
    print(f"\n{table}\nWritten: {output / 'comparison.md'}, {output / 'comparison.json'}, {output / 'lm_eval'}/")


def _load(traced: list[Provenance], baseline: str | None) -> list[tuple[Provenance, Any, Any]]:
    """Each model once, with its tokenizer; the untrained one is the first again, with fresh weights."""
    from gpt2_repro.model.export import load_model, load_tokenizer, untrained_like

    models = []
    for known in {known.name: known for known in traced}.values():
        try:
            models.append((known, load_model(known.source), load_tokenizer(known.source)))
        except UserError as error:
            raise UserError(
                f"{error}" + ("; --baseline none leaves it out" if known.name == baseline else "")
            ) from None
    if baseline == "untrained":
        first, model, tokenizer = models[0]
        known = dataclasses.replace(first, name=baseline, source=baseline, tokens_trained=0)
        models.append((known, untrained_like(model, seed=SEED), tokenizer))
    return models


if __name__ == "__main__":
    run(main)
