"""The report as one HTML file that needs nothing beside it: figures inlined, no scripts, no fonts from elsewhere."""

import base64
import datetime
import os
from collections.abc import Sequence
from pathlib import Path

import jinja2

from gpt2_repro.errors import UserError
from gpt2_repro.files import write_whole
from gpt2_repro.report.diagnosis import diagnosis_figures
from gpt2_repro.report.facts import why_not_comparable
from gpt2_repro.report.paper import Png
from gpt2_repro.report.plots import overlay_figures, run_figures
from gpt2_repro.report.read import Run
from gpt2_repro.report.tables import recipe_differences, run_table
from gpt2_repro.report.view import view_run


HELLASWAG_CAPTION = (
    "Accuracy while it trained, in llm.c's completion style: the ending of the lowest loss per token. The evaluation's "
    "hellaswag rewrites the text and has other numbers."
)


def write_page(runs: Sequence[Run], output: Path) -> None:
    """Write the page to `output` and the figures to the folder of its name beside it, each file whole or not at all.

    `runs/demo/report.html` has `runs/demo/report/loss.png`; of several runs each has a folder in there.
    """
    folder = output.with_suffix("") if output.suffix else output.with_name(f"{output.name}-figures")
    labels = label_runs(runs)
    views = []
    for run, label in zip(runs, labels, strict=True):
        figures = run_figures(run)
        diagnosed = {f"diagnosis_{name}": cuts for name, cuts in diagnosis_figures(run.diagnosis).items()}
        figures |= diagnosed
        for name, cuts in figures.items():
            _write(folder / (label if len(runs) > 1 else "") / f"{name}.png", cuts["wide"])
        inlined = {name: _figure(cuts) for name, cuts in figures.items()}
        views.append(view_run(run, label) | {"figures": inlined, "diagnosed": list(diagnosed)})
    several = len(runs) > 1
    overlaid = overlay_figures(runs, labels) if several else {}
    for name, cuts in overlaid.items():
        _write(folder / f"{name}.png", cuts["wide"])
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
        overlay={name: _figure(cuts) for name, cuts in overlaid.items()},
        hellaswag_caption=HELLASWAG_CAPTION,
        not_comparable=why_not_comparable(runs),
        run_table=run_table(runs, labels) if several else None,
        differences=recipe_differences(runs, labels) if several else None,
        written=datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="minutes"),
    )
    _write(output, html.encode())


def label_runs(runs: Sequence[Run]) -> list[str]:
    """The name of each run's folder, or, where two share a name, the path from the folder that holds them all."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    paths = [run.path.resolve() for run in runs]
    above = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(above)) for path in paths]


def _figure(cuts: Png) -> dict[str, str]:
    return {cut: base64.b64encode(png).decode() for cut, png in cuts.items()}


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another file with -o report.html") from None
