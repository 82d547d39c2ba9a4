"""Commands of engines elsewhere."""
