"""Figures as PNG bytes, each in a wide and a narrow cut, so that their text stays readable on a phone."""

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from gpt2_repro.reference_band import NAME, band
from gpt2_repro.report.facts import baseline_losses, hellaswag_lines
from gpt2_repro.report.paper import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SIZES,
    SKY,
    Png,
    finish,
    marker,
    render,
    thousands,
)
from gpt2_repro.report.read import Run, is_number, mapping, points


COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)  # of runs
FURTHER = (GREEN, PURPLE, RED)  # validation sets beside the main one


def run_figures(run: Run) -> dict[str, Png]:
    """The figures of one run by the name of their file; only those for which something is logged."""
    figures: dict[str, Png] = {}
    if points(run.training, "loss")[0] or points(run.validation, "eval_loss")[0]:
        figures["loss"] = render(lambda figure: _draw_loss(figure, run))
    if compared := _beside_reference(run):
        figures["reference"] = render(lambda figure: _draw_reference(figure, compared))
    if run.hellaswag:
        figures["hellaswag"] = render(lambda figure: _draw_hellaswag(figure, [run], [""]))
    if points(run.training, "learning_rate")[0]:
        figures["learning_rate"] = render(lambda figure: _draw_learning_rate(figure, run))
    if points(run.training, "tokens_per_second")[0]:
        figures["throughput"] = render(lambda figure: _draw_throughput(figure, run))
    return figures


def overlay_figures(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, Png]:
    """The validation losses of several runs and their HellaSwag over the tokens that they have seen."""
    figures = {}
    if any(run.validation for run in runs):
        figures["loss"] = render(lambda figure: _draw_overlay(figure, runs, labels))
    if any(run.hellaswag for run in runs):
        figures["hellaswag"] = render(lambda figure: _draw_hellaswag(figure, runs, labels))
    return figures


def smooth(values: Sequence[float]) -> list[float]:
    """The centred mean over a fiftieth of the values; the window narrows at the ends, so that it stays centred."""
    half = max(1, len(values) // 100)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    reaches = [min(half, i, len(values) - 1 - i) for i in range(len(values))]
    return [(sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1) for i, reach in enumerate(reaches)]


def _draw_loss(figure: Figure, run: Run) -> None:
    axes = figure.subplots()
    tokens, losses = points(run.training, "loss")
    if tokens:
        axes.plot(tokens, losses, color=SKY, linewidth=0.8, marker=marker(tokens), label="training")
        axes.plot(tokens, smooth(losses), color=BLUE, linewidth=1.8, label="smoothed")
    has_band = _draw_band(axes, run)
    ends = []
    tokens, losses = points(run.validation, "eval_loss")
    if tokens:
        axes.plot(tokens, losses, color=ORANGE, marker="o", markersize=4, linewidth=0, label="validation")
        ends.append((losses[-1], f"validation {losses[-1]:.3f}", ORANGE))
    for number, name in enumerate(run.further_sets):
        colour, label = FURTHER[number % len(FURTHER)], name if len(name) <= 13 else f"{name[:12]}…"
        tokens, losses = points(run.validation, f"eval_{name}_loss")
        if tokens:
            # Named at the right edge only: the legend has no room for more on a phone.
            axes.plot(tokens, losses, color=colour, marker="s", markersize=3.5, linewidth=0)
            ends.append((losses[-1], f"{label} {losses[-1]:.3f}", colour))
    axes.set_ylabel("loss (nats per token)")
    leave_out_beginning(axes, [points(run.training, "loss"), points(run.validation, "eval_loss")])
    finish(axes, ends, run.reference_losses | baseline_losses(run))
    columns = 2 if has_band and figure.get_figwidth() < SIZES["wide"][0] else 4
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2)


def leave_out_beginning(axes: Axes, curves: Sequence[tuple[list[float], list[float]]]) -> None:
    """Where long curves fall far in their first twentieth, let them come from above the frame: the rest would be a line."""
    later: list[float] = []
    for tokens, losses in curves:
        later += [y for x, y in zip(tokens, losses, strict=True) if x >= tokens[-1] / 20]
    every = [y for _, losses in curves for y in losses]
    is_long = max((len(losses) for _, losses in curves), default=0) >= 20
    if is_long and max(every) - min(every) > 3 * (height := max(later) - min(later)):
        axes.set_ylim(min(every) - 0.1 * height, max(later) + 0.2 * height)


def _draw_band(axes: Axes, run: Run) -> bool:
    """Where the reference of a run lies; whether it has one."""
    if not (limits := _band_of(run)):
        return False
    tokens, lows, highs = zip(*limits, strict=True)
    axes.fill_between(tokens, lows, highs, color=GREEN, alpha=0.35, linewidth=0, label=NAME)
    return True


def _band_of(run: Run) -> list[tuple[float, float, float]]:
    """Tokens, lowest and highest loss of the reference at each validation of a run that follows one."""
    if run.environment.get("reference") is None:
        return []
    found = []
    for row in run.validation:
        if is_number(row.get("tokens")) and (limits := band(int(row["step"]))):
            found.append((row["tokens"], *limits))
    return found


