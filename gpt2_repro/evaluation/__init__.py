"""How good a checkpoint is: lm-evaluation-harness on checkpoints and a baseline, and one table that compares them."""
