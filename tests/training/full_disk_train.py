"""Run train.py on a disk that seems to have FREE bytes."""

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from gpt2_repro import cli


if __name__ == "__main__":
    shutil.disk_usage = lambda path: SimpleNamespace(free=int(os.environ["FREE"]))
    cli.run(train.main)
