"""Send short texts from a training command to the supervisor that restarts it.

Each text (a "note") is stored as a file in the supervisor's folder. The environment variable GPT2_REPRO_SUPERVISED
contains the path of this folder.
"""

import os
from pathlib import Path


FOLDER = "GPT2_REPRO_SUPERVISED"
# The notes: the run directory; the checkpoint of --resume_from, which only the first attempt resumes from; the mistake
# that a restart would repeat; the start time of the supervisor in seconds since 1970.
RUN, WENT_BACK, MISTAKE, SINCE = "run", "went_back", "mistake", "since"


def note(name: str, text: str) -> None:
    """Write `text` to the file `name` for the supervisor that started this command.

    Nothing is written if no supervisor started this command, or if the supervisor's folder is missing, for example
    because the supervisor was killed.
    """
    if (folder := os.environ.get(FOLDER)) and Path(folder).is_dir():
        Path(folder, name).write_text(text)


def noted(name: str, folder: str | Path | None = None) -> str | None:
    """Return the text of the file `name` for the supervisor, or None if it is missing.

    The file can be from this attempt or from an earlier attempt of the training command.

    Args:
        folder: the supervisor's folder. By default, it is the folder in GPT2_REPRO_SUPERVISED.
    """
    folder = folder or os.environ.get(FOLDER)
    path = Path(folder, name) if folder else None
    return path.read_text() if path is not None and path.is_file() else None
