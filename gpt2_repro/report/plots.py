"""Draw figures about one or more runs, as PNG images."""

import dataclasses
import io
import itertools
import math
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gpt2_repro.evaluation.references import band
from gpt2_repro.report.read import Run, has_value, points, scores_of_checkpoints, values
from gpt2_repro.text import count


COLOURS = [f"C{number}" for number in range(10)]  # of the style
GREY = "#5a5f66"
GREEN = "#009e73"
LINE_STYLES = ("--", ":", "-.")  # of reference lines
TRAINING_NUMBERS = {"learning_rate": "learning rate", "grad_norm": "gradient norm", "tokens_per_second": "tokens/s"}
STYLE = Path(__file__).with_name("figures.mplstyle")


@dataclasses.dataclass(frozen=True)
class DrawnRun:
    """A run with its label and its colour in a figure."""

    run: Run
    label: str
    colour: str


def figures(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, bytes]:
    """Return the figures that have data as PNG images, by file name without extension."""
    drawn_runs: list[DrawnRun] = []
    for run, label, colour in zip(runs, labels, itertools.cycle(COLOURS)):
        drawn_runs.append(DrawnRun(run, label[-30:], colour))
    pictures: dict[str, bytes] = {}
    drawings = {"loss": draw_loss, "hellaswag": draw_hellaswag, "scores": draw_scores, "training": draw_training}
    for name, draw in drawings.items():
        with matplotlib.rc_context(fname=STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # the font lacks some scripts; such names are drawn as boxes
            figure = Figure(facecolor="white")
            draw(figure, drawn_runs)
            if any(_has_data(axes) for axes in figure.axes):
                buffer = io.BytesIO()
                figure.savefig(buffer, format="png")
                pictures[name] = buffer.getvalue()
    return pictures


def smooth(numbers: Sequence[float]) -> list[float]:
    """Return the moving average over a centred window of 2 % of the values."""
    half = max(1, len(numbers) // 100)
    last = len(numbers) - 1
    means: list[float] = []
    for index in range(len(numbers)):
        reach = min(half, index, last - index)
        window = numbers[index - reach : index + reach + 1]
        means.append(statistics.fmean(window))
    return means


def draw_loss(figure: Figure, drawn_runs: Sequence[DrawnRun]) -> None:
    """Draw training and validation losses. Of several runs, only the main validation sets are drawn."""
    axes = figure.subplots()
    if len(drawn_runs) == 1:
        _draw_losses_of_one_run(axes, drawn_runs[0].run)
    else:
        for drawn in drawn_runs:
            tokens, losses = points(drawn.run.training, "loss")
            axes.plot(tokens, smooth(losses), color=drawn.colour, linewidth=1.5)
            _draw_validation(axes, drawn, "eval_loss")
    leave_out_beginning(axes)
    for drawn in drawn_runs:
        if drawn.run.environment.reference:
            _draw_band(axes, drawn.run)
            break
    references = [drawn.run.reference_losses for drawn in drawn_runs]
    _draw_references(axes, references, "{:.3f}")
    _finish(axes, "loss (nats per token)")


def _draw_losses_of_one_run(axes: Axes, run: Run) -> None:
    tokens, losses = points(run.training, "loss")
    axes.plot(tokens, losses, color=COLOURS[-1], linewidth=0.8)
    axes.plot(tokens, smooth(losses), color=COLOURS[0], linewidth=1.5, label="training")
    colours = itertools.cycle(COLOURS[1:])
    _draw_validation(axes, DrawnRun(run, "validation", next(colours)), "eval_loss")
    for name in run.further_sets:
        _draw_validation(axes, DrawnRun(run, name, next(colours)), f"eval_{name}_loss")


def _draw_validation(axes: Axes, drawn: DrawnRun, key: str) -> None:
    tokens, losses = points(drawn.run.validation, key)
    if losses:
        label = f"{drawn.label} {losses[-1]:.3f}"
        axes.plot(tokens, losses, "o", color=drawn.colour, label=label)


def _draw_band(axes: Axes, run: Run) -> None:
    """Fill the range of the losses of the published runs that this run should follow."""
    tokens: list[float] = []
    lows: list[float] = []
    highs: list[float] = []
    for row in run.validation:
        limits = band(run.environment.reference, int(row["step"]))
        if limits and has_value(row, "tokens"):
            tokens.append(row["tokens"])
            lows.append(limits[0])
            highs.append(limits[1])
    if tokens:
        label = run.environment.reference
        axes.fill_between(tokens, lows, highs, color=GREEN, alpha=0.35, linewidth=0, label=label)


def draw_hellaswag(figure: Figure, drawn_runs: Sequence[DrawnRun]) -> None:
    axes = figure.subplots()
    for drawn in drawn_runs:
        tokens, scores = points(drawn.run.validation, "hellaswag_acc")
        if scores:
            label = f"{drawn.label} {scores[-1]:.4f}"
            axes.plot(tokens, scores, "o-", color=drawn.colour, label=label)
    references = [drawn.run.reference_scores for drawn in drawn_runs]
    _draw_references(axes, references, "{:.4f}")
    _finish(axes, "HellaSwag accuracy")


def draw_scores(figure: Figure, drawn_runs: Sequence[DrawnRun]) -> None:
    """Draw the scores of checkpoints, one panel per metric."""
    names: dict[str, None] = {}  # the keys, in order
    for drawn in drawn_runs:
        names.update(dict.fromkeys(scores_of_checkpoints(drawn.run)))
    if not names:
        return
    figure.set_size_inches(4.8, 0.8 + 1.6 * len(names))
    panels = _panels(figure, len(names))
    for axes, name in zip(panels, names, strict=True):
        for drawn in drawn_runs:
            curves = scores_of_checkpoints(drawn.run)
            tokens, scores = curves.get(name, ([], []))
            axes.plot(tokens, scores, "o-", color=drawn.colour, label=drawn.label)
        axes.set_title(name, loc="right", fontsize="medium")
        has_legend = len(drawn_runs) > 1 and axes is panels[0]
        _finish(axes, "", has_legend=has_legend)


def draw_training(figure: Figure, drawn_runs: Sequence[DrawnRun]) -> None:
    names: dict[str, str] = {}
    for key, name in TRAINING_NUMBERS.items():
        if any(values(drawn.run.training, key) for drawn in drawn_runs):
            names[key] = name
    if not names:
        return
    figure.set_size_inches(4.8, 0.5 + 1.4 * len(names))
    panels = _panels(figure, len(names))
    for axes, key in zip(panels, names, strict=True):
        for drawn in drawn_runs:
            tokens, numbers = points(drawn.run.training, key)
            (line,) = axes.plot(tokens, numbers, linewidth=1, color=drawn.colour, label=drawn.label)
            if len(drawn.run.training) < 10:
                line.set_marker(".")
        if key == "grad_norm":
            leave_out_beginning(axes)
        else:
            axes.set_ylim(bottom=0)
        if key == "tokens_per_second":
            axes.yaxis.set_major_formatter(_thousands)
        else:
            axes.yaxis.set_major_formatter("{x:g}")
        has_legend = len(drawn_runs) > 1 and axes is panels[0]
        _finish(axes, names[key], has_legend=has_legend)


def _panels(figure: Figure, number: int) -> Sequence[Axes]:
    """Return panels below each other with the same x-axis."""
    grid = figure.subplots(number, sharex=True, squeeze=False)
    return [row[0] for row in grid]


def leave_out_beginning(axes: Axes) -> None:
    """Limit the y-axis, so that a steep first part of long curves is above the frame."""
    every: list[float] = []
    later: list[float] = []  # without the first twentieth of each curve
    longest = 0
    for line in axes.lines:
        xs: Any = line.get_xdata()
        ys: Any = line.get_ydata()
        every += list(ys)
        for x, y in zip(xs, ys, strict=True):
            if x >= xs[-1] / 20:
                later.append(y)
        longest = max(longest, len(ys))
    if longest < 20:
        return
    lowest = min(every)
    height = max(later) - min(later)
    # With the steep part, the rest of each curve would look like a flat line.
    is_steep = max(every) - lowest > 3 * height
    if is_steep and height > 0:
        bottom = lowest - 0.1 * height
        top = max(later) + 0.2 * height
        axes.set_ylim(bottom, top)


def _draw_references(axes: Axes, references: Sequence[dict[str, float]], form: str) -> None:
    """Draw a line for each reference value that all runs share and that is not above the frame."""
    if not _has_data(axes):
        return
    top = math.inf
    if not axes.get_autoscaley_on():
        top = axes.get_ylim()[1]
    visible: list[tuple[float, str]] = []
    for name, value in references[0].items():
        is_shared = all(of_run.get(name) == value for of_run in references)
        if is_shared and value <= top:
            visible.append((value, name))
    visible.sort()
    for (value, name), style in zip(visible, itertools.cycle(LINE_STYLES)):
        label = f"{name} {form.format(value)}"
        axes.axhline(value, color=GREY, linewidth=1, linestyle=style, label=label)


def _finish(axes: Axes, name: str, *, has_legend: bool = True) -> None:
    """Draw the labels of the axes, and the legend above the plot area."""
    if not _has_data(axes):
        return
    axes.set(xlabel="tokens trained", ylabel=name)
    axes.xaxis.set_major_formatter(_thousands)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.label_outer()
    if has_legend and axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)


def _has_data(axes: Axes) -> bool:
    return any(np.size(line.get_xdata()) for line in axes.lines)


def _thousands(value: float, _: float) -> str:
    return count(value)
