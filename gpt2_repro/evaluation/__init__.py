"""Score checkpoints with lm-evaluation-harness and compare the scores."""
