"""Which tokens each rank holds: ranges, and how documents are dealt out by their work."""
