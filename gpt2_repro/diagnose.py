"""Show where the losses of a run and a baseline differ.

python -m gpt2_repro.diagnose runs/gpt2_124m                                 compared with openai-community/gpt2
python -m gpt2_repro.diagnose runs/a --baseline runs/b --local_data tasks/   compared with another run, offline
python -m gpt2_repro.diagnose somebody/gpt2-small --dataset_dir data/fineweb-10bt
"""

import itertools
import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

from gpt2_repro import cli
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation import diagnosis, output
from gpt2_repro.evaluation.arguments import arguments_of_run
from gpt2_repro.evaluation.comparison import ComparedModel, diagnosis_tables
from gpt2_repro.evaluation.diagnosis import TASKS, Counts, Ids, Losses, check_vocabulary
from gpt2_repro.evaluation.harness import choose_device
from gpt2_repro.evaluation.models import common_window, open_model
from gpt2_repro.evaluation.tasks import find_local_files
from gpt2_repro.files import to_json
from gpt2_repro.model.checkpoint import Checkpoint, resolve_checkpoint
from gpt2_repro.run_record import RunRecord
from gpt2_repro.tokenization import start_id
from gpt2_repro.tokens import TokenCount


LONGEST_WINDOW = 1024

logger = logging.getLogger("gpt2_repro.diagnose")


def main(argv: list[str]) -> None:
    """Score two models on the same tokens, and write tables of their losses."""
    options = _parse(argv)
    checkpoint = resolve_checkpoint(options.run)
    baseline = _baseline(options.baseline or arguments_of_run(checkpoint.run_directory).baseline)
    tokenizer = _common_tokenizer(checkpoint, baseline)
    dataset_dir = options.dataset_dir
    if dataset_dir is None and checkpoint.run_directory is not None:
        dataset_dir = RunRecord(checkpoint.run_directory).data_folder("--dataset_dir")
    device = choose_device(options.device)
    models = [open_model(checkpoint), open_model(baseline)]
    window = options.max_length
    if window is None:
        # Positions that a model was not trained on are scored too, so that the tables show them.
        window = min(LONGEST_WINDOW, models[0].positions, models[1].positions)
    window = common_window(models, window, explicit=True)
    texts, counts = _read_texts(dataset_dir, options, tokenizer)
    rows = diagnosis.cut_rows(texts, window=window, tokens=max(1, options.tokens))
    output_dir = options.output_dir
    if output_dir is None:
        output_dir = output.default_output_dir(checkpoint) / "diagnosis"
    output.create_output_folder(output_dir)
    losses: list[Losses] = []
    for opened in models:
        # Without a variable for the model, so that only one model at a time is in memory.
        losses.append(diagnosis.score_rows(opened.load()[0], rows, device=device, name=opened.column.name))
    frequencies_of = "the training text"
    if counts is None:
        frequencies_of = "these texts"
    tables = diagnosis.loss_tables(
        rows, losses, names=list(texts), window=window, separator=start_id(tokenizer), counts=counts
    )
    result = {
        "models": [_described(opened.column) for opened in models],
        "window": window,
        "tokens_per_domain": options.tokens,
        "dtype": "float32",
        "device": device,
        "frequencies_of": frequencies_of,
        **tables,
        **output.run_metadata("python -m gpt2_repro.diagnose", argv),
    }
    table = output.render("diagnosis.md.j2", tables=diagnosis_tables(result), **result)
    print(f"\n{table}")  # first, so that it is shown even if it cannot be written
    print(output.write_results(output_dir, "diagnosis", to_json(result, indent=2) + "\n", table))


def _parse(argv: list[str]) -> Namespace:
    parser = cli.CommandParser(prog="python -m gpt2_repro.diagnose", description=__doc__)
    parser.add_argument(
        "run", metavar="RUN", help="Run directory (final/ or a newer checkpoint), checkpoint-N/, final/ or Hub id."
    )
    parser.add_argument("--baseline", help="Model with RUN's tokenizer. (default: the recipe's, or GPT-2 124M)")
    parser.add_argument("--dataset_dir", type=Path, metavar="DIR", help="Prepared folder. (default: the run's)")
    parser.add_argument("--local_data", type=Path, metavar="DIR", help="Folder of wikitext and LAMBADA .jsonl files.")
    parser.add_argument(
        "--max_length",
        type=cli.between(16, 10**6),
        help="Context in tokens. (default: 1024, or a model's positions)",
    )
    parser.add_argument("--output_dir", type=Path, metavar="DIR", help="(default: RUN/evaluation/diagnosis)")
    parser.add_argument("--device", metavar="D", help="cpu, cuda, cuda:N or mps. (default: first GPU, otherwise cpu)")
    parser.add_argument("--tokens", type=TokenCount, default=262_144, help="Number of tokens to score in each text.")
    return parser.parse(argv)


def _baseline(name: str) -> Checkpoint:
    if name in ("none", "untrained"):
        raise UserError(f"The baseline is {name!r}. Pass a trained model with the tokenizer of RUN as --baseline.")
    return resolve_checkpoint(name)


def _described(model: ComparedModel) -> dict[str, str]:
    return {
        "name": model.name,
        "source": model.source,
        "revision": model.revision,
    }


def _common_tokenizer(checkpoint: Checkpoint, baseline: Checkpoint) -> Any:
    """Return the tokenizer of two checkpoints, or raise UserError if they differ."""
    from gpt2_repro.model.load import load_tokenizer

    tokenizer = load_tokenizer(checkpoint.source)
    other = load_tokenizer(baseline.source)
    check_vocabulary(other, tokenizer, f"--baseline {baseline.name}")
    if start_id(tokenizer) is None:
        return other  # the tokenizer of a model that was trained without separators has no separator
    return tokenizer


def _read_texts(folder: Path | None, options: Namespace, tokenizer: Any) -> tuple[dict[str, list[Ids]], Counts | None]:
    """Return the texts to score, and the count of each token id in the training rows of `folder`, the prepared data."""
    texts: dict[str, list[Ids]] = {}
    counts: Counts | None = None
    if folder:
        texts, counts = diagnosis.read_prepared(folder, tokenizer, options.tokens)
    else:
        logger.warning("No prepared folder found. Pass --dataset_dir DIR to also score validation text.")
    local: dict[str, Path] = {}
    if options.local_data:
        local = find_local_files(options.local_data, TASKS)
    for task, name in TASKS.items():
        try:
            texts[name] = diagnosis.read_task(task, local.get(task), tokenizer)
        except UserError as error:
            if task in local:
                raise
            logger.warning("The text %s is skipped. %s", task, error)
    documents = itertools.chain.from_iterable(texts.values())
    if not any(len(ids) > 1 for ids in documents):
        raise UserError("No text to score. Pass --dataset_dir PREPARED_FOLDER or --local_data FOLDER.")
    return texts, counts


if __name__ == "__main__":
    cli.run(main)
