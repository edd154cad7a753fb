"""Write the results of an evaluation as JSON and Markdown files."""

import logging
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.comparison import MARGINS, ComparedModel, Comparison, diagnosis_tables
from gpt2_repro.files import read_object, write_whole
from gpt2_repro.run_record.checkpoint import Checkpoint
from gpt2_repro.text import now


logger = logging.getLogger(__name__)

LIBRARIES = ("lm_eval", "transformers", "torch", "datasets")


def default_output_dir(first: Checkpoint, *, smoke_test: bool = False) -> Path:
    """Return the default output folder of an evaluation whose first model is `first`.

    The folder is RUN/evaluation if `first` belongs to a run directory RUN that can be written, otherwise
    evaluations/NAME. For a smoke test, it is the subfolder smoke_test of this folder.
    """
    folder = Path("evaluations") / file_name(first.source)
    if first.run:
        if problem := _why_not_writable(first.run / "evaluation"):
            logger.warning("%s/evaluation cannot be written (%s). The results go to %s.", first.run, problem, folder)
        else:
            folder = first.run / "evaluation"
    return folder / "smoke_test" if smoke_test else folder


def _why_not_writable(folder: Path) -> str | None:
    """Create a folder and try to write there. Return why this fails, or None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror


def file_name(name: str) -> str:
    """Return a model's name as a file name, with unsafe characters replaced."""
    return re.sub(r"[^\w.]+", "-", name).strip("-.")


def run_metadata(command: str, argv: Sequence[str]) -> dict[str, Any]:
    """Return the command line, the time and the versions of libraries."""
    versions = {library: version(library) for library in LIBRARIES}
    return {"date": now(), "command": f"{command} {shlex.join(argv)}", "versions": versions}


def check_output(folder: Path) -> None:
    """Create the folder for the output.

    Raises UserError if the folder cannot be written, or has a comparison that was not written by evaluate.sh. An
    evaluation will overwrite the comparison.
    """
    names = [name for name in ("comparison.json", "comparison.md") if (folder / name).exists()]
    if names and "rows" not in read_object(folder / "comparison.json"):
        raise UserError(f"{folder / names[0]} was not written by evaluate.sh. Delete it or pass another --output_dir.")
    if problem := _why_not_writable(folder):
        raise UserError(f"{folder} cannot be written ({problem}). Pass another --output_dir.")


def write_results(folder: Path, name: str, data: str, table: str) -> str:
    """Write `name`.json and `name`.md, and return the line to print."""
    write_whole(folder / f"{name}.json", data)
    write_whole(folder / f"{name}.md", table)
    return f"Written: {folder / name}.md, {folder / name}.json"


def comparison_markdown(comparison: Comparison) -> str:
    """Return the comparison as Markdown: warnings, table, and a list of the settings."""
    table, notes = comparison.table().markdown(), "\n".join(f"- {note}" for note in _notes(comparison))
    limit = f"--limit {comparison.limit} scored only the first documents of each task"
    frame = [] if comparison.limit is None else [f"**Not benchmark scores: {limit}.**"]
    return "\n\n".join([*(f"**{line}**" for line in comparison.warnings), *frame, table, *frame, notes]) + "\n"


def _notes(comparison: Comparison) -> list[str]:
    notes = [
        f"Window {comparison.max_length:,} tokens, {comparison.dtype}, batches of {comparison.batch_size}, seed "
        f"{comparison.seed}, {comparison.device} for every model. ± is one standard error",
        *map(_describe, comparison.models),
    ]
    for task, details in comparison.task_details.items():
        version = details.data or "" if details.version is None else f"version {details.version}, "
        documents = f"{details.documents} documents of {details.data}" if details.documents else ""
        notes.append(f"{task}: {version}{documents}")
    if any(difference.verdict for row in comparison.rows for difference in row.difference.values()):
        shown = {row.metric for row in comparison.rows}
        margins = ", ".join(f"{metric} {margin:g}" for metric, margin in MARGINS.items() if metric in shown)
        notes.append(
            "Differences have paired standard errors, on the same documents. matches: the 95 % interval is within the "
            f"margin ({margins}; fractions of the baseline, except accuracies). better, worse: the interval excludes "
            "0. inconclusive: neither of these"
        )
    if "hellaswag" in comparison.tasks:
        notes.append(
            "HellaSwag has three scores. acc ranks lm-eval's rewritten endings by total log-probability, acc_norm per "
            "character. completion ranks the original endings per token, as in llm.c and build-nanogpt"
        )
    end = "These are scores of checkpoints, not of recipes: a run with another seed has different scores"
    return [*notes, _metadata_note(vars(comparison)), end]


def _describe(model: ComparedModel) -> str:
    if model.revision is None:
        return f"{model.name}: not measured here, but published by {'; '.join(model.published_by)}"
    trained = "unknown" if model.tokens_trained is None else f"{model.tokens_trained:,}"
    source = "" if model.source == model.name else f"from {model.source}, "
    end = "" if model.has_separator else ". Its rows have no separator, so the first token of a document is not scored"
    size = f"{model.parameters:,} parameters"
    return f"{model.name}: {size}, tokens trained: {trained}, {source}hash {model.revision[:12]}{end}"


def diagnosis_markdown(diagnosis: Mapping[str, Any]) -> str:
    """Return the text of diagnosis.md: tables and measurement conditions."""
    name, baseline = (model["name"] for model in diagnosis["models"])
    parts = [f"# {name} compared with {baseline}"]
    for title, table in diagnosis_tables(diagnosis).items():
        parts += [f"## {title}", table.markdown()]
    notes = [
        "Losses are in nats per token. ± is the paired standard error of the difference, computed over the documents. "
        f"Window: {diagnosis['window']:,} tokens, {diagnosis['dtype']}, {diagnosis['device']}. Token frequencies are "
        f"counted in {diagnosis['frequencies_of']}",
        "No start token is placed before the texts, except in the table with a start token",
        *(f"{model['name']}: {model['source']}, hash {model['revision'][:12]}" for model in diagnosis["models"]),
        _metadata_note(diagnosis),
        "How to read the tables: docs/lambada.md",
    ]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in notes)]) + "\n"


def _metadata_note(metadata: Mapping[str, Any]) -> str:
    """Return the result of `run_metadata` as text."""
    versions = ", ".join(f"{library} {version}" for library, version in metadata["versions"].items())
    return f"{versions}; {metadata['date']}: `{metadata['command']}`"
