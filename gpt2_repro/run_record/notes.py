"""Send short texts from a training command to the supervisor that restarts it."""

import os
from pathlib import Path


FOLDER = "GPT2_REPRO_SUPERVISED"  # path of the supervisor's folder, which contains a file for each note
# The notes: the run directory; the checkpoint of --resume_from, which only the first attempt resumes from; the mistake
# that a restart would repeat; when the supervisor started and when the last attempt ended, in seconds since 1970.
RUN, WENT_BACK, MISTAKE, SINCE, ENDED = "run", "went_back", "mistake", "since", "ended"


def note(name: str, text: str) -> None:
    """Write `text` to the file `name` for the supervisor, if there is a supervisor."""
    if (folder := os.environ.get(FOLDER)) and Path(folder).is_dir():
        Path(folder, name).write_text(text, encoding="utf-8")


def noted(name: str, folder: str | Path | None = None) -> str | None:
    """Return the note `name` of this or an earlier attempt, or None.

    By default, `folder` is $GPT2_REPRO_SUPERVISED.
    """
    folder = folder or os.environ.get(FOLDER)
    path = Path(folder, name) if folder else None
    return path.read_text(encoding="utf-8") if path is not None and path.is_file() else None
