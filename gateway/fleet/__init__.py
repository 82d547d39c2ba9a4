"""Engines elsewhere as a fleet: their keepers on Ray, the file that names them, and how many."""
