"""Evaluation of checkpoints with lm-evaluation-harness, and their comparison."""
