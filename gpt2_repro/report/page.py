"""Write the report as one self-contained HTML file, and as text for the terminal."""

import base64
import datetime
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

import jinja2

from gpt2_repro.errors import UserError
from gpt2_repro.files import write_whole
from gpt2_repro.report import tables
from gpt2_repro.report.plots import Picture, overlay_figures, run_figures
from gpt2_repro.report.read import Run


# Key numbers that are shown on the page only, not in the terminal.
ON_THE_PAGE = ("parameters", "tokens", "tokens/s (median)", "padding (median)")
SAMPLE_CHARACTERS = 300  # length limit of the sample in the terminal


def write_page(runs: Sequence[Run], output: Path, folder: Path | None = None) -> None:
    """Write a report of `runs` as an HTML page to `output`.

    If `folder` is given, also write the figures to `folder` as PNG files.
    """
    labels, several = label_runs(runs), len(runs) > 1
    figures = [run_figures(run) for run in runs]
    overlay = overlay_figures(runs, labels) if several else {}
    if folder:
        _write_figures(overlay, folder)
        for its, label in zip(figures, labels, strict=True):
            _write_figures(its, folder / label if several else folder)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["base64"] = lambda png: base64.b64encode(png).decode()
    html = environment.get_template("page.html.j2").render(
        tables=tables,
        runs=list(zip(runs, labels, figures, strict=True)),
        overlay=overlay,
        not_comparable=tables.why_not_comparable(runs),
        run_table=tables.run_table(runs, labels) if several else None,
        differences=tables.recipe_differences(runs, labels),
        date=datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="minutes"),
    )
    _write(output, html.encode())


def label_runs(runs: Sequence[Run]) -> list[str]:
    """Return a distinct label for each run: the name of its run directory.

    If several directories have the same name, the labels are paths relative to the common parent folder.
    """
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    paths = [run.path.resolve() for run in runs]
    above = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(above)) for path in paths]


def _write_figures(figures: dict[str, Picture], folder: Path) -> None:
    for name, picture in figures.items():
        _write(folder / f"{name}.png", picture.png)


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}. Pass another path, such as -o report.html.") from None


def summary(run: Run, page: Path) -> list[str]:
    """Return the summary of a run for the terminal.

    Args:
        page: the path of the HTML page, which the last line names.
    """
    lines = [f"{run.name}: {run.status.state}, {tables.progress(run)}"]
    lines += [f"  {run.status.reason}"] if run.status.reason else []
    if run.non_finite_steps:
        lines.append(f"  steps with a non-finite training loss: {len(run.non_finite_steps)}")
    for label, text, notes in tables.key_numbers(run):
        if label not in ON_THE_PAGE:
            lines.append(f"  {label:<28} {text:>11}  {', '.join(note.text for note in notes)}".rstrip())
    if run.comparison and run.comparison.rows:
        lines += ["", *(f"  {line}" for line in tables.evaluation_table(run, brief=True).lines()), ""]
    if limit := run.comparison and run.comparison.limit:
        lines.append(f"  Only the first {limit} examples per task were scored. Published scores cannot be compared.")
    lines += [f"  {sentence}" for sentence in run.missing().values()]
    if run.samples:
        newest = max(run.samples, key=lambda sample: sample["step"])
        line = " ".join(f"{newest['prompt']}{tables.sample_text(newest)}".split())[:SAMPLE_CHARACTERS]
        printable = "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in line)
        lines.append(textwrap.fill(f"sample: {printable}", 100, initial_indent="  ", subsequent_indent="    "))
    return [*lines, f"  report: {page}"]
