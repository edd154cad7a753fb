"""What a supervised command tells its supervisor: notes in a folder that an environment variable names."""

import os
from pathlib import Path


FOLDER = "GPT2_REPRO_SUPERVISED"
# The run directory that the command works on; the checkpoint that it went back to, once; why starting it again is no use;
# since when the supervisor has been there, in seconds since 1970.
RUN, WENT_BACK, MISTAKE, SINCE = "run", "went_back", "mistake", "since"


def note(name: str, text: str) -> None:
    """Tell the supervisor, if there is one. The notes of one that was killed may have been deleted."""
    if (folder := os.environ.get(FOLDER)) and Path(folder).is_dir():
        Path(folder, name).write_text(text)


def noted(name: str, folder: str | Path | None = None) -> str | None:
    """What this command, in this attempt or an earlier one, has told its supervisor; None for nothing."""
    folder = folder or os.environ.get(FOLDER)
    path = Path(folder, name) if folder else None
    return path.read_text() if path is not None and path.is_file() else None
