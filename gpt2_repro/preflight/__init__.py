"""Checks and cost estimates before a run: machine, GPU links, memory and prices."""
