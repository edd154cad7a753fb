"""Train a model with a subclass of transformers' Trainer, and save checkpoints."""
