"""Write reports of runs: curves, tables and samples on one HTML page."""
