"""Write the results of an evaluation as JSON and Markdown files."""

import logging
import re
import shlex
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2

from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.comparison import Comparison
from gpt2_repro.evaluation.statistics import MARGINS
from gpt2_repro.files import read_object, write_whole
from gpt2_repro.model.checkpoint import Checkpoint
from gpt2_repro.run_record.layout import EVALUATION_FOLDER
from gpt2_repro.text import now


logger = logging.getLogger(__name__)

# Files of the table in other forms, by the value of --table.
TABLES = {"csv": "comparison.csv", "latex": "comparison.tex"}
LIBRARIES = ("lm_eval", "transformers", "torch", "datasets")


def default_output_dir(first: Checkpoint, *, smoke_test: bool = False) -> Path:
    """Return the default output folder of an evaluation whose first model is `first`.

    The folder is RUN/evaluation if `first` belongs to a run directory RUN, otherwise evaluations/NAME. For a smoke
    test, it is the subfolder smoke_test of this folder.
    """
    if first.run_directory:
        folder = first.run_directory / EVALUATION_FOLDER
    else:
        folder = Path("evaluations") / file_name(first.source)
    if smoke_test:
        folder = folder / "smoke_test"
    return folder


def file_name(name: str) -> str:
    """Return a model's name as a file name, with unsafe characters replaced."""
    return re.sub(r"[^\w.]+", "-", name).strip("-.")


def run_metadata(command: str, argv: Sequence[str]) -> dict[str, Any]:
    """Return the command line, the time and the versions of libraries."""
    versions = {library: version(library) for library in LIBRARIES}
    return {
        "date": now(),
        "command": f"{command} {shlex.join(argv)}",
        "versions": versions,
    }


def create_output_folder(folder: Path) -> None:
    """Create the folder for the output.

    Raises UserError if the folder cannot be written, or has a comparison that was not written by evaluate.sh. An
    evaluation will overwrite the comparison.
    """
    if "rows" not in read_object(folder / "comparison.json"):
        for name in ("comparison.json", "comparison.md", *TABLES.values()):
            path = folder / name
            if path.exists():
                raise UserError(f"{path} was not written by evaluate.sh. Delete it or pass another --output_dir.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}). Pass another --output_dir.") from None


def try_write(path: Path, text: str) -> None:
    """Write a file. If this fails, log a warning, because the scores took hours."""
    try:
        write_whole(path, text)
    except OSError as error:
        logger.warning("Could not write %s (%s).", path, error.strerror)


def write_results(folder: Path, name: str, data: str, table: str) -> str:
    """Write `name`.json and `name`.md, and return the line to print."""
    write_whole(folder / f"{name}.json", data)
    write_whole(folder / f"{name}.md", table)
    return f"Written: {folder / name}.md, {folder / name}.json"


def delete_tables(folder: Path) -> None:
    """Delete comparison.csv and comparison.tex of an earlier evaluation, which have its scores."""
    for name in TABLES.values():
        (folder / name).unlink(missing_ok=True)


def write_table(folder: Path, comparison: Comparison, form: str) -> str:
    """Write the table in a form of TABLES, and return the line to print."""
    if form == "csv":
        text = comparison.csv()
    else:
        text = comparison.table().latex()
    path = folder / TABLES[form]
    write_whole(path, text)
    return f"Written: {path}"


def comparison_markdown(comparison: Comparison) -> str:
    """Return the comparison as Markdown: warnings, table, and a list of the settings."""
    metrics = {row.metric for row in comparison.rows}
    margins: list[str] = []
    for metric, margin in MARGINS.items():
        if metric in metrics:
            margins.append(f"{metric} {margin:g}")
    return render(
        "comparison.md.j2",
        comparison=comparison,
        judged=any(row.is_judged for row in comparison.rows),
        margins=", ".join(margins),
    )


def render(template: str, **values: Any) -> str:
    """Fill a Markdown template of this folder."""
    text = Path(__file__).with_name(template).read_text(encoding="utf-8")
    parsed = jinja2.Template(text, trim_blocks=True, keep_trailing_newline=True)
    return parsed.render(values)
