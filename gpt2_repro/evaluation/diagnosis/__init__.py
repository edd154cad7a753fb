"""Where the loss difference of two models sits, and what it is likely to come from."""
