"""Model architectures, each in one file read top to bottom."""
