"""Figures of a diagnosis."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpt2_repro.report.plots import BLUE, GREY, ORANGE, legend, render


Z95 = 1.96


def diagnosis_figures(diagnosis: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the figures of a diagnosis.json by file name; none if it is empty."""
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
    """Draw both losses and, below, their difference with its 95 % interval. Buckets without an axis are unordered."""
    upper, lower = figure.subplots(2, sharex=True, height_ratios=[3, 2])
    places = range(len(buckets))
    for key, name, colour, form in (("ours", names[0], BLUE, "o-"), ("theirs", names[1], ORANGE, "s--")):
        losses = [bucket[key] for bucket in buckets]
        upper.plot(places, losses, form if axis else form[0], color=colour, markersize=4, label=name)
    upper.set_ylabel("nats per token")
    legend(upper)
    differences = [bucket["difference"] for bucket in buckets]
    values = [difference["value"] for difference in differences]
    errors = [Z95 * (difference["stderr"] or 0) for difference in differences]
    lower.errorbar(places, values, yerr=errors, fmt="o", color=BLUE, markersize=4)
    lower.axhline(0, color=GREY, linewidth=1)
    lower.set_ylabel("difference")
    lower.set_xlabel(axis)
    lower.margins(x=0.02 if axis else 0.1)
    _label_places(lower, [bucket["label"] for bucket in buckets])


def _draw_start(figure: Figure, places: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Draw the loss by position in the document, with the start token and without it."""
    axes = figure.subplots()
    for key, name, colour, mark in (("ours", names[0], BLUE, "o"), ("theirs", names[1], ORANGE, "s")):
        losses, without = ([place[field] for place in places] for field in (key, f"{key}_without"))
        axes.plot(losses, f"{mark}-", color=colour, markersize=4, label=name)
        at = [number for number, loss in enumerate(without) if loss is not None]
        kept = [without[number] for number in at]
        axes.plot(at, kept, f"{mark}:", color=colour, markersize=4, alpha=0.6, label="no start token")
    axes.set_ylabel("nats per token")
    axes.set_xlabel("token of the document")
    legend(axes)
    _label_places(axes, [place["label"] for place in places])


def _label_places(axes: Axes, labels: Sequence[str]) -> None:
    crowded = sum(map(len, labels)) > 50
    turned: dict[str, Any] = {"rotation": 55, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(labels)), labels, **turned if crowded else {})
