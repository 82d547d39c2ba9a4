"""Grammars for constrained output: compiled, sandboxed, cached per namespace."""
