"""Reports of run directories: curves, tables and samples on one HTML page."""
