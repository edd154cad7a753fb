"""Draw figures about runs, as PNG images with captions."""

import functools
import io
import itertools
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from PIL import Image

from gpt2_repro.evaluation.references import NAME, band
from gpt2_repro.report.read import Row, Run, mapping, points
from gpt2_repro.report.tables import baseline_losses, hellaswag_lines
from gpt2_repro.typed_json import is_number


# The colour-blind-safe palette of Okabe and Ito, without yellow, which is hard to see on white.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072b2", "#d55e00", "#009e73", "#a4262c", "#a0508a", "#56b4e9"
GREY = "#5a5f66"
RUN_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)
STYLE: dict[Any, Any] = {
    "figure.figsize": (4.8, 3.1),  # inches; small, so that the text is readable on a phone
    "figure.dpi": 220,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), GREY),
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "axes.xmargin": 0.02,
}
CUT = " The steep first part of the curve is above the frame and not shown."
End = tuple[float, str, str]  # a curve's last value, its label and its colour


class Picture(NamedTuple):
    """A figure as PNG bytes, and a caption that describes only the drawn elements."""

    png: bytes
    caption: str


def run_figures(run: Run) -> dict[str, Picture]:
    """Return the figures of one run. The keys are file names without extension.

    A figure is omitted if the run has not logged the values that it shows.
    """
    losses = points(run.training, "loss")[0] or points(run.validation, "eval_loss")[0]
    figures = {
        "loss": (_draw_loss, losses),
        "reference": (_draw_reference, _reference_differences(run)),
        "hellaswag": (lambda figure, run: _draw_hellaswag(figure, [run], [run.name]), run.hellaswag),
        "learning_rate": (_draw_learning_rate, points(run.training, "learning_rate")[0]),
        "throughput": (_draw_throughput, points(run.training, "tokens_per_second")[0]),
    }
    return {name: render(functools.partial(draw, run=run)) for name, (draw, logged) in figures.items() if logged}


def overlay_figures(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, Picture]:
    """Return figures that compare several runs.

    One figure shows the validation losses, the other figure shows the HellaSwag accuracies. A figure is omitted if no
    run has logged the values that it shows.
    """
    figures = {}
    if any(run.validation for run in runs):
        figures["loss"] = render(lambda figure: _draw_overlay(figure, runs, labels))
    if any(run.hellaswag for run in runs):
        figures["hellaswag"] = render(lambda figure: _draw_hellaswag(figure, runs, labels))
    return figures


def render(draw: Callable[[Figure], str]) -> Picture:
    """Return a figure as a PNG image. `draw` draws the figure and returns the caption."""
    with matplotlib.rc_context(STYLE):
        figure, buffer = Figure(facecolor="white"), io.BytesIO()
        caption = draw(figure)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # the font lacks some scripts; such names are drawn as boxes
            figure.savefig(buffer, format="png")
        small = io.BytesIO()
        Image.open(buffer).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(small, "png", optimize=True)
    return Picture(small.getvalue(), caption)


