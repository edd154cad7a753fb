"""Print the correct command for users who run `python gpt2_repro/FILE.py`.

For `python gpt2_repro/FILE.py`, Python searches the folder of FILE for the package `gpt2_repro`. There it finds this
file, and imports it instead of the package.
"""

import sys
from pathlib import Path


sys.stderr.write(f"error: Run it as a module: python -m gpt2_repro.{Path(sys.argv[0]).stem}\n")
sys.exit(2)
