"""Check a machine before a run, and estimate the time and cost of the run."""
