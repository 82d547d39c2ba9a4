"""Tenants, keys, shared scopes and cached contents in the database; authentication by key."""