def legend(axes: Axes, columns: int = 2) -> None:
    """Draw the legend of a plot above the plot area."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2)


def smooth(values: Sequence[float]) -> list[float]:
    """Return the moving average over a centred window of 2 % of the values."""
    half, last = max(1, len(values) // 100), len(values) - 1
    reaches = [min(half, place, last - place) for place in range(len(values))]
    return [statistics.fmean(values[i - reach : i + reach + 1]) for i, reach in enumerate(reaches)]


def leave_out_beginning(axes: Axes, curves: Sequence[tuple[list[float], list[float]]]) -> str:
    """Limit the y-axis so that the steep first part of long curves is not shown.

    Args:
        curves: token counts (x) and values (y) of each curve.

    Returns:
        A sentence for the caption, or an empty string if the y-axis was not changed.
    """
    later = [y for xs, ys in curves for x, y in zip(xs, ys, strict=True) if x >= xs[-1] / 20]
    every = [y for _, ys in curves for y in ys]
    is_long = max((len(ys) for _, ys in curves), default=0) >= 20
    # With the steep part, the rest of each curve would look like a flat line.
    if is_long and max(every) - min(every) > 3 * (height := max(later) - min(later)):
        axes.set_ylim(min(every) - 0.1 * height, max(later) + 0.2 * height)
        return CUT
    return ""


def _finish(axes: Axes, ends: list[End], references: dict[str, float], number: str = "{:.3f}") -> list[str]:
    """Draw the reference lines. Label these lines, the token axis and the curves.

    Args:
        ends: the last value, the label and the colour of each curve.
        references: the value of each reference line, by name.
        number: format of the values in the labels of the reference lines.

    Returns:
        The names of the visible reference lines.
    """
    axes.set_xlabel("tokens trained")
    axes.xaxis.set_major_formatter(_thousands())
    if axes.dataLim.x1 <= 0:  # the only validation was before the first step
        axes.set_xlim(0, 1)
    for name, value in references.items():
        axes.axhline(value, color=GREY, linewidth=1, linestyle=(0, (5, 3)))
        ends = [*ends, (value, f"{name} {number.format(value)}", GREY)]
    bottom, top = axes.get_ylim()
    lowest = float("-inf")
    for value, text, colour in sorted(end for end in ends if bottom <= end[0] <= top):
        place = max((value - bottom) / (top - bottom), lowest)
        lowest = place + 0.06  # height of a label, as a fraction of the axes
        place_text = ("axes fraction", "offset points")
        axes.annotate(text, (1, place), (6, 0), *place_text, va="center", color=colour, fontsize=8)
    return [name for name, value in references.items() if bottom <= value <= top]


def _thousands() -> EngFormatter:
    """Return a formatter that shortens numbers: `16 K`, `200 M`, `1.5 B` (not `G`)."""
    formatter = EngFormatter(sep=" ")
    formatter.ENG_PREFIXES = {**EngFormatter.ENG_PREFIXES, 3: "K", 9: "B"}
    return formatter


def _plot(axes: Axes, run: Run, key: str, colour: str) -> list[float]:
    """Draw the logged training values of `key` as a thin curve. Return these values."""
    tokens, values = points(run.training, key)
    # With fewer than 10 points a line is hard to see, so markers are added.
    axes.plot(tokens, values, color=colour, linewidth=0.8, marker="." if len(tokens) < 10 else "")
    return values


def _draw_loss(figure: Figure, run: Run) -> str:
    axes = figure.subplots()
    curves = [points(run.training, "loss")]
    caption = "Nats per token; lower is better."
    if losses := _plot(axes, run, "loss", SKY):
        axes.plot(curves[0][0], smooth(losses), color=BLUE, linewidth=1.8, label="training, smoothed")
        caption += " Thin line: training loss at each logged step. Bold line: its moving average."
    _draw_band(axes, _band_of(run))
    ends: list[End] = []
    sets = [("validation", "eval_loss"), *((name, f"eval_{name}_loss") for name in run.further_sets)]
    for (name, key), colour in zip(sets, itertools.cycle((ORANGE, GREEN, PURPLE, RED)), strict=False):
        tokens, losses = points(run.validation, key)
        curves.append((tokens, losses))
        if tokens:
            # Only the main validation set is in the legend; the other sets are labelled at the right edge.
            label = name if key == "eval_loss" else None
            axes.plot(tokens, losses, "o", color=colour, markersize=4, label=label)
            ends.append((losses[-1], f"{name[:13]} {losses[-1]:.3f}", colour))
    if ends:
        caption += f" Dots: loss on the validation {'sets' if len(ends) > 1 else 'split'}."
    axes.set_ylabel("loss (nats per token)")
    caption += leave_out_beginning(axes, [curve for curve in curves if curve[0]])
    shown = _finish(axes, ends, run.reference_losses | baseline_losses(run))
    legend(axes, columns=3)
    return caption + _explain(axes, run, shown)


def _explain(axes: Axes, run: Run, shown: Sequence[str]) -> str:
    """Return the caption that explains the reference lines named in `shown`."""
    counting = [name for name in shown if name in run.reference_losses]
    caption = f" Dashed, {' and '.join(counting)}: n-gram models built from the training split." if counting else ""
    for name in baseline_losses(run).keys() & {*shown}:
        measured = f"{run.diagnosis['models'][1]['name']}, based on the difference measured by the diagnosis"
        published = "published loss of OpenAI's model on this validation set"
        caption += f" Dashed, {name}: {measured if name == 'baseline' else published}."
    bottom, top = axes.get_ylim()
    visible = [low < top and high > bottom for _, low, high in _band_of(run)]
    return caption + (" Green band: the range of three published runs of llm.c." if sum(visible) > 1 else "")


def _band_of(run: Run) -> list[tuple[float, float, float]]:
    """Return the range of the published runs' losses at each validation of `run`.

    Each item is (tokens, lowest loss, highest loss).
    """
    rows = [row for row in run.validation if run.environment.reference and is_number(row.get("tokens"))]
    return [(row["tokens"], *limits) for row in rows if (limits := band(int(row["step"])))]


def _draw_band(axes: Axes, limits: Sequence[tuple[float, float, float]]) -> None:
    """Shade the range of the published runs' losses.

    Each item of `limits` is (tokens, lowest loss, highest loss). If `limits` is empty, nothing is drawn.
    """
    if limits:
        tokens, lows, highs = zip(*limits, strict=True)
        axes.fill_between(tokens, lows, highs, color=GREEN, alpha=0.35, linewidth=0, label=NAME)


def _reference_differences(run: Run) -> list[tuple[float, float, float]]:
    """Return the differences between the run's validation losses and published losses.

    At each validation, the losses of the published runs form a range. The difference is the run's loss minus the
    middle of this range. Each item is (tokens, difference in nats, half the width of the range).
    """
    losses = dict(zip(*points(run.validation, "eval_loss"), strict=True))
    return [(at, losses[at] - (low + high) / 2, (high - low) / 2) for at, low, high in _band_of(run) if at in losses]


def _draw_reference(figure: Figure, run: Run) -> str:
    """Draw the differences between the run's validation losses and published losses."""
    axes = figure.subplots()
    tokens, differences, halves = zip(*_reference_differences(run), strict=True)
    lows = [-half for half in halves]
    axes.fill_between(tokens, lows, halves, color=GREEN, alpha=0.25, linewidth=0, label=f"{NAME}, three runs")
    axes.plot(tokens, differences, "o-", color=ORANGE, markersize=4, linewidth=1, label="this run")
    # Fixed limits: a single loss far outside would make the band look like a line.
    limit = 4 * max(halves)
    axes.set_ylim(-limit, limit)
    axes.set_ylabel("difference (nats)")
    _finish(axes, [], {})
    legend(axes)
    return (
        "Validation loss minus the middle of the range of three published llm.c runs, which use the same recipe and "
        "the same data (gpt2_repro/evaluation/references.yaml). Shaded: the range of these runs."
        + (" Some points are outside the frame." if max(map(abs, differences)) > limit else "")
    )


