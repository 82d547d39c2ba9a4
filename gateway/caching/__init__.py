"""Caching contracts: what a dialect's rules say was read and written, beside what physically was.

`Contracts` is the door: it resolves a call before it runs and accounts for it afterwards.
"""

from gateway.caching.contract import CacheScope, Contract, Contracts
from gateway.caching.prefix_index import Origin

__all__ = ["CacheScope", "Contract", "Contracts", "Origin"]
