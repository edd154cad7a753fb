"""Write the report as one self-contained HTML file: figures inlined, no scripts, no external fonts."""

import base64
import datetime
import os
from collections.abc import Sequence
from pathlib import Path

import jinja2

from gpt2_repro.errors import UserError
from gpt2_repro.files import write_whole
from gpt2_repro.report.facts import why_not_comparable
from gpt2_repro.report.plots import overlay_figures, run_figures
from gpt2_repro.report.read import Run
from gpt2_repro.report.tables import recipe_differences, run_table
from gpt2_repro.report.view import view_run


def write_page(runs: Sequence[Run], output: Path) -> None:
    """Write the page to `output` and its figures as PNG files to the folder of the same name.

    `runs/demo/report.html` has `runs/demo/report/loss.png`; with several runs each has a folder in there.
    """
    folder = output.with_suffix("") if output.suffix else output.with_name(f"{output.name}-figures")
    labels, several = label_runs(runs), len(runs) > 1
    views = []
    for run, label in zip(runs, labels, strict=True):
        figures = _write_figures(run_figures(run), folder / label if several else folder)
        views.append(view_run(run, label) | {"figures": figures})
    overlay = _write_figures(overlay_figures(runs, labels), folder) if several else {}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html = environment.get_template("page.html.j2").render(
        title=", ".join(labels),
        runs=views,
        overlay=overlay,
        not_comparable=why_not_comparable(runs),
        run_table=run_table(runs, labels) if several else None,
        differences=recipe_differences(runs, labels) if several else None,
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
