"""Where documents come from: files of text or tokens on this disk, and how they come from the Hub."""
