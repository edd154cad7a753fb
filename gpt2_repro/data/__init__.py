"""Data pipeline: text to tokens, prepared folders, and batches for training.

Only `batching` imports torch.
"""
