"""Reproduce GPT-2 with the Hugging Face stack: prepare, train, evaluate, report."""

import time


__version__ = "0.1.0"
# When this process imported the package, in seconds since the machine was booted.
IMPORTED = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
