"""Send short texts from a training command to the supervisor that restarts it."""

import logging
import os
from pathlib import Path

from gpt2_repro.files import write_whole


logger = logging.getLogger(__name__)

FOLDER = "GPT2_REPRO_SUPERVISED"  # path of the supervisor's folder, which contains a file for each note
# The names of the notes.
RUN = "run"  # the run directory
WENT_BACK = "went_back"  # the checkpoint of --resume_from, which only the first attempt resumes from
MISTAKE = "mistake"  # the mistake that a restart would repeat
SINCE = "since"  # when the supervisor started, in seconds since 1970
ENDED = "ended"  # when the last attempt ended, in seconds since 1970


def is_supervised() -> bool:
    """Return whether a supervisor started this process."""
    folder = os.environ.get(FOLDER)
    return folder is not None and Path(folder).is_dir()


def note(name: str, text: str, folder: str | Path | None = None) -> None:
    """Write `text` to the file `name` for the supervisor, if there is a supervisor.

    By default, `folder` is $GPT2_REPRO_SUPERVISED. If its disk is full, the earlier note stays, and a warning is logged.
    """
    folder = folder or os.environ.get(FOLDER)
    if not folder or not Path(folder).is_dir() or noted(name, folder) == text:
        return
    try:
        write_whole(Path(folder, name), text)
    except OSError as error:
        logger.warning("%s cannot be written for the supervisor: %s", Path(folder, name), error)


def noted(name: str, folder: str | Path | None = None) -> str | None:
    """Return the note `name` of this or an earlier attempt, or None.

    By default, `folder` is $GPT2_REPRO_SUPERVISED.
    """
    folder = folder or os.environ.get(FOLDER)
    if not folder:
        return None
    path = Path(folder, name)
    if not path.is_file():
        return None
    return path.read_text(encoding="utf-8")
