"""Build prepared folders: stage tokens, split documents, cut rows, publish."""
