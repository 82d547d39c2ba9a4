"""The prefix cache: blocks, trees of prefixes, leases and quotas. `PrefixCache` is its door."""

from engine.cache.block_table import BlockTable
from engine.cache.events import CacheStats, Fact, NamespaceUse, Peek
from engine.cache.prefix_cache import PrefixCache
from engine.cache.prefix_tree import Found

__all__ = ["BlockTable", "CacheStats", "Fact", "Found", "NamespaceUse", "Peek", "PrefixCache"]
