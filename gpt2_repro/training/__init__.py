"""Training: arguments, the Trainer subclass, its callbacks, checkpoints and the run directory."""
