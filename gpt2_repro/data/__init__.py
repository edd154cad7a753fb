"""Text to tokens to an Arrow folder with a manifest, and from there to batches. No torch until rows are collated."""
