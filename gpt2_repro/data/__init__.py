"""Convert text to token ids, write prepared folders, and make training batches.

Only the module `batching` imports torch.
"""
