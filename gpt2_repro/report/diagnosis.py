"""The figures of a diagnosis."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpt2_repro.report.paper import BLUE, DPI, GREY, ORANGE, Png, render


Z95 = 1.96


def diagnosis_figures(diagnosis: Mapping[str, Any]) -> dict[str, Png]:
    """The figures of a diagnosis.json by the name of their file; none of an empty one."""
    if not diagnosis:
        return {}
    names = [model["name"] for model in diagnosis["models"]]
    figures = {}
    for name, axis in (
        ("positions", "position in the window"),
        ("frequencies", f"of a million tokens of {diagnosis['frequencies_of']}"),
        ("domains", ""),
    ):
        if buckets := diagnosis[name]:
            figures[name] = render(functools.partial(_draw_buckets, buckets=buckets, names=names, axis=axis))
    if diagnosis["start_token"]:
        figures["document_start"] = render(
            lambda figure: _draw_start(figure, diagnosis["start_token"]["places"], names)
        )
    return figures


def _draw_buckets(figure: Figure, *, buckets: Sequence[Mapping[str, Any]], names: Sequence[str], axis: str) -> None:
    """Both losses above, their difference with its 95 % interval below. Buckets without an axis have no order."""
    upper, lower = figure.subplots(2, sharex=True, height_ratios=[3, 2])
    places = range(len(buckets))
    for key, name, colour, form in (("ours", names[0], BLUE, "o-"), ("theirs", names[1], ORANGE, "s--")):
        losses = [bucket[key] for bucket in buckets]
        upper.plot(
            places, losses, form if axis else form[0], color=colour, markersize=4, label=_shortened(name, figure)
        )
    upper.set_ylabel("nats per token")
    _legend(upper)
    differences = [bucket["difference"] for bucket in buckets]
    lower.errorbar(
        places,
        [difference["value"] for difference in differences],
        yerr=[Z95 * (difference["stderr"] or 0) for difference in differences],
        fmt="o",
        color=BLUE,
        markersize=4,
    )
    lower.axhline(0, color=GREY, linewidth=1)
    lower.set_ylabel("difference")
    lower.set_xlabel(axis)
    lower.margins(x=0.02 if axis else 0.1)
    _name_places(lower, [bucket["label"] for bucket in buckets])


def _draw_start(figure: Figure, places: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Loss by the place behind a document's start, with the start token and without it."""
    axes = figure.subplots()
    for key, name, colour, mark in (("ours", names[0], BLUE, "o"), ("theirs", names[1], ORANGE, "s")):
        label = _shortened(name, figure)
        axes.plot(
            range(len(places)), [place[key] for place in places], f"{mark}-", color=colour, markersize=4, label=label
        )
        without = [
            (at, place[f"{key}_without"]) for at, place in enumerate(places) if place[f"{key}_without"] is not None
        ]
        axes.plot(
            *zip(*without, strict=True), f"{mark}:", color=colour, markersize=4, alpha=0.6, label="no start token"
        )
    axes.set_ylabel("nats per token")
    axes.set_xlabel("token of the document")
    _legend(axes)
    _name_places(axes, [place["label"] for place in places])


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)


def _shortened(name: str, figure: Figure) -> str:
    """As much of the end of a name as two of them have room for in the width of the figure."""
    room = int(4 * figure.get_figwidth())
    return name if len(name) <= room else f"…{name[1 - room :]}"


def _name_places(axes: Axes, labels: Sequence[str]) -> None:
    narrow = axes.get_window_extent().width < 6 * DPI
    turn = len(labels) > (5 if narrow else 14)
    turned: dict[str, Any] = {"rotation": 55, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(labels)), labels, fontsize=8, **turned if turn else {})
