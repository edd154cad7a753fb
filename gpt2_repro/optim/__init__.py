"""Optimizers that torch and transformers lack, also under ZeRO."""
