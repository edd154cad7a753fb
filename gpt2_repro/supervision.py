"""Send short texts from a training command to the supervisor that restarts it.

Each text ("note") is a file in one folder. The environment variable GPT2_REPRO_SUPERVISED contains the path of this
folder.
"""

import os
from pathlib import Path


FOLDER = "GPT2_REPRO_SUPERVISED"
# The notes: the run directory; the checkpoint of --resume_from, which only the first attempt resumes from; the mistake
# that a restart would repeat; the start time of the supervisor in seconds since 1970.
RUN, WENT_BACK, MISTAKE, SINCE = "run", "went_back", "mistake", "since"


def note(name: str, text: str) -> None:
    """Write the file `name` for the supervisor, if a supervisor started this command.

    Nothing is written if the supervisor's folder is missing, because the supervisor may have been killed.
    """
    if (folder := os.environ.get(FOLDER)) and Path(folder).is_dir():
        Path(folder, name).write_text(text)


def noted(name: str, folder: str | Path | None = None) -> str | None:
    """Return the text of the file `name` for the supervisor, or None if it is missing.

    This attempt or an earlier attempt of the training command may have written the file.

    Args:
        folder: the supervisor's folder. By default, it is the folder in GPT2_REPRO_SUPERVISED.
    """
    folder = folder or os.environ.get(FOLDER)
    path = Path(folder, name) if folder else None
    return path.read_text() if path is not None and path.is_file() else None
