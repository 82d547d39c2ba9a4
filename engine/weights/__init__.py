"""Readers of weight files into tensors."""
