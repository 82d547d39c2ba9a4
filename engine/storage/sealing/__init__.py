"""Sealing: keys, and records and rows encrypted under them."""
