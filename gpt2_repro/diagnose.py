"""Show where the losses of a run and a baseline differ.

python -m gpt2_repro.diagnose runs/gpt2_124m                                 compared with openai-community/gpt2
python -m gpt2_repro.diagnose runs/a --baseline runs/b --local_data tasks/   compared with another run, offline
python -m gpt2_repro.diagnose somebody/gpt2-small --dataset_dir data/fineweb-10bt
"""

import dataclasses
import logging
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2_repro import cli
from gpt2_repro.batch_plan import TokenCount
from gpt2_repro.cli import CommandParser
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation import diagnosis_rows
from gpt2_repro.evaluation.arguments import arguments_of_run
from gpt2_repro.evaluation.comparison import diagnosis_tables
from gpt2_repro.evaluation.diagnosis_rows import TASKS, Domain
from gpt2_repro.evaluation.diagnosis_tables import loss_tables
from gpt2_repro.evaluation.harness import choose_device
from gpt2_repro.evaluation.models import common_window, open_model
from gpt2_repro.evaluation.output import check_output, default_output_dir, run_metadata, write_results
from gpt2_repro.evaluation.tasks import evenly, find_local_files
from gpt2_repro.files import to_json
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.checkpoint import resolve_checkpoint
from gpt2_repro.tokenization import is_same


SHORTEST_WINDOW, LONGEST_WINDOW = 16, 1024
COUNTED_TOKENS = 10_000_000  # training tokens that are counted for the token frequencies

Counts = NDArray[np.int64]  # occurrences of each token id [vocabulary]
logger = logging.getLogger("gpt2_repro.diagnose")


def main(argv: list[str]) -> None:
    """Score two models on the same tokens, and write tables of their losses."""
    options = _parse(argv)
    checkpoint = resolve_checkpoint(options.run)
    baseline = resolve_checkpoint(_baseline(options.baseline, checkpoint.run))
    # Imported after the checks, so that mistakes are reported before the slow imports.
    from gpt2_repro.model.export import load_tokenizer

    tokenizer = load_tokenizer(checkpoint.source)
    _check_vocabulary(load_tokenizer(baseline.source), tokenizer, f"--baseline {baseline.name}")
    dataset_dir = options.dataset_dir or _data_of_run(checkpoint.run)
    device = choose_device(options.device)
    models = [open_model(checkpoint), open_model(baseline)]
    # Positions that a model was not trained on are scored too, so that the tables show them.
    longest = min(LONGEST_WINDOW, *(model.positions for model in models))
    window = common_window(models, options.max_length or longest, explicit=True)
    domains, counts = _read_texts(dataset_dir, options, tokenizer)
    rows = diagnosis_rows.rows_to_score(domains, tokenizer, window=window, tokens=options.tokens)
    output = options.output_dir or default_output_dir(checkpoint) / "diagnosis"
    check_output(output)
    losses = [diagnosis_rows.score_rows(one.load()[0], rows, device=device, name=one.name) for one in models]
    tables = loss_tables(rows, losses, names=[domain.name for domain in domains], window=window, counts=counts)
    diagnosis = {
        "models": [{key: getattr(model.column, key) for key in ("name", "source", "revision")} for model in models],
        "window": window,
        "tokens_per_domain": options.tokens,
        "dtype": "float32",
        "device": device,
        "frequencies_of": "these texts" if counts is None else "the training text",
        **{name: list(map(dataclasses.asdict, buckets)) for name, buckets in tables.items()},
        **run_metadata("python -m gpt2_repro.diagnose", argv),
    }
    table = diagnosis_markdown(diagnosis)
    print(f"\n{table}")  # first, so that it is shown even if it cannot be written
    print(write_results(output, "diagnosis", to_json(diagnosis, indent=2) + "\n", table))


def _data_of_run(run: Path | None) -> Path | None:
    """Return a run's prepared folder, or None if it is unknown or does not exist."""
    name = RunRecord(run).recipe().get("data", {}).get("dataset_dir") if run else None
    if not run or not name or not Path(name).is_dir():
        return None
    RunRecord(run).check_data(Path(name), "--dataset_dir")
    return Path(name)


