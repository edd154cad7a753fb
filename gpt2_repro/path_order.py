"""Move the folder of the scripts to the end of sys.path.

Otherwise, a file types.py or random.py next to them would replace Python's. A script imports this module first.
"""

import sys


FOLDER = __file__.rsplit("/", 2)[0]
sys.path.sort(key=lambda folder: folder in ("", FOLDER))  # "": of python -c, which starts in this folder
