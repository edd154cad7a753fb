"""Figures of runs as PNG bytes. The page scales them to its width."""

import io
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator, StrMethodFormatter

from gpt2_repro.reference_band import NAME, band
from gpt2_repro.report.facts import baseline_losses, hellaswag_lines
from gpt2_repro.report.read import Row, Run, is_number, mapping, points


# The colour-blind-safe palette of Okabe and Ito without yellow, which is faint on white.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072b2", "#d55e00", "#009e73", "#a4262c", "#a0508a", "#56b4e9"
GREY = "#5a5f66"
RUN_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)
SET_COLOURS = (GREEN, PURPLE, RED)  # of further validation sets
DASHED: dict[str, Any] = {"color": GREY, "linewidth": 1, "linestyle": (0, (5, 3))}
STYLE: dict[Any, Any] = {
    "figure.figsize": (5.6, 3.4),  # small enough that its text is readable on a phone
    "figure.dpi": 220,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "xtick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.4,
    "axes.xmargin": 0.02,
}
End = tuple[float, str, str]  # where a curve ends, its label, its colour


def run_figures(run: Run) -> dict[str, bytes]:
    """Return the figures of one run by file name, without those for which nothing is logged."""
    figures: dict[str, bytes] = {}
    if points(run.training, "loss")[0] or points(run.validation, "eval_loss")[0]:
        figures["loss"] = render(lambda figure: _draw_loss(figure, run))
    if compared := _beside_reference(run):
        figures["reference"] = render(lambda figure: _draw_reference(figure, compared))
    if run.hellaswag:
        figures["hellaswag"] = render(lambda figure: _draw_hellaswag(figure, [run], [run.name]))
    if points(run.training, "learning_rate")[0]:
        figures["learning_rate"] = render(lambda figure: _draw_learning_rate(figure, run))
    if points(run.training, "tokens_per_second")[0]:
        figures["throughput"] = render(lambda figure: _draw_throughput(figure, run))
    return figures


def overlay_figures(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, bytes]:
    """Return the figures that compare several runs: validation loss and HellaSwag over tokens."""
    figures = {}
    if any(run.validation for run in runs):
        figures["loss"] = render(lambda figure: _draw_overlay(figure, runs, labels))
    if any(run.hellaswag for run in runs):
        figures["hellaswag"] = render(lambda figure: _draw_hellaswag(figure, runs, labels))
    return figures


