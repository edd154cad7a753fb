"""Prepare data: run gpt2_repro/prepare.py, which documents the options."""

import os
import sys


if __name__ in ("__main__", "__mp_main__"):  # a command, or one of its workers
    # This folder comes last, so that a file types.py in it does not replace Python's. The package is imported before,
    # because it may also be installed.
    FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib imports such modules)
    sys.path.insert(0, FOLDER)
    import gpt2_repro  # noqa: F401

    sys.path.sort(key=FOLDER.__eq__)

from gpt2_repro import cli
from gpt2_repro.prepare import main


if __name__ == "__main__":
    cli.run(main, prints_results=False)
