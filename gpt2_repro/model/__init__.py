"""Build models for pre-training, and convert them to standard checkpoints."""