def _beside_reference(run: Run) -> list[tuple[float, float, float]]:
    """Tokens, validation loss less the middle of the reference's band, half of the band's width; where there is a band."""
    losses = dict(zip(*points(run.validation, "eval_loss"), strict=True))
    return [
        (tokens, losses[tokens] - (low + high) / 2, (high - low) / 2)
        for tokens, low, high in _band_of(run)
        if tokens in losses
    ]


def _draw_reference(figure: Figure, compared: Sequence[tuple[float, float, float]]) -> None:
    """The validation losses beside the published runs, on a scale on which their band is wide."""
    axes = figure.subplots()
    tokens, differences, halves = zip(*compared, strict=True)
    outline = [-half for half in halves], list(halves)
    axes.fill_between(tokens, *outline, color=GREEN, alpha=0.25, linewidth=0, label=f"{NAME}, three runs")
    axes.plot(tokens, differences, "o-", color=ORANGE, markersize=4, linewidth=1, label="this run")
    axes.axhline(0, color=GREY, linewidth=1)
    # One loss far outside would make a line of the band.
    widest = 4 * max(halves)
    axes.set_ylim(max(min(*differences, -widest / 2), -widest), min(max(*differences, widest / 2), widest))
    axes.set_ylabel("validation loss beside the band (nats)")
    finish(axes, [], {})
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)


def _draw_hellaswag(figure: Figure, runs: Sequence[Run], labels: Sequence[str]) -> None:
    axes = figure.subplots()
    ends, drawn = [], []
    for number, run in enumerate(runs):
        tokens, accuracies = points(run.hellaswag, "hellaswag_acc")
        if tokens:
            drawn.append(number)
            axes.plot(
                tokens,
                accuracies,
                _line(number),
                color=_colour(number),
                marker="o",
                markersize=3.5,
                label=labels[number],
            )
            ends.append((accuracies[-1], f"{accuracies[-1]:.4f}", _colour(number)))
    axes.set_ylabel("HellaSwag, accuracy")
    finish(axes, ends, common([hellaswag_lines(runs[number]) for number in drawn]), "{:.4f}")
    if len(runs) > 1:
        _legend(axes, figure, [labels[number] for number in drawn])


def common(lines: Sequence[dict[str, float]]) -> dict[str, float]:
    """The horizontal lines that all runs have."""
    return (
        {name: value for name, value in lines[0].items() if all(its.get(name) == value for its in lines)}
        if lines
        else {}
    )


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
        axes.plot(tokens, norms, color=PURPLE, linewidth=0.8, marker=marker(tokens))
        _dress_norms(axes, norms, mapping(run.recipe.get("training")).get("max_grad_norm"))
    # Behind the curves: it looks at where they lie.
    finish(lower[0] if lower else upper, [], {})


def _dress_norms(axes: Axes, norms: Sequence[float], clip: object) -> None:
    axes.set_ylabel("gradient norm")
    if min(norms) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    if is_number(clip) and clip > 0:
        axes.axhline(clip, color=GREY, linewidth=1, linestyle=(0, (5, 3)))
        axes.annotate(
            f"clipped at {clip:g}",
            (1, clip),
            (0, 3),
            ("axes fraction", "data"),
            "offset points",
            ha="right",
            color=GREY,
        )


def _draw_throughput(figure: Figure, run: Run) -> None:
    tokens, speeds = points(run.training, "tokens_per_second")
    _, shares = points(run.training, "mfu")
    axes = figure.subplots()
    axes.plot(tokens, speeds, color=GREEN, linewidth=0.8, marker=marker(tokens))
    axes.set_ylabel("tokens per second")
    axes.yaxis.set_major_formatter(thousands())
    axes.set_ylim(0, 1.1 * max(speeds))
    median = statistics.median(speeds)
    ends = [(median, f"MFU {statistics.median(shares):.1%}", GREY)] if shares else []
    finish(axes, ends, {"median": median}, "{:,.0f}")


def _draw_overlay(figure: Figure, runs: Sequence[Run], labels: Sequence[str]) -> None:
    axes = figure.subplots()
    for number, run in enumerate(runs):
        tokens, losses = points(run.validation, "eval_loss")
        axes.plot(
            tokens, losses, _line(number), color=_colour(number), marker="o", markersize=3.5, label=labels[number]
        )
    any(_draw_band(axes, run) for run in runs)  # one is enough
    lines = common([run.reference_losses | baseline_losses(run) for run in runs])
    leave_out_beginning(axes, [points(run.validation, "eval_loss") for run in runs])
    axes.set_ylabel("validation loss (nats per token)")
    finish(axes, [], lines)
    _legend(axes, figure, labels)


def _line(number: int) -> str:
    return ("-", "--", ":")[number // len(COLOURS) % 3]


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _legend(axes: Axes, figure: Figure, labels: Sequence[str]) -> None:
    """Names above the axes, each cut at its beginning where the figure has no room for it."""
    room = int(9 * figure.get_figwidth())  # characters of the legend's font in the width of the figure
    cut = [label if len(label) < room - 6 else f"…{label[7 - room :]}" for label in labels]
    columns = max(1, min(3, len(labels), room // (max(map(len, cut)) + 6)))
    handles, names = axes.get_legend_handles_labels()
    axes.legend(
        handles, cut + names[len(cut) :], loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2
    )
