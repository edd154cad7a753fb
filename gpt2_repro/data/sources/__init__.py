"""Sources of documents: local files of text or tokens, and datasets of the Hub."""
