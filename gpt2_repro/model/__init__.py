"""The model: its configuration, its pre-training forward and loss, and the plain form that leaves the project."""
