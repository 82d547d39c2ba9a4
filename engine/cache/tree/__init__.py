"""Pure structures of the cache: the prefix tree, its leases, whose blocks are whose."""
