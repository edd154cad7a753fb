"""Build prepared folders: tokenize text, assign documents to splits, write rows."""
