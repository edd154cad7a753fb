"""Where the loss difference of two models is, and its likely causes."""
