"""Kernels, each with a plain-torch twin in `reference`."""