def render(draw: Callable[[Figure], None]) -> bytes:
    """Draw a figure and return it as PNG."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(facecolor="white")
        FigureCanvasAgg(figure)
        draw(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def legend(axes: Axes, columns: int = 2) -> None:
    """Place the legend above the axes; long names keep their end."""
    handles, names = axes.get_legend_handles_labels()
    shown = [name if len(name) <= 36 else f"…{name[-35:]}" for name in names]
    axes.legend(handles, shown, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2)


def smooth(values: Sequence[float]) -> list[float]:
    """Return the centred mean over a fiftieth of the values; the window shrinks at both ends."""
    half = max(1, len(values) // 100)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    reaches = [min(half, i, len(values) - 1 - i) for i in range(len(values))]
    return [(sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1) for i, reach in enumerate(reaches)]


def _finish(axes: Axes, ends: list[End], references: dict[str, float], number: str = "{:.3f}") -> None:
    """Label the axis of tokens, draw horizontal references, and label lines and curve ends at the right edge."""
    axes.set_xlabel("tokens trained")
    axes.xaxis.set_major_formatter(_thousands())
    if axes.dataLim.x1 <= 0:  # validated before the first step only
        axes.set_xlim(0, 1)
    for name, value in references.items():
        axes.axhline(value, **DASHED)
        ends = [*ends, (value, f"{name} {number.format(value)}", GREY)]
    bottom, top = axes.get_ylim()
    line_height = 0.06  # of a label, as a fraction of the axes
    lowest = float("-inf")
    for value, text, colour in sorted(end for end in ends if bottom <= end[0] <= top):
        place = max((value - bottom) / (top - bottom), lowest)
        lowest = place + line_height
        axes.annotate(
            text, (1, place), (6, 0), "axes fraction", "offset points", va="center", color=colour, fontsize=8
        )


def _thousands() -> EngFormatter:
    """Format numbers as `200 M` and `1.5 B`, not `1.5 G`."""
    formatter = EngFormatter(sep=" ")
    formatter.ENG_PREFIXES = {**EngFormatter.ENG_PREFIXES, 3: "K", 9: "B"}
    return formatter


def _marker(values: Sequence[float]) -> str:
    """Return a dot for a few points, which a line alone would not show."""
    return "." if len(values) < 10 else ""


def _draw_loss(figure: Figure, run: Run) -> None:
    axes = figure.subplots()
    tokens, losses = points(run.training, "loss")
    if tokens:
        axes.plot(tokens, losses, color=SKY, linewidth=0.8, marker=_marker(tokens), label="training")
        axes.plot(tokens, smooth(losses), color=BLUE, linewidth=1.8, label="smoothed")
    _draw_band(axes, run)
    ends = []
    tokens, losses = points(run.validation, "eval_loss")
    if tokens:
        axes.plot(tokens, losses, "o", color=ORANGE, markersize=4, label="validation")
        ends.append((losses[-1], f"validation {losses[-1]:.3f}", ORANGE))
    for number, name in enumerate(run.further_sets):
        colour, label = SET_COLOURS[number % len(SET_COLOURS)], name if len(name) <= 13 else f"{name[:12]}…"
        tokens, losses = points(run.validation, f"eval_{name}_loss")
        if tokens:  # labelled at the right edge only
            axes.plot(tokens, losses, "s", color=colour, markersize=3.5)
            ends.append((losses[-1], f"{label} {losses[-1]:.3f}", colour))
    axes.set_ylabel("loss (nats per token)")
    leave_out_beginning(axes, [points(run.training, "loss"), points(run.validation, "eval_loss")])
    _finish(axes, ends, run.reference_losses | baseline_losses(run))
    legend(axes, columns=4)


def leave_out_beginning(axes: Axes, curves: Sequence[tuple[list[float], list[float]]]) -> None:
    """Cut off the steep beginning of long curves, so that the rest is not a flat line."""
    later = [y for tokens, losses in curves for x, y in zip(tokens, losses, strict=True) if x >= tokens[-1] / 20]
    every = [y for _, losses in curves for y in losses]
    is_long = max((len(losses) for _, losses in curves), default=0) >= 20
    if is_long and max(every) - min(every) > 3 * (height := max(later) - min(later)):
        axes.set_ylim(min(every) - 0.1 * height, max(later) + 0.2 * height)


def _draw_band(axes: Axes, run: Run) -> bool:
    """Shade the band of the run's reference. Returns whether there is one."""
    if not (limits := _band_of(run)):
        return False
    tokens, lows, highs = zip(*limits, strict=True)
    axes.fill_between(tokens, lows, highs, color=GREEN, alpha=0.35, linewidth=0, label=NAME)
    return True


def _band_of(run: Run) -> list[tuple[float, float, float]]:
    """Return tokens, lowest and highest loss of the reference at each validation, if the run has a reference."""
    if run.environment.get("reference") is None:
        return []
    rows = [row for row in run.validation if is_number(row.get("tokens"))]
    return [(row["tokens"], *limits) for row in rows if (limits := band(int(row["step"])))]


def _beside_reference(run: Run) -> list[tuple[float, float, float]]:
    """Return tokens, validation loss minus the middle of the band, and half of the band's width."""
    losses = dict(zip(*points(run.validation, "eval_loss"), strict=True))
    return [
        (tokens, losses[tokens] - (low + high) / 2, (high - low) / 2)
        for tokens, low, high in _band_of(run)
        if tokens in losses
    ]


def _draw_reference(figure: Figure, compared: Sequence[tuple[float, float, float]]) -> None:
    """Draw the validation losses relative to the published runs."""
    axes = figure.subplots()
    tokens, differences, halves = zip(*compared, strict=True)
    outline = [-half for half in halves], list(halves)
    axes.fill_between(tokens, *outline, color=GREEN, alpha=0.25, linewidth=0, label=f"{NAME}, three runs")
    axes.plot(tokens, differences, "o-", color=ORANGE, markersize=4, linewidth=1, label="this run")
    axes.axhline(0, color=GREY, linewidth=1)
    # One loss far outside would make a line of the band.
    widest = 4 * max(halves)
    axes.set_ylim(max(min(*differences, -widest / 2), -widest), min(max(*differences, widest / 2), widest))
    axes.set_ylabel("difference to the band (nats)")
    _finish(axes, [], {})
    legend(axes)


