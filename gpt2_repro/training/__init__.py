"""Training: arguments, the Trainer subclass, callbacks and checkpoints."""
