"""Tenants, keys, limits, prices and the ledger. The package does not know the engine."""
