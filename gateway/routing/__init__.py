"""The choice of a replica for a request: pure data structures and functions."""
