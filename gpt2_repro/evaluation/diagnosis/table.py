"""A diagnosis as Markdown."""

from collections.abc import Mapping
from typing import Any

from gpt2_repro.comparison import diagnosis_tables, markdown_table


def to_markdown(diagnosis: Mapping[str, Any]) -> str:
    """Return the conclusion, the tables and notes of a diagnosis.json."""
    name, baseline = (model["name"] for model in diagnosis["models"])
    parts = [f"# {name} compared with {baseline}", diagnosis["conclusion"]]
    for title, (headers, rows) in diagnosis_tables(diagnosis).items():
        parts += [f"## {title}", markdown_table(headers, [[cell.text for cell in row] for row in rows])]
    versions = ", ".join(f"{library} {version}" for library, version in diagnosis["versions"].items())
    notes = [
        f"Nats; ± one standard error, by documents, of the difference on the same tokens; window {diagnosis['window']:,} "
        f"tokens, {diagnosis['dtype']}, {diagnosis['device']}",
        f"Frequencies are those of {diagnosis['frequencies_of']}",
        "No start token stands before these texts, except in the table of document starts",
        *(f"{model['name']}: {model['source']}, revision {model['revision'][:12]}" for model in diagnosis["models"]),
        f"{versions}; {diagnosis['date']}: `{diagnosis['command']}`",
    ]
    notes += [f"By domain and frequency: positions before {jump['position']:,} only" for jump in diagnosis["jump"]]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in notes)]) + "\n"
