"""Blocks, tables, the prefix tree, leases, eviction. No tensors, no clock of its own."""
