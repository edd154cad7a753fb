"""Find likely causes of the loss difference between two models."""
