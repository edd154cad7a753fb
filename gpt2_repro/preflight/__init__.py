"""Before the meter runs: what a card costs."""
