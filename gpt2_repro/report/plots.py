"""Draw figures about one or more runs, as PNG and SVG images."""

import dataclasses
import io
import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gpt2_repro.evaluation.references import band
from gpt2_repro.report.read import Row, Run, has_value, points, scores_of_checkpoints, values
from gpt2_repro.report.seeds import group
from gpt2_repro.text import count


COLOURS = [f"C{number}" for number in range(10)]  # of the style
GREY = "#5a5f66"
GREEN = "#009e73"
LINE_STYLES = ("--", ":", "-.")  # of reference lines
TRAINING_NUMBERS = {"learning_rate": "learning rate", "grad_norm": "gradient norm", "tokens_per_second": "tokens/s"}
CAPTIONS = {
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm before clipping",
    "tokens_per_second": "tokens per second of all processes",
}
N_GRAMS = ("unigram", "bigram")  # names of reference losses
SCREEN_DPI = 180
# Of figures of several runs. Their text has 8 and 9 points in a print of this width in inches.
PRINT_WIDTH = 7.0
PRINT_HEIGHT = 4.4
PRINT_DPI = 300
LEGEND_CHARACTERS = 30  # of the name of a setting
STYLE = Path(__file__).with_name("figures.mplstyle")


@dataclasses.dataclass(frozen=True)
class DrawnSetting:
    """Runs that differ only in the seed, with their label and their colour in a figure."""

    runs: Sequence[Run]
    label: str
    colour: str

    def labelled(self, value: str) -> str:
        """Return the text of a legend: the label, the last value, and the number of seeds if there are several."""
        text = f"{self.label} {value}"
        if len(self.runs) > 1:
            text += f" ({len(self.runs)} seeds)"
        return text


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure as PNG and SVG files, and a caption that names what is drawn."""

    png: bytes
    svg: bytes
    caption: str


def figures(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, Picture]:
    """Return the figures that have data, by file name without extension."""
    drawn_settings: list[DrawnSetting] = []
    settings = group(runs, labels)
    names = _short_names([setting.name for setting in settings])
    for setting, name, colour in zip(settings, names, itertools.cycle(COLOURS)):
        drawn_settings.append(DrawnSetting(setting.runs, name, colour))
    pictures: dict[str, Picture] = {}
    drawings = {"loss": draw_loss, "hellaswag": draw_hellaswag, "scores": draw_scores, "training": draw_training}
    for name, draw in drawings.items():
        with matplotlib.rc_context(fname=STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # the font lacks some scripts; such names are drawn as boxes
            figure = Figure(facecolor="white")
            resolution = SCREEN_DPI
            if len(runs) > 1:
                figure.set_size_inches(PRINT_WIDTH, PRINT_HEIGHT)
                resolution = PRINT_DPI
            caption = draw(figure, drawn_settings)
            if not any(_has_data(axes) for axes in figure.axes):
                continue
            if any(len(drawn.runs) > 1 for drawn in drawn_settings):
                caption += " Of several seeds: the mean, and a band or bar from the lowest to the highest seed."
            png = io.BytesIO()
            figure.savefig(png, format="png", dpi=resolution)
            svg = io.BytesIO()
            figure.savefig(svg, format="svg", metadata={"Date": None})
            pictures[name] = Picture(png.getvalue(), svg.getvalue(), caption)
    return pictures


def _short_names(names: Sequence[str]) -> Sequence[str]:
    """Return the ends of names that are too long for a legend, unless two ends are equal."""
    short = [name[-LEGEND_CHARACTERS:] for name in names]
    if len(set(short)) < len(names):
        return names
    return short


def _plot(
    axes: Axes,
    drawn: DrawnSetting,
    rows_of: Callable[[Run], Sequence[Row]],
    key: str,
    style: str = "-",
    **line: Any,
) -> list[float]:
    """Plot the mean of the seeds, and a band (dots: bars) from the lowest to the highest, and return the mean.

    A step is drawn if all seeds have logged it. The argument `is_smooth` smooths the curve of each seed.
    """
    is_smooth = line.pop("is_smooth", False)
    form = line.pop("form", None)
    curves: list[dict[float, float]] = []
    for run in drawn.runs:
        tokens, numbers = points(rows_of(run), key)
        if is_smooth:
            numbers = smooth(numbers)
        curves.append(dict(zip(tokens, numbers, strict=True)))
    shared = [tokens for tokens in curves[0] if all(tokens in curve for curve in curves)]
    of_seeds = [[curve[tokens] for curve in curves] for tokens in shared]
    means = [statistics.fmean(numbers) for numbers in of_seeds]
    if form and means:
        line["label"] = drawn.labelled(form.format(means[-1]))
    axes.plot(shared, means, style, color=drawn.colour, **line)
    if len(curves) > 1 and shared:
        lows = [min(numbers) for numbers in of_seeds]
        highs = [max(numbers) for numbers in of_seeds]
        if style == "o":  # far apart: a band would look like a curve
            axes.vlines(shared, lows, highs, color=drawn.colour, linewidth=1)
        else:
            axes.fill_between(shared, lows, highs, color=drawn.colour, alpha=0.2, linewidth=0)
    return means


def _training(run: Run) -> Sequence[Row]:
    return run.training


def _validation(run: Run) -> Sequence[Row]:
    return run.validation


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


def draw_loss(figure: Figure, drawn_settings: Sequence[DrawnSetting]) -> str:
    """Draw training and validation losses, and return the caption.

    Of several runs, only the main validation sets are drawn.
    """
    axes = figure.subplots()
    runs = _runs(drawn_settings)
    if len(runs) == 1:
        _draw_losses_of_one_run(axes, runs[0])
    else:
        for drawn in drawn_settings:
            _plot(axes, drawn, _training, "loss", linewidth=1.2, is_smooth=True)
            _plot(axes, drawn, _validation, "eval_loss", "o", form="{:.3f}")
    sentences = ["Nats per token; lower is better."]
    if any(run.training for run in runs):
        sentences.append("Lines: training loss, smoothed.")
    if any(values(run.validation, "eval_loss") for run in runs):
        sentences.append("Dots: validation loss.")
    if leave_out_beginning(axes):
        sentences.append("A steep first part of the curves is above the frame.")
    for run in runs:
        if run.environment.reference and _draw_band(axes, run):
            sentences.append(f"Green: range of {run.environment.reference}'s runs.")
            break
    names = _draw_references(axes, [run.reference_losses for run in runs], "{:.3f}")
    models = [f"the {name} model" for name in names if name in N_GRAMS]
    if models:
        sentences.append(f"Grey: {' and '.join(models)} of the training split.")
    published = [name for name in names if name not in N_GRAMS]
    if published:
        sentences.append(f"Grey: published loss of {' and '.join(published)} on this validation set.")
    _finish(axes, "loss (nats per token)")
    return " ".join(sentences)


def _runs(drawn_settings: Sequence[DrawnSetting]) -> list[Run]:
    runs: list[Run] = []
    for drawn in drawn_settings:
        runs += drawn.runs
    return runs


def _draw_losses_of_one_run(axes: Axes, run: Run) -> None:
    tokens, losses = points(run.training, "loss")
    axes.plot(tokens, losses, color=COLOURS[-1], linewidth=0.8)
    axes.plot(tokens, smooth(losses), color=COLOURS[0], linewidth=1.5, label="training")
    colours = itertools.cycle(COLOURS[1:])
    drawn = DrawnSetting([run], "validation", next(colours))
    _plot(axes, drawn, _validation, "eval_loss", "o", form="{:.3f}")
    for name in run.further_sets:
        drawn = DrawnSetting([run], name, next(colours))
        _plot(axes, drawn, _validation, f"eval_{name}_loss", "o", form="{:.3f}")


def _draw_band(axes: Axes, run: Run) -> bool:
    """Fill the range of the losses of the published runs that this run should follow, if it has such steps."""
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
    return bool(tokens)


def draw_hellaswag(figure: Figure, drawn_settings: Sequence[DrawnSetting]) -> str:
    axes = figure.subplots()
    for drawn in drawn_settings:
        _plot(axes, drawn, _validation, "hellaswag_acc", "o-", form="{:.4f}")
    references = [run.reference_scores for run in _runs(drawn_settings)]
    caption = (
        "Accuracy during training in llm.c's completion style: the ending with the lowest loss per token is chosen. "
        "The evaluation task hellaswag changes the text before scoring, so its scores differ."
    )
    if _draw_references(axes, references, "{:.4f}"):
        caption += " Grey: models of the nearest size, as reported by llm.c."
    _finish(axes, "HellaSwag accuracy")
    return caption


def draw_scores(figure: Figure, drawn_settings: Sequence[DrawnSetting]) -> str:
    """Draw the scores of checkpoints, one panel per metric."""
    names: dict[str, None] = {}  # the keys, in order
    for run in _runs(drawn_settings):
        names.update(dict.fromkeys(scores_of_checkpoints(run)))
    if not names:
        return ""
    figure.set_size_inches(figure.get_figwidth(), 0.8 + 1.6 * len(names))
    panels = _panels(figure, len(names))
    for axes, name in zip(panels, names, strict=True):
        for drawn in drawn_settings:
            _plot(axes, drawn, _scores_by(name), "score", "o-", label=drawn.label)
        axes.set_title(name, loc="right", fontsize="medium")
        has_legend = len(drawn_settings) > 1 and axes is panels[0]
        _finish(axes, "", has_legend=has_legend)
    return "Scores of checkpoints by evaluate.sh --follow."


def _scores_by(name: str) -> Callable[[Run], Sequence[Row]]:
    """Return a function that returns the scores of a run's checkpoints by one metric."""

    def rows_of(run: Run) -> Sequence[Row]:
        tokens, scores = scores_of_checkpoints(run).get(name, ([], []))
        return [{"tokens": at, "score": score} for at, score in zip(tokens, scores, strict=True)]

    return rows_of


