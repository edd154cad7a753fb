"""Before the meter runs: the machine, its links, its memory, and what a run costs on it and elsewhere."""