def _draw_curves(axes: Axes, curves: Sequence[Sequence[Row]], labels: Sequence[str], key: str) -> list[End]:
    """Draw one curve per run and return its end."""
    ends = []
    for number, rows in enumerate(curves):
        tokens, values = points(rows, key)
        colour, line = RUN_COLOURS[number % len(RUN_COLOURS)], ("-", "--", ":")[number // len(RUN_COLOURS) % 3]
        if tokens:
            axes.plot(tokens, values, line, color=colour, marker="o", markersize=3.5, label=labels[number])
            ends.append((values[-1], f"{values[-1]:.4f}", colour))
    return ends


def _draw_hellaswag(figure: Figure, runs: Sequence[Run], labels: Sequence[str]) -> None:
    axes = figure.subplots()
    ends = _draw_curves(axes, [run.hellaswag for run in runs], labels, "hellaswag_acc")
    axes.set_ylabel("HellaSwag, accuracy")
    _finish(axes, ends, _common([hellaswag_lines(run) for run in runs if run.hellaswag]), "{:.4f}")
    if len(runs) > 1:
        legend(axes)


def _draw_overlay(figure: Figure, runs: Sequence[Run], labels: Sequence[str]) -> None:
    axes = figure.subplots()
    _draw_curves(axes, [run.validation for run in runs], labels, "eval_loss")
    any(_draw_band(axes, run) for run in runs)  # one is enough
    leave_out_beginning(axes, [points(run.validation, "eval_loss") for run in runs])
    axes.set_ylabel("validation loss (nats per token)")
    _finish(axes, [], _common([run.reference_losses | baseline_losses(run) for run in runs]))
    legend(axes)


def _common(lines: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the horizontal lines that all runs share."""
    return {name: value for name, value in lines[0].items() if all(its.get(name) == value for its in lines)}


def _draw_learning_rate(figure: Figure, run: Run) -> None:
    tokens, norms = points(run.training, "grad_norm")
    upper, *lower = figure.subplots(
        2 if tokens else 1, sharex=True, height_ratios=[3, 2] if tokens else None, squeeze=False
    )[:, 0]
    upper.plot(*points(run.training, "learning_rate"), color=BLUE)
    upper.set_ylabel("learning rate")
    upper.set_ylim(bottom=0)
    upper.ticklabel_format(axis="y", scilimits=(0, 0), useMathText=True)
    for axes in lower:
        axes.plot(tokens, norms, color=PURPLE, linewidth=0.8, marker=_marker(tokens))
        axes.set_ylabel("gradient norm")
        if min(norms) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.yaxis.set_minor_locator(NullLocator())
        clip = mapping(run.recipe.get("training")).get("max_grad_norm")
        if is_number(clip) and clip > 0:
            axes.axhline(clip, **DASHED)
            place = {"xycoords": ("axes fraction", "data"), "xytext": (0, 3), "textcoords": "offset points"}
            axes.annotate(f"clipped at {clip:g}", (1, clip), ha="right", color=GREY, **place)
    # After the curves: it reads their limits.
    _finish(lower[0] if lower else upper, [], {})


def _draw_throughput(figure: Figure, run: Run) -> None:
    tokens, speeds = points(run.training, "tokens_per_second")
    _, shares = points(run.training, "mfu")
    axes = figure.subplots()
    axes.plot(tokens, speeds, color=GREEN, linewidth=0.8, marker=_marker(tokens))
    axes.set_ylabel("tokens per second")
    axes.yaxis.set_major_formatter(_thousands())
    axes.set_ylim(0, 1.1 * max(speeds))
    median = statistics.median(speeds)
    ends = [(median, f"MFU {statistics.median(shares):.1%}", GREY)] if shares else []
    _finish(axes, ends, {"median": median}, "{:,.0f}")
