"""Send notes from a training command to the supervisor that restarts it.

Each note is a file in a folder. The environment variable GPT2_REPRO_SUPERVISED contains the path of the folder.
"""

import os
from pathlib import Path


FOLDER = "GPT2_REPRO_SUPERVISED"
# The notes: the run directory; the checkpoint of --resume_from, which only the first attempt resumes from; the mistake
# that a restart would repeat; the start time of the supervisor in seconds since 1970.
RUN, WENT_BACK, MISTAKE, SINCE = "run", "went_back", "mistake", "since"


def note(name: str, text: str) -> None:
    """Write a note for the supervisor, if a supervisor started this command.

    Nothing is written if the folder is missing, because its supervisor may have been killed.
    """
    if (folder := os.environ.get(FOLDER)) and Path(folder).is_dir():
        Path(folder, name).write_text(text)


def noted(name: str, folder: str | Path | None = None) -> str | None:
    """Return the note that this attempt or an earlier attempt wrote, or None."""
    folder = folder or os.environ.get(FOLDER)
    path = Path(folder, name) if folder else None
    return path.read_text() if path is not None and path.is_file() else None
