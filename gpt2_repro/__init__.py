"""Reproduce GPT-2 with the Hugging Face stack: prepare, train, evaluate, report."""

__version__ = "0.1.0"
