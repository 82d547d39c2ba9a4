"""Objects in a remote store: sealed records beyond the disk."""
