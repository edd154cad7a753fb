"""The paper that the plots are drawn on: sizes, colours, axes, labels at the right edge."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter


SIZES = {"wide": (9.6, 4.2), "narrow": (4.4, 3.9)}  # inches; the page shows them about 900 and 370 pixels wide
DPI = 160
# The colour-blind-safe set of Okabe and Ito, without its yellow, which is faint on white.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072b2", "#d55e00", "#009e73", "#a4262c", "#a0508a", "#56b4e9"
GREY = "#5a5f66"
STYLE: dict[Any, Any] = {
    "font.size": 10,
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
Png = dict[str, bytes]  # by cut


def render(draw: Callable[[Figure], None]) -> Png:
    """Draw the figure in each cut."""
    cuts: Png = {}
    for cut, size in SIZES.items():
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=size, dpi=DPI, layout="constrained", facecolor="white")
            FigureCanvasAgg(figure)
            draw(figure)
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png")
            cuts[cut] = buffer.getvalue()
    return cuts


def finish(
    axes: Axes, ends: list[tuple[float, str, str]], references: dict[str, float], number: str = "{:.3f}"
) -> None:
    """Name the axis of tokens, draw the horizontal references, and label them and the curves' ends at the right edge."""
    axes.set_xlabel("tokens trained")
    axes.xaxis.set_major_formatter(thousands())
    if axes.dataLim.x1 <= 0:  # of a run that was only validated before its first step
        axes.set_xlim(0, 1)
    for name, value in references.items():
        axes.axhline(value, color=GREY, linewidth=1, linestyle=(0, (5, 3)))
        ends = [*ends, (value, f"{name} {number.format(value)}", GREY)]
    bottom, top = axes.get_ylim()
    ends = [end for end in ends if bottom <= end[0] <= top]  # what the frame leaves out has no label
    line_height = 0.06  # of the axes, for the labels' font size in either cut
    lowest = float("-inf")
    for value, text, colour in sorted(ends):
        place = max((value - bottom) / (top - bottom), lowest)
        lowest = place + line_height
        axes.annotate(
            text, (1, place), (6, 0), "axes fraction", "offset points", va="center", color=colour, fontsize=9
        )


def thousands() -> EngFormatter:
    """Numbers as `200 M` and `1.5 B`: of tokens a billion is no giga."""
    formatter = EngFormatter(sep=" ")
    formatter.ENG_PREFIXES = {**EngFormatter.ENG_PREFIXES, 3: "K", 9: "B"}
    return formatter


def marker(values: Sequence[float]) -> str:
    """A dot for the few points of a young run, which a line alone would not show."""
    return "." if len(values) < 10 else ""
