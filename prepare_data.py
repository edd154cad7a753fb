"""Prepare data: run gpt2_repro/prepare.py, which documents the options."""

import sys


sys.path.insert(0, __file__.rpartition("/")[0])  # in a worker, this folder comes after an installed package
import gpt2_repro.path_order  # noqa: F401
from gpt2_repro import cli
from gpt2_repro.prepare import main


if __name__ == "__main__":
    cli.run(main, prints_results=False)
