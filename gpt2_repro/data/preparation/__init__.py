"""Build prepared folders: tokenize text, split documents, cut and write rows."""
