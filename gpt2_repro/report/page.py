"""Write the report: a self-contained HTML file without scripts or external fonts, and lines for the terminal."""

import base64
import datetime
import os
from collections.abc import Sequence
from pathlib import Path

import jinja2

from gpt2_repro.errors import UserError
from gpt2_repro.files import write_whole
from gpt2_repro.report import tables
from gpt2_repro.report.plots import overlay_figures, run_figures
from gpt2_repro.report.read import Run
from gpt2_repro.time_breakdown import breakdown_lines


def write_page(runs: Sequence[Run], output: Path) -> None:
    """Write the page to `output` and its figures as PNG files to the folder of the same name.

    `runs/demo/report.html` has `runs/demo/report/loss.png`; with several runs each has a folder in there.
    """
    folder = output.with_suffix("") if output.suffix else output.with_name(f"{output.name}-figures")
    labels, several = label_runs(runs), len(runs) > 1
    folders = [folder / label if several else folder for label in labels]
    figures = [_write_figures(run_figures(run), its) for run, its in zip(runs, folders, strict=True)]
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    html = environment.get_template("page.html.j2").render(
        tables=tables,
        runs=list(zip(runs, labels, figures, strict=True)),
        overlay=_write_figures(overlay_figures(runs, labels), folder) if several else {},
        not_comparable=tables.why_not_comparable(runs),
        run_table=tables.run_table(runs, labels) if several else None,
        differences=tables.recipe_differences(runs, labels),
        written=datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="minutes"),
    )
    _write(output, html.encode())


def label_runs(runs: Sequence[Run]) -> list[str]:
    """Return each run's folder name or, if two are equal, the paths below the folder that contains them all."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    paths = [run.path.resolve() for run in runs]
    above = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(above)) for path in paths]


def _write_figures(figures: dict[str, bytes], folder: Path) -> dict[str, str]:
    """Write the figures as files and return them in base64 for the page."""
    for name, png in figures.items():
        _write(folder / f"{name}.png", png)
    return {name: base64.b64encode(png).decode() for name, png in figures.items()}


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another file with -o report.html") from None


def summary(run: Run, page: Path) -> list[str]:
    """Return state, key numbers, time, evaluation and missing parts of a run, and the path of its page."""
    lines = [f"{run.name}: {run.status.state}, {tables.progress(run)}"]
    lines += [f"  {run.status.reason}"] if run.status.reason else []
    if run.non_finite_steps:
        lines.append(f"  the loss was not finite at {len(run.non_finite_steps)} steps")
    lines += [f"  {label:<28} {text:>11}  {note}".rstrip() for label, text, note in tables.key_numbers(run)]
    price = run.environment.usd_per_hour
    lines += [f"  {line}" for line in breakdown_lines(run.status.time_breakdown, usd_per_hour=price)]
    if run.comparison and run.comparison.rows:
        lines += ["", *(f"  {line}" for line in tables.aligned(tables.evaluation_table(run))), ""]
    if limit := run.comparison and run.comparison.limit:
        lines.append(f"  scored on the first {limit} examples of each task: do not compare with published numbers")
    lines += [f"  {sentence}" for sentence in run.missing().values()]
    return [*lines, f"  report: {page}"]
