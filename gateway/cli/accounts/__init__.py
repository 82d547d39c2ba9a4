"""Commands of tenants, keys, shared scopes, and of the log of their changes."""
