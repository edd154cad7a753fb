"""Draw figures about one or more runs, as PNG images."""

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
from gpt2_repro.report.read import Run, points, scores_of_checkpoints, values
from gpt2_repro.text import count


COLOURS = [f"C{number}" for number in range(10)]  # of the style
GREY = "#5a5f66"
GREEN = "#009e73"
LINE_STYLES = ("--", ":", "-.")  # of reference lines
STYLE = Path(__file__).with_name("figures.mplstyle")


def figures(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, bytes]:
    """Return the figures that have data as PNG images, by file name without extension."""
    pictures: dict[str, bytes] = {}
    drawings = {"loss": draw_loss, "hellaswag": draw_hellaswag, "scores": draw_scores, "training": draw_training}
    short_labels = [label[-30:] for label in labels]
    for name, draw in drawings.items():
        with matplotlib.rc_context(fname=STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # the font lacks some scripts; such names are drawn as boxes
            figure = Figure(facecolor="white")
            draw(figure, runs, short_labels)
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
        means.append(statistics.fmean(numbers[index - reach : index + reach + 1]))
    return means


def draw_loss(figure: Figure, runs: Sequence[Run], labels: Sequence[str]) -> None:
    """Draw training and validation losses. Of several runs, only the main validation sets are drawn."""
    axes = figure.subplots()
    if len(runs) == 1:
        _draw_losses_of_one_run(axes, runs[0])
    else:
        for run, label, colour in zip(runs, labels, itertools.cycle(COLOURS)):
            tokens, losses = points(run.training, "loss")
            axes.plot(tokens, smooth(losses), color=colour, linewidth=1.5)
            _draw_validation(axes, run, "eval_loss", label, colour)
    leave_out_beginning(axes)
    for run in runs:
        if run.environment.reference:
            _draw_band(axes, run)
            break
    _finish(axes, "loss (nats per token)", [run.reference_losses for run in runs], "{:.3f}")


def _draw_losses_of_one_run(axes: Axes, run: Run) -> None:
    tokens, losses = points(run.training, "loss")
    axes.plot(tokens, losses, color=COLOURS[-1], linewidth=0.8)
    axes.plot(tokens, smooth(losses), color=COLOURS[0], linewidth=1.5, label="training")
    sets = {"eval_loss": "validation"}
    for name in run.further_sets:
        sets[f"eval_{name}_loss"] = name
    for (key, name), colour in zip(sets.items(), itertools.cycle(COLOURS[1:])):
        _draw_validation(axes, run, key, name, colour)


def _draw_validation(axes: Axes, run: Run, key: str, name: str, colour: str) -> None:
    tokens, losses = points(run.validation, key)
    label = f"{name} {losses[-1]:.3f}" if losses else None
    axes.plot(tokens, losses, "o", color=colour, label=label)


def _draw_band(axes: Axes, run: Run) -> None:
    """Fill the range of the losses of the published runs that this run should follow."""
    tokens: list[float] = []
    lows: list[float] = []
    highs: list[float] = []
    for row in run.validation:
        limits = band(run.environment.reference, int(row["step"]))
        if limits and values([row], "tokens"):
            tokens.append(row["tokens"])
            lows.append(limits[0])
            highs.append(limits[1])
    if tokens:
        axes.fill_between(tokens, lows, highs, color=GREEN, alpha=0.35, linewidth=0, label=run.environment.reference)


def draw_hellaswag(figure: Figure, runs: Sequence[Run], labels: Sequence[str]) -> None:
    axes = figure.subplots()
    for run, label, colour in zip(runs, labels, itertools.cycle(COLOURS)):
        tokens, scores = points(run.validation, "hellaswag_acc")
        if scores:
            axes.plot(tokens, scores, "o-", color=colour, label=f"{label} {scores[-1]:.4f}")
    _finish(axes, "HellaSwag accuracy", [run.reference_scores for run in runs], "{:.4f}")


def draw_scores(figure: Figure, runs: Sequence[Run], labels: Sequence[str]) -> None:
    """Draw the scores of checkpoints, one panel per metric."""
    curves = [scores_of_checkpoints(run) for run in runs]
    names: dict[str, None] = {}  # the keys, in order
    for curves_of_run in curves:
        names.update(dict.fromkeys(curves_of_run))
    if not names:
        return
    figure.set_size_inches(4.8, 0.8 + 1.6 * len(names))
    panels = figure.subplots(len(names), sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        has_legend = len(runs) > 1 and axes is panels[0]
        for curves_of_run, label, colour in zip(curves, labels, itertools.cycle(COLOURS)):
            tokens, scores = curves_of_run.get(name, ([], []))
            axes.plot(tokens, scores, "o-", color=colour, label=label if has_legend else None)
        axes.set_title(name, loc="right", fontsize="medium")
        _finish(axes, "")


def draw_training(figure: Figure, runs: Sequence[Run], labels: Sequence[str]) -> None:
    names = {"learning_rate": "learning rate", "grad_norm": "gradient norm", "tokens_per_second": "tokens/s"}
    keys = [key for key in names if _is_logged(runs, key)]
    if not keys:
        return
    figure.set_size_inches(4.8, 0.5 + 1.4 * len(keys))
    panels = figure.subplots(len(keys), sharex=True, squeeze=False)[:, 0]
    for axes, key in zip(panels, keys, strict=True):
        has_legend = len(runs) > 1 and axes is panels[0]
        for run, label, colour in zip(runs, labels, itertools.cycle(COLOURS)):
            tokens, numbers = points(run.training, key)
            (line,) = axes.plot(tokens, numbers, linewidth=1, color=colour, label=label if has_legend else None)
            if len(run.training) < 10:
                line.set_marker(".")
        if key == "grad_norm":
            leave_out_beginning(axes)
        else:
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(_thousands if key == "tokens_per_second" else "{x:g}")
        _finish(axes, names[key])


def _is_logged(runs: Sequence[Run], key: str) -> bool:
    return any(values(run.training, key) for run in runs)


def leave_out_beginning(axes: Axes) -> None:
    """Limit the y-axis, so that a steep first part of long curves is above the frame."""
    every: list[float] = []
    later: list[float] = []  # without the first twentieth of each curve
    is_long = False
    for line in axes.lines:
        xs: Any = line.get_xdata()
        ys: Any = line.get_ydata()
        every += list(ys)
        for x, y in zip(xs, ys, strict=True):
            if x >= xs[-1] / 20:
                later.append(y)
        is_long |= len(ys) >= 20
    if not is_long:
        return
    lowest = min(every)
    height = max(later) - min(later)
    # With the steep part, the rest of each curve would look like a flat line.
    if max(every) - lowest > 3 * height > 0:
        axes.set_ylim(lowest - 0.1 * height, max(later) + 0.2 * height)


def _finish(axes: Axes, name: str, references: Sequence[dict[str, float]] = (), form: str = "") -> None:
    """Draw the reference lines that all runs share, the axes' labels, and the legend above the plot area."""
    if not _has_data(axes):
        return
    top = math.inf if axes.get_autoscaley_on() else axes.get_ylim()[1]
    visible: list[tuple[float, str]] = []
    if references:
        for reference, value in references[0].items():
            is_shared = all(of_run.get(reference) == value for of_run in references)
            if is_shared and value <= top:
                visible.append((value, reference))
    for (value, reference), style in zip(sorted(visible), itertools.cycle(LINE_STYLES)):
        label = f"{reference} {form.format(value)}"
        axes.axhline(value, color=GREY, linewidth=1, linestyle=style, label=label)
    axes.set(xlabel="tokens trained", ylabel=name)
    axes.xaxis.set_major_formatter(_thousands)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.label_outer()
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)


def _has_data(axes: Axes) -> bool:
    return any(np.size(line.get_xdata()) for line in axes.lines)


def _thousands(value: float, _: float) -> str:
    return count(value)
