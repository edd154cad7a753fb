"""What a supervised command and its supervisor tell each other: an environment variable, and notes in a folder."""

import os
from pathlib import Path


FOLDER, RESTARTED = "GPT2_REPRO_SUPERVISED", "GPT2_REPRO_RESTARTED"


def is_restarted() -> bool:
    """Whether a supervisor has started this command before."""
    return RESTARTED in os.environ


def note_run(run: Path) -> None:
    """Tell the supervisor, if there is one, which run directory this command works on."""
    _note("run", str(run.resolve()))


def note_mistake(line: str) -> None:
    """Tell the supervisor, if there is one, that starting this command again would end in the same line."""
    _note("mistake", line)


def _note(name: str, text: str) -> None:
    if folder := os.environ.get(FOLDER):
        Path(folder, name).write_text(text)


def read_note(folder: Path, name: str) -> str | None:
    """What was noted, or None."""
    return (folder / name).read_text() if (folder / name).is_file() else None