def draw_training(figure: Figure, drawn_settings: Sequence[DrawnSetting]) -> str:
    names: dict[str, str] = {}
    runs = _runs(drawn_settings)
    for key, name in TRAINING_NUMBERS.items():
        if any(values(run.training, key) for run in runs):
            names[key] = name
    if not names:
        return ""
    figure.set_size_inches(figure.get_figwidth(), 0.5 + 1.4 * len(names))
    panels = _panels(figure, len(names))
    for axes, key in zip(panels, names, strict=True):
        for drawn in drawn_settings:
            marker = "." if len(drawn.runs[0].training) < 10 else ""
            _plot(axes, drawn, _training, key, linewidth=1, label=drawn.label, marker=marker)
        if key == "grad_norm":
            leave_out_beginning(axes)
        else:
            axes.set_ylim(bottom=0)
        if key == "tokens_per_second":
            axes.yaxis.set_major_formatter(_thousands)
        else:
            axes.yaxis.set_major_formatter("{x:g}")
        has_legend = len(drawn_settings) > 1 and axes is panels[0]
        _finish(axes, names[key], has_legend=has_legend)
    described = [CAPTIONS[key] for key in names]
    return f"{', '.join(described)}.".capitalize()


def _panels(figure: Figure, number: int) -> Sequence[Axes]:
    """Return panels below each other with the same x-axis."""
    grid = figure.subplots(number, sharex=True, squeeze=False)
    return [row[0] for row in grid]


def leave_out_beginning(axes: Axes) -> bool:
    """Limit the y-axis if long curves have a steep first part, which is then above the frame."""
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
        return False
    lowest = min(every)
    height = max(later) - min(later)
    # With the steep part, the rest of each curve would look like a flat line.
    is_steep = max(every) - lowest > 3 * height
    if not is_steep or height == 0:
        return False
    bottom = lowest - 0.1 * height
    top = max(later) + 0.2 * height
    axes.set_ylim(bottom, top)
    return True


def _draw_references(axes: Axes, references: Sequence[dict[str, float]], form: str) -> list[str]:
    """Draw a line for each reference value that all runs share and that is not above the frame.

    Return the names of the lines.
    """
    if not _has_data(axes):
        return []
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
    return [name for _, name in visible]


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
