"""Reads run folders and writes what a person looks at: curves, tables, samples, one page."""
