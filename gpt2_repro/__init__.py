"""Reproduce GPT-2 with the Hugging Face stack: prepare, train, evaluate, report."""

import time


STARTED = time.monotonic()  # when this process imported the package, which every command does first
