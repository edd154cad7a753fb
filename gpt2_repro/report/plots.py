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
GREY, GREEN = "#5a5f66", "#009e73"
STYLE = Path(__file__).with_name("figures.mplstyle")


def figures(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, bytes]:
    """Return the figures that have data as PNG images, by file name without extension."""
    pictures = {}
    drawn = {"loss": draw_loss, "hellaswag": draw_hellaswag, "scores": draw_scores, "training": draw_training}
    for name, draw in drawn.items():
        with matplotlib.rc_context(fname=STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # the font lacks some scripts; such names are drawn as boxes
            figure, buffer = Figure(facecolor="white"), io.BytesIO()
            draw(figure, runs, [label[-30:] for label in labels])
            if any(map(_has_data, figure.axes)):
                figure.savefig(buffer, format="png")
                pictures[name] = buffer.getvalue()
    return pictures


def smooth(numbers: Sequence[float]) -> list[float]:
    """Return the moving average over a centred window of 2 % of the values."""
    half, last = max(1, len(numbers) // 100), len(numbers) - 1
    reaches = [min(half, index, last - index) for index in range(len(numbers))]
    return [statistics.fmean(numbers[i - reach : i + reach + 1]) for i, reach in enumerate(reaches)]


def draw_loss(figure: Figure, runs: Sequence[Run], labels: Sequence[str]) -> None:
    """Draw training and validation losses. Of several runs, only the main validation sets are drawn."""
    axes, is_single = figure.subplots(), len(runs) == 1
    for run, label, colour in zip(runs, labels, itertools.cycle(COLOURS)):
        tokens, losses = points(run.training, "loss")
        if is_single:
            axes.plot(tokens, losses, color=COLOURS[-1], linewidth=0.8)
        axes.plot(tokens, smooth(losses), color=colour, linewidth=1.5, label="training" if is_single else None)
        sets = {"eval_loss": "validation" if is_single else label}
        if is_single:
            sets |= {f"eval_{name}_loss": name for name in run.further_sets}
        for (key, name), other in zip(sets.items(), itertools.cycle(COLOURS[1:])):
            tokens, losses = points(run.validation, key)
            last = f"{name} {losses[-1]:.3f}" if losses else None
            axes.plot(tokens, losses, "o", color=other if is_single else colour, label=last)
    leave_out_beginning(axes)
    run = next((run for run in runs if run.environment.reference), runs[0])
    reference, rows = run.environment.reference, [row for row in run.validation if values([row], "tokens")]
    if limits := [(row["tokens"], *limit) for row in rows if (limit := band(reference, int(row["step"])))]:
        positions, lows, highs = zip(*limits, strict=True)
        axes.fill_between(positions, lows, highs, color=GREEN, alpha=0.35, linewidth=0, label=reference)
    _finish(axes, "loss (nats per token)", [run.reference_losses for run in runs], "{:.3f}")


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
    names = list(dict.fromkeys(name for scores in curves for name in scores)) or [""]
    figure.set_size_inches(4.8, 0.8 + 1.6 * len(names))
    panels = figure.subplots(len(names), sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        for scores, label, colour in zip(curves, labels, itertools.cycle(COLOURS)):
            shown = label if len(runs) > 1 and axes is panels[0] else None
            axes.plot(*scores.get(name, ([], [])), "o-", color=colour, label=shown)
        axes.set_title(name, loc="right", fontsize="medium")
        _finish(axes, "")


def draw_training(figure: Figure, runs: Sequence[Run], labels: Sequence[str]) -> None:
    names = {"learning_rate": "learning rate", "grad_norm": "gradient norm", "tokens_per_second": "tokens/s"}
    keys = [key for key in names if any(values(run.training, key) for run in runs)] or ["learning_rate"]
    figure.set_size_inches(4.8, 0.5 + 1.4 * len(keys))
    panels = figure.subplots(len(keys), sharex=True, squeeze=False)[:, 0]
    for axes, key in zip(panels, keys, strict=True):
        for run, label, colour in zip(runs, labels, itertools.cycle(COLOURS)):
            name = label if len(runs) > 1 and axes is panels[0] else None
            marker = "." if len(run.training) < 10 else ""
            axes.plot(*points(run.training, key), linewidth=1, label=name, color=colour, marker=marker)
        leave_out_beginning(axes) if key == "grad_norm" else axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(_thousands if key == "tokens_per_second" else "{x:g}")
        _finish(axes, names[key])


def leave_out_beginning(axes: Axes) -> None:
    """Limit the y-axis, so that a steep first part of long curves is above the frame."""
    lines: list[Any] = [line.get_data() for line in axes.lines]
    curves = [(xs, ys) for xs, ys in lines if len(xs)]
    later = [y for xs, ys in curves for x, y in zip(xs, ys, strict=True) if x >= xs[-1] / 20]
    every = [y for _, ys in curves for y in ys]
    is_long = any(len(ys) >= 20 for _, ys in curves)
    # With the steep part, the rest of each curve would look like a flat line.
    if is_long and max(every) - min(every) > 3 * (height := max(later) - min(later)) > 0:
        axes.set_ylim(min(every) - 0.1 * height, max(later) + 0.2 * height)


def _finish(axes: Axes, name: str, references: Sequence[dict[str, float]] = (), form: str = "") -> None:
    """Draw the reference lines that all runs share, the axes' labels, and the legend above the plot area."""
    if not _has_data(axes):
        return
    shared = set.intersection(*(set(lines.items()) for lines in references)) if references else set()
    top = math.inf if axes.get_autoscaley_on() else axes.get_ylim()[1]
    visible = sorted((value, name) for name, value in shared if value <= top)
    for (value, reference), style in zip(visible, itertools.cycle(("--", ":", "-."))):
        axes.axhline(value, color=GREY, linewidth=1, linestyle=style, label=f"{reference} {form.format(value)}")
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
