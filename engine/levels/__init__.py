"""Levels of the cache below the device: which copies exist, where they lie, and when they move."""
