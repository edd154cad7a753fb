"""Draw three figures about one or more runs, as PNG images with captions."""

import io
import itertools
import math
import statistics
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gpt2_repro.evaluation.references import NAME, band
from gpt2_repro.report.read import Run, points, values
from gpt2_repro.text import count


# The colour-blind-safe palette of Okabe and Ito, without yellow, which is hard to see on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a0508a", "#a4262c", "#56b4e9")
GREY, GREEN = "#5a5f66", "#009e73"
STYLE: dict[Any, Any] = {
    "figure.figsize": (4.8, 3.3),  # inches; small, so that the text is readable on a phone
    "figure.dpi": 180,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.markersize": 3,
}
CAPTIONS = {
    "loss": "Nats per token; lower is better. Lines: training loss, smoothed. Dots: validation loss. Dashed: n-gram "
    "models of the training split, and GPT-2's published loss on this validation set. A steep first part of the curves "
    "is above the frame.",
    "hellaswag": "Accuracy during training in llm.c's completion style: the ending with the lowest loss per token is "
    "chosen. The evaluation task hellaswag changes the text before scoring, so its scores differ. Dashed: models of the "
    "nearest size, as reported by llm.c.",
    "training": "Learning rate, gradient norm before clipping, and tokens per second of all processes.",
}


class Picture(NamedTuple):
    """A figure as PNG bytes, and a caption."""

    png: bytes
    caption: str


def figures(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, Picture]:
    """Return the figures with logged values by file name without extension."""
    loss = any(points(run.training, "loss")[0] or points(run.validation, "eval_loss")[0] for run in runs)
    hellaswag = any(points(run.validation, "hellaswag_acc")[0] for run in runs)
    training = any(points(run.training, "learning_rate")[0] for run in runs)
    pictures = {}
    for draw, logged in ((draw_loss, loss), (draw_hellaswag, hellaswag), (draw_training, training)):
        with matplotlib.rc_context(STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # the font lacks some scripts; such names are drawn as boxes
            figure, buffer, name = Figure(facecolor="white"), io.BytesIO(), draw.__name__.removeprefix("draw_")
            if logged:
                draw(figure, runs, [label[-30:] for label in labels])
                figure.savefig(buffer, format="png")
                pictures[name] = Picture(buffer.getvalue(), CAPTIONS[name])
    return pictures


def smooth(numbers: Sequence[float]) -> list[float]:
    """Return the moving average over a centred window of 2 % of the values."""
    half, last = max(1, len(numbers) // 100), len(numbers) - 1
    reaches = [min(half, index, last - index) for index in range(len(numbers))]
    return [statistics.fmean(numbers[i - reach : i + reach + 1]) for i, reach in enumerate(reaches)]


def draw_loss(figure: Figure, runs: Sequence[Run], labels: Sequence[str]) -> None:
    """Draw training and validation losses. Of several runs, only the main validation sets are drawn."""
    axes, is_single = figure.subplots(), len(runs) == 1
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        tokens, losses = points(run.training, "loss")
        if is_single:
            axes.plot(tokens, losses, color=COLOURS[-1], linewidth=0.8)
        axes.plot(tokens, smooth(losses), color=colour, linewidth=1.5, label="training" if is_single else None)
        sets = {"eval_loss": "validation" if is_single else label}
        if is_single:
            sets |= {f"eval_{name}_loss": name for name in run.further_sets}
        for (key, name), other in zip(sets.items(), itertools.cycle(COLOURS[1:])):
            tokens, losses = points(run.validation, key)
            if losses:
                label = f"{name} {losses[-1]:.3f}"
                axes.plot(tokens, losses, "o", color=other if is_single else colour, label=label)
    leave_out_beginning(axes)
    run = next((run for run in runs if run.environment.reference), runs[0])
    rows = [row for row in run.validation if run.environment.reference and values([row], "tokens")]
    limits = [(row["tokens"], *limit) for row in rows if (limit := band(int(row["step"])))]
    if limits:
        positions, lows, highs = zip(*limits, strict=True)
        axes.fill_between(positions, lows, highs, color=GREEN, alpha=0.35, linewidth=0, label=NAME)
    axes.set_ylabel("loss (nats per token)")
    _finish(axes, [run.reference_losses for run in runs], "{:.3f}")


def draw_hellaswag(figure: Figure, runs: Sequence[Run], labels: Sequence[str]) -> None:
    axes = figure.subplots()
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        tokens, scores = points(run.validation, "hellaswag_acc")
        if scores:
            axes.plot(tokens, scores, "o-", color=COLOURS[number % len(COLOURS)], label=f"{label} {scores[-1]:.4f}")
    axes.set_ylabel("HellaSwag accuracy")
    _finish(axes, [run.reference_scores for run in runs], "{:.4f}")


def draw_training(figure: Figure, runs: Sequence[Run], labels: Sequence[str]) -> None:
    names = {"learning_rate": "learning rate", "grad_norm": "gradient norm", "tokens_per_second": "tokens/s"}
    keys = [key for key in names if any(values(run.training, key) for run in runs)]
    figure.set_size_inches(4.8, 0.5 + 1.4 * len(keys))
    panels = figure.subplots(len(keys), sharex=True, squeeze=False)[:, 0]
    for axes, key in zip(panels, keys, strict=True):
        for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
            style = {"color": COLOURS[number % len(COLOURS)], "marker": "." if len(run.training) < 10 else ""}
            name = label if len(runs) > 1 and axes is panels[0] else None
            axes.plot(*points(run.training, key), linewidth=1, label=name, **style)
        leave_out_beginning(axes) if key == "grad_norm" else axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(_thousands if key == "tokens_per_second" else "{x:g}")
        axes.set_ylabel(names[key])
    _finish(panels[-1], [])
    _draw_legend(panels[0])


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


def _finish(axes: Axes, references: Sequence[dict[str, float]], form: str = "") -> None:
    """Draw the reference lines that all runs share, the token axis and the legend."""
    shared = set.intersection(*(set(lines.items()) for lines in references)) if references else set()
    top = math.inf if axes.get_autoscaley_on() else axes.get_ylim()[1]
    visible = sorted((value, name) for name, value in shared if value <= top)
    for (value, name), style in zip(visible, itertools.cycle(("--", ":", "-."))):
        axes.axhline(value, color=GREY, linewidth=1, linestyle=style, label=f"{name} {form.format(value)}")
    axes.set_xlabel("tokens trained")
    axes.xaxis.set_major_formatter(_thousands)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    _draw_legend(axes)


def _draw_legend(axes: Axes) -> None:
    """Draw the legend above the plot area."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)


def _thousands(value: float, _: float) -> str:
    return count(value)
