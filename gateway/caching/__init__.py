"""Caching contracts: prefixes read and written by a dialect's rules, beside what was cached.

`ContractManager` is the entry point: it resolves a call before it runs and accounts for it
afterwards.
"""

from gateway.caching.contract import CacheScope, Contract, ContractManager
from gateway.caching.prefix_index import PrefixOrigin

__all__ = ["CacheScope", "Contract", "ContractManager", "PrefixOrigin"]
