"""Models: configuration, pre-training forward and loss, and plain form for export."""
