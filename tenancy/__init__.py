"""Who pays: tenants, keys, policies, the ledger. Knows nothing of the engine."""
