"""Check a machine before a run."""
