"""A diagnosis as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from gpt2_repro.comparison import markdown_table


def to_markdown(diagnosis: Mapping[str, Any]) -> str:
    """The tables of a diagnosis.json, its conclusion first."""
    name, baseline = diagnosis["models"][0]["name"], diagnosis["models"][1]["name"]
    lines = [f"# {name} beside {baseline}", "", diagnosis["conclusion"]]
    for title, buckets in (
        ("Loss by domain", diagnosis["domains"]),
        ("Loss by position in the window, of rows that fill it", diagnosis["positions"]),
        (f"Loss by how often a token stands in a million of {diagnosis['frequencies_of']}", diagnosis["frequencies"]),
    ):
        head = ["", "tokens", name, baseline, "difference"]
        if buckets:
            lines += ["", f"## {title}", "", *_table(head, [_bucket(bucket) for bucket in buckets])]
    if start := diagnosis["start_token"]:
        head = ["token", name, baseline, f"{name}, none before", f"{baseline}, none before"]
        cells = [
            [place["label"], *(_loss(place[key]) for key in ("ours", "theirs", "ours_without", "theirs_without"))]
            for place in start["places"]
        ]
        cost = (
            f"The start token changes the loss on the tokens behind the first by {_estimate(start['ours'])} nats, the baseline's "
            f"by {_estimate(start['theirs'])}, {start['documents']:,} documents."
        )
        lines += ["", "## Loss after the start of a document", "", *_table(head, cells), "", cost]
    if ends := diagnosis["separator"]:
        cells = [
            [
                f"{ends['documents']:,}",
                *(_loss(ends[key]["value"]) for key in ("ours", "theirs")),
                _estimate(ends["difference"]),
            ]
        ]
        lines += [
            "",
            "## Loss on the separator at the end of a document, behind 64 tokens or the window",
            "",
            *_table(["documents", name, baseline, "difference"], cells),
        ]
    if diagnosis["last_words"]:
        head = ["log-probability of the last word", "passages", "after", name, baseline, "difference"]
        cells = [row for words in diagnosis["last_words"] for row in _words(words)]
        lines += ["", "## What the context is worth", "", *_table(head, cells)]
    versions = ", ".join(f"{library} {version}" for library, version in diagnosis["versions"].items())
    jump = diagnosis["jump"]
    notes = [
        *([f"By domain and frequency: positions before {jump['position']:,} only"] if jump else []),
        f"Nats; ± one standard error, by documents, of the difference on the same tokens; window {diagnosis['window']:,} tokens, "
        f"{diagnosis['dtype']}, {diagnosis['device']}",
        "No start token stands before these texts, but for the table of document starts",
        *(f"{model['name']}: {model['source']}, revision {model['revision'][:12]}" for model in diagnosis["models"]),
        f"{versions}; {diagnosis['date']}: `{diagnosis['command']}`",
    ]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def _table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    return [markdown_table(head, cells)]


def _bucket(bucket: Mapping[str, Any]) -> list[str]:
    losses = (_loss(bucket[key]) for key in ("ours", "theirs"))
    return [bucket["label"], f"{bucket['tokens']:,}", *losses, _estimate(bucket["difference"])]


def _words(words: Mapping[str, Any]) -> list[list[str]]:
    name, count = words["name"], f"{words['passages']:,}"
    whole, alone, right = words["whole"], words["sentence"], words["right"]
    gain = [after - before for after, before in zip(whole, alone, strict=True)]
    return [
        [name, count, "the whole passage", *map(_loss, whole), _signed(whole[0] - whole[1])],
        [name, count, "its last sentence alone", *map(_loss, alone), _estimate(words["sentence_difference"])],
        [name, count, "gain: the first less the second", *map(_loss, gain), _estimate(words["gain_difference"])],
        [name, count, "guessed after the whole passage", *(f"{share:.1%}" for share in right), ""],
    ]


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}".replace("-", "−")


def _estimate(estimate: Mapping[str, float | None]) -> str:
    error = "" if estimate["stderr"] is None else f" ± {estimate['stderr']:.3f}"
    return f"{_signed(estimate['value'] or 0.0)}{error}"


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
