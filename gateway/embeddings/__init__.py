"""Vectors of texts: tokens, a cache by tenant, and the client of the encoder's process."""
