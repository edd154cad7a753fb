"""Explain why `python gpt2_repro/FILE.py` does not work.

Python then searches the folder of FILE for the package `gpt2_repro`, and finds this file.
"""

import sys
from pathlib import Path


sys.stderr.write(f"error: Run it as a module: python -m gpt2_repro.{Path(sys.argv[0]).stem}\n")
sys.exit(2)