def _parse(argv: list[str]) -> Namespace:
    parser = CommandParser(prog="python -m gpt2_repro.diagnose", description=__doc__)
    own = "RUN/evaluation/diagnosis for a run that can be written, otherwise evaluations/MODEL/diagnosis"
    for name, kind, metavar, text in (
        ("run", str, "RUN", "Model to diagnose: run directory (final/ is used), checkpoint-N/, final/ or Hub id."),
        (
            "--baseline",
            str,
            None,
            "Model with the tokenizer of RUN. (default: the recipe's, or openai-community/gpt2)",
        ),
        ("--dataset_dir", Path, "DIR", "Prepared folder with validation text. (default for a run: the run's data)"),
        ("--local_data", Path, "DIR", "Folder of wikitext and LAMBADA .jsonl files."),
        ("--max_length", int, None, f"Context in tokens. (default: {LONGEST_WINDOW}, or the positions of a model)"),
        ("--output_dir", Path, "DIR", f"Folder for the results. (default: {own})"),
        ("--device", str, "D", "cpu, cuda or cuda:N. (default: first GPU, otherwise cpu)"),
    ):
        parser.add_argument(name, type=kind, metavar=metavar, help=text)
    tokens = "Number of tokens to score in each text. (default: %(default)s)"
    parser.add_argument("--tokens", type=TokenCount, default=262_144, help=tokens)
    options = parser.parse(argv)
    if options.tokens < 1 or (options.max_length is not None and options.max_length < SHORTEST_WINDOW):
        raise UserError(f"--tokens must be at least 1 and --max_length at least {SHORTEST_WINDOW}.")
    return options


def _check_vocabulary(tokenizer: Any, expected: Any, option: str) -> None:
    if not is_same(tokenizer, expected):
        fix = "Pass a model or data with this tokenizer, or run bash evaluate.sh, which compares bits per byte."
        raise UserError(f"{option} does not have the tokenizer of RUN, so losses per token cannot be compared. {fix}")


def _baseline(passed: str | None, run: Path | None) -> str:
    """Return the baseline from the command line, or else from the run's recipe."""
    baseline = passed or arguments_of_run(run).baseline
    if baseline in ("none", "untrained"):
        raise UserError(f"The baseline is {baseline!r}. Pass a trained model with the tokenizer of RUN as --baseline.")
    return baseline


def _read_texts(folder: Path | None, options: Namespace, tokenizer: Any) -> tuple[list[Domain], Counts | None]:
    """Return the texts to score, and the count of each token id in the training rows.

    The counts are None if `folder` (the prepared data) is None.
    """
    domains, counts = _read_prepared(folder, tokenizer, options.tokens) if folder else ([], None)
    if not folder:
        logger.warning("No prepared folder found. Pass --dataset_dir DIR to also score validation text.")
    local = find_local_files(options.local_data, TASKS) if options.local_data else {}
    for task in TASKS:
        try:
            domains.append(diagnosis_rows.read_task(task, local.get(task), tokenizer))
        except UserError as error:
            if task in local:
                raise
            logger.warning("The text %s is skipped. %s Pass --local_data DIR to read a file.", task, error)
    if not any(len(ids) > 1 for domain in domains for ids in domain.documents):
        raise UserError("No text to score. Pass --dataset_dir PREPARED_FOLDER or --local_data FOLDER.")
    return domains, counts


def _read_prepared(folder: Path, tokenizer: Any, tokens: int) -> tuple[list[Domain], Counts]:
    from gpt2_repro.data.prepared import PreparedData

    data = PreparedData.read(folder)
    _check_vocabulary(data.tokenizer, tokenizer, f"--dataset_dir {folder}")
    separator = None if data.manifest.form.separator == "none" else tokenizer.eos_token_id
    domains = []
    for name, rows in data.validation().items():
        label = f"validation {name}" if name else "validation text"
        spread = _spread(rows, tokens)
        domains.append(diagnosis_rows.domain_of_rows(label, spread, tokenizer, separator=separator))
    ids = np.concatenate(_spread(data.rows("train"), COUNTED_TOKENS))
    return domains, np.bincount(ids, minlength=len(tokenizer))


def _spread(rows: Any, tokens: int) -> list[diagnosis_rows.Ids]:
    """Select evenly spaced items of `rows` with about `tokens` targets in total."""
    count = -(-len(rows) * tokens // max(1, int((rows.lengths() - 1).sum())))
    return [row["input_ids"] for row in rows.__getitems__(evenly(range(len(rows)), count))]


def diagnosis_markdown(diagnosis: Mapping[str, Any]) -> str:
    """Return the text of diagnosis.md: tables and measurement conditions."""
    name, baseline = (model["name"] for model in diagnosis["models"])
    parts = [f"# {name} compared with {baseline}"]
    for title, table in diagnosis_tables(diagnosis).items():
        parts += [f"## {title}", table.markdown()]
    versions = ", ".join(f"{library} {version}" for library, version in diagnosis["versions"].items())
    notes = [
        "Losses are in nats per token. ± is the paired standard error of the difference, computed over the documents. "
        f"Window: {diagnosis['window']:,} tokens, {diagnosis['dtype']}, {diagnosis['device']}. Token frequencies are "
        f"counted in {diagnosis['frequencies_of']}",
        "No start token is placed before the texts, except in the table with a start token",
        *(f"{model['name']}: {model['source']}, hash {model['revision'][:12]}" for model in diagnosis["models"]),
        f"{versions}; {diagnosis['date']}: `{diagnosis['command']}`",
        "How to read the tables: docs/lambada.md",
    ]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in notes)]) + "\n"


if __name__ == "__main__":
    cli.run(main)
