"""Figures as PNG bytes, each in a wide and a narrow cut, so that their text stays readable on a phone."""

import statistics
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator, StrMethodFormatter

from gpt2_repro.reference_band import GPT2_LOSS, NAME, band
from gpt2_repro.report.paper import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, Png, finish, marker, render
from gpt2_repro.report.read import Run, is_number, mapping, points


FURTHER = (GREEN, PURPLE, RED)  # validation sets beside the main one


def run_figures(run: Run) -> dict[str, Png]:
    """The figures of one run by the name of their file; only those for which something is logged."""
    figures: dict[str, Png] = {}
    if points(run.training, "loss")[0] or points(run.validation, "eval_loss")[0]:
        figures["loss"] = render(lambda figure: _draw_loss(figure, run))
    if compared := _beside_reference(run):
        figures["reference"] = render(lambda figure: _draw_reference(figure, compared))
    if points(run.training, "learning_rate")[0]:
        figures["learning_rate"] = render(lambda figure: _draw_learning_rate(figure, run))
    if points(run.training, "tokens_per_second")[0]:
        figures["throughput"] = render(lambda figure: _draw_throughput(figure, run))
    return figures


def overlay_figure(runs: Sequence[Run], labels: Sequence[str]) -> Png:
    """The validation losses of several runs over the tokens that they have seen."""
    return render(lambda figure: _draw_overlay(figure, runs, labels))


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
    steps, losses = points(run.training, "loss")
    if steps:
        axes.plot(steps, losses, color=SKY, linewidth=0.8, marker=marker(steps), label="training")
        axes.plot(steps, smooth(losses), color=BLUE, linewidth=1.8, label="smoothed")
    ends = []
    steps, losses = points(run.validation, "eval_loss")
    if steps:
        axes.plot(steps, losses, color=ORANGE, marker="o", markersize=4, linewidth=0, label="validation")
        ends.append((losses[-1], f"validation {losses[-1]:.3f}", ORANGE))
    for number, name in enumerate(run.further_sets):
        colour, label = FURTHER[number % len(FURTHER)], name if len(name) <= 13 else f"{name[:12]}…"
        steps, losses = points(run.validation, f"eval_{name}_loss")
        if steps:
            # Named at the right edge only: the legend has no room for more on a phone.
            axes.plot(steps, losses, color=colour, marker="s", markersize=3.5, linewidth=0)
            ends.append((losses[-1], f"{label} {losses[-1]:.3f}", colour))
    axes.set_ylabel("loss (nats per token)")
    published = {"GPT-2": GPT2_LOSS} if run.environment.get("reference") else {}
    finish(axes, ends, run.reference_losses | published)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)


def _beside_reference(run: Run) -> list[tuple[float, float, float]]:
    """Step, validation loss less the middle of the reference's band, half of the band's width; where there is a band."""
    if run.environment.get("reference") is None:
        return []
    found = []
    for step, loss in zip(*points(run.validation, "eval_loss"), strict=True):
        if limits := band(int(step)):
            found.append((step, loss - sum(limits) / 2, (limits[1] - limits[0]) / 2))
    return found


def _draw_reference(figure: Figure, compared: Sequence[tuple[float, float, float]]) -> None:
    """The validation losses beside the published runs, on a scale on which their band is wide."""
    axes = figure.subplots()
    steps, differences, halves = zip(*compared, strict=True)
    outline = [-half for half in halves], list(halves)
    axes.fill_between(steps, *outline, color=GREEN, alpha=0.25, linewidth=0, label=f"{NAME}, three runs")
    axes.plot(steps, differences, "o-", color=ORANGE, markersize=4, linewidth=1, label="this run")
    axes.axhline(0, color=GREY, linewidth=1)
    # One loss far outside would make a line of the band.
    widest = 4 * max(halves)
    axes.set_ylim(max(min(*differences, -widest / 2), -widest), min(max(*differences, widest / 2), widest))
    axes.set_ylabel("validation loss beside the band (nats)")
    finish(axes, [], {})
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)


def _draw_learning_rate(figure: Figure, run: Run) -> None:
    steps, norms = points(run.training, "grad_norm")
    upper, *lower = figure.subplots(
        2 if steps else 1, sharex=True, height_ratios=[3, 2] if steps else None, squeeze=False
    )[:, 0]
    upper.plot(*points(run.training, "learning_rate"), color=BLUE)
    upper.set_ylabel("learning rate")
    upper.set_ylim(bottom=0)
    upper.ticklabel_format(axis="y", scilimits=(0, 0), useMathText=True)
    finish(lower[0] if lower else upper, [], {})
    if not lower:
        return
    lower[0].plot(steps, norms, color=PURPLE, linewidth=0.8, marker=marker(steps))
    lower[0].set_ylabel("gradient norm")
    if min(norms) > 0:
        lower[0].set_yscale("log")
        lower[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        lower[0].yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        lower[0].yaxis.set_minor_locator(NullLocator())
    clip = mapping(run.recipe.get("training")).get("max_grad_norm")
    if is_number(clip) and clip > 0:
        lower[0].axhline(clip, color=GREY, linewidth=1, linestyle=(0, (5, 3)))
        lower[0].annotate(
            f"clipped at {clip:g}",
            (1, clip),
            (0, 3),
            ("axes fraction", "data"),
            "offset points",
            ha="right",
            color=GREY,
        )


def _draw_throughput(figure: Figure, run: Run) -> None:
    steps, speeds = points(run.training, "tokens_per_second")
    axes = figure.subplots()
    axes.plot(steps, speeds, color=GREEN, linewidth=0.8, marker=marker(steps))
    axes.set_ylabel("tokens per second")
    axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.set_ylim(bottom=0)
    finish(axes, [], {"median": statistics.median(speeds)}, "{:,.0f}")


def _draw_overlay(figure: Figure, runs: Sequence[Run], labels: Sequence[str]) -> None:
    axes = figure.subplots()
    room = int(9 * figure.get_figwidth())  # characters of the legend's font in the width of the figure
    labels = [label if len(label) < room - 6 else f"…{label[7 - room :]}" for label in labels]
    columns = max(1, min(3, len(runs), room // (max(map(len, labels)) + 6)))
    colours = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        tokens, losses = points(run.validation, "eval_loss", x="tokens")
        line = ("-", "--", ":")[number // len(colours) % 3]
        axes.plot(tokens, losses, line, color=colours[number % len(colours)], marker="o", markersize=3.5, label=label)
    references = [run.reference_losses for run in runs]
    axes.set_ylabel("validation loss (nats per token)")
    finish(axes, [], references[0] if all(losses == references[0] for losses in references) else {})
    axes.set_xlabel("tokens seen")
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2)
