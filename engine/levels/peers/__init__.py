"""Prefixes of other engines of the model, and what they get of this one's."""
