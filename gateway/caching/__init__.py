"""Caching contracts: what a dialect's rules say was read and written, beside what physically was.

`Contracts` is the door: it resolves a call before it runs and accounts for it afterwards.
"""

from gateway.caching.contract import Contract, Contracts, Scope
from gateway.caching.prefix_index import Origin

__all__ = ["Contract", "Contracts", "Origin", "Scope"]
