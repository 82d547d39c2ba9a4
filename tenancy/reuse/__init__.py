"""Sampled statistics of prefix reuse, and what a retention class or a larger cache would save."""
