"""The prefix cache: blocks, prefix trees, leases and quotas. `PrefixCache` is the entry point."""

from engine.cache.blocks.block_table import BlockTable
from engine.cache.events import CachePeek, CacheStats, Fact, NamespaceUse
from engine.cache.prefix_cache import PrefixCache
from engine.cache.tree.eviction_policy import EvictionPolicy, LeastRecentlyUsed
from engine.cache.tree.prefix_tree import TreeMatch

__all__ = [
    "BlockTable",
    "CachePeek",
    "CacheStats",
    "EvictionPolicy",
    "Fact",
    "LeastRecentlyUsed",
    "NamespaceUse",
    "PrefixCache",
    "TreeMatch",
]