def _draw_curves(axes: Axes, curves: Sequence[Sequence[Row]], labels: Sequence[str], key: str) -> list[End]:
    """Draw the metric `key` over the tokens, one curve for each run.

    Returns the last value, the label and the colour of each curve.
    """
    ends = []
    for number, rows in enumerate(curves):
        tokens, values = points(rows, key)
        colour, line = RUN_COLOURS[number % len(RUN_COLOURS)], ("-", "--", ":")[number // len(RUN_COLOURS) % 3]
        if tokens:
            axes.plot(tokens, values, line, color=colour, marker="o", markersize=3.5, label=labels[number])
            ends.append((values[-1], f"{values[-1]:.4f}", colour))
    return ends


def _draw_hellaswag(figure: Figure, runs: Sequence[Run], labels: Sequence[str]) -> str:
    axes = figure.subplots()
    ends = _draw_curves(axes, [run.hellaswag for run in runs], labels, "hellaswag_acc")
    axes.set_ylabel("HellaSwag accuracy")
    shown = _finish(axes, ends, _common([hellaswag_lines(run) for run in runs if run.hellaswag]), "{:.4f}")
    if len(runs) > 1:
        legend(axes)
    caption = (
        "Accuracy during training in llm.c's completion style: the ending with the lowest loss per token is chosen. "
        "The evaluation task hellaswag changes the text before scoring, so its scores differ."
    )
    return caption + (f" Dashed: {' and '.join(shown)} of the nearest size, as reported by llm.c." if shown else "")


def _draw_overlay(figure: Figure, runs: Sequence[Run], labels: Sequence[str]) -> str:
    axes = figure.subplots()
    _draw_curves(axes, [run.validation for run in runs], labels, "eval_loss")
    longest = max(runs, key=lambda run: len(_band_of(run)))
    _draw_band(axes, _band_of(longest))  # the same band for all runs; this run covers most of it
    cut = leave_out_beginning(axes, [points(run.validation, "eval_loss") for run in runs])
    axes.set_ylabel("validation loss (nats per token)")
    shown = _finish(axes, [], _common([run.reference_losses | baseline_losses(run) for run in runs]))
    legend(axes)
    same = "Compare runs only if they validate on the same text with the same tokenizer."
    return f"Nats per token; lower is better. {same}{cut}{_explain(axes, longest, shown)}"


def _common(lines: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the reference lines that are the same for all runs."""
    return dict(set.intersection(*(set(its.items()) for its in lines)))


def _draw_learning_rate(figure: Figure, run: Run) -> str:
    norms = points(run.training, "grad_norm")
    rows = 2 if norms[0] else 1
    upper, *lower = figure.subplots(rows, sharex=True, height_ratios=[3, 2][:rows], squeeze=False)[:, 0]
    _plot(upper, run, "learning_rate", BLUE)
    upper.set_ylabel("learning rate")
    upper.set_ylim(bottom=0)
    upper.ticklabel_format(axis="y", scilimits=(0, 0), useMathText=True)
    clip = mapping(run.recipe.get("training")).get("max_grad_norm")
    caption = "Learning rate at each logged step."
    for axes in lower:
        _plot(axes, run, "grad_norm", PURPLE)
        axes.set_ylabel("gradient norm")
        cut = leave_out_beginning(axes, [norms])
        caption = f"Top: learning rate. Bottom: gradient norm of all parameters, before clipping.{cut}"
    _finish([upper, *lower][-1], [], {"clipped at": clip} if lower and is_number(clip) and clip > 0 else {}, "{:g}")
    return caption


def _draw_throughput(figure: Figure, run: Run) -> str:
    axes = figure.subplots()
    speeds = _plot(axes, run, "tokens_per_second", GREEN)
    axes.set_ylabel("tokens per second")
    axes.yaxis.set_major_formatter(_thousands())
    axes.set_ylim(0, 1.1 * max(speeds))
    median = statistics.median(speeds)
    shares = points(run.training, "mfu")[1]
    ends = [(median, f"MFU {statistics.median(shares):.1%}", GREY)] if shares else []
    _finish(axes, ends, {"median": median}, "{:,.0f}")
    return f"Tokens per second of all processes. Dashed: median{', with model FLOPs utilization' if shares else ''}."
