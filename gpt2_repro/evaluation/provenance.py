"""The window that all models of a table share, and the folder of its files."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from gpt2_repro.checkpoint import Checkpoint


logger = logging.getLogger(__name__)


def common_window(asked: int, trained: Mapping[str, int], positions: Mapping[str, int], *, insist: bool) -> int:
    """The widest window up to `asked` that every model was trained on.

    Args:
        positions: of each model, beyond which it computes nothing.
        insist: the number was typed: take it where the models have positions for it, trained or not.
    """
    name = min(trained, key=lambda model: trained[model])
    window = min(asked, trained[name])
    if insist and window < asked <= min(positions.values()):
        logger.warning("window %d tokens: %s was trained on %d, its later positions are random", asked, name, window)
        return asked
    if window < asked:
        logger.warning("window %d tokens in place of %d: %s was trained on no more", window, asked, name)
    return window


def default_output_dir(first: Checkpoint, *, smoke_test: bool = False) -> Path:
    """Beside the first checkpoint's run, or under evaluations/ for a model without one; a smoke test is no result."""
    folder = first.run / "evaluation" if first.run else Path("evaluations") / file_name(first.source)
    return folder / "smoke_test" if smoke_test else folder


def file_name(name: str) -> str:
    """A model's name as a file name."""
    return re.sub(r"[^\w.]+", "-", name).strip("-.")
