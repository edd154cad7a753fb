"""Train: run gpt2_repro/train.py, which documents the options."""

import gpt2_repro.path_order  # noqa: F401
from gpt2_repro import cli
from gpt2_repro.train import main


if __name__ == "__main__":
    cli.run(main, prints_results=False)
