"""The storage meter: token-seconds that payers hold in the cache, by retention class.

It counts what `NamespaceStats` tells: each block once, under the class that promises it for
longest, also where the promise is kept below the device. A state holds until the next update, and
sums never fall, so a reading that is read twice, late or by several gateways is still right. The
meter knows no clock, no tenant and no price. `engine.server.service` feeds it at each heartbeat.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from engine.api import HeldTokens, Namespace, Payer
from engine.cache import NamespaceUse, PrefixCache

UNPROMISED = ""
"""The class of blocks that no promise covers."""
NS_PER_S = 1_000_000_000

BlocksByClass = dict[str, int]


class _Holding:
    """Blocks that are held now, and the block-nanoseconds until `since_ns`."""

    __slots__ = ("block_ns", "blocks", "since_ns")

    def __init__(self, now_ns: int) -> None:
        self.blocks, self.block_ns, self.since_ns = 0, 0, now_ns

    def settle(self, now_ns: int) -> None:
        self.block_ns += self.blocks * (now_ns - self.since_ns)
        self.since_ns = now_ns


class StorageMeter:
    """Sums block-nanoseconds by payer and class. Its memory grows with payers, not namespaces:
    what a namespace has held is its payer's from then on."""

    def __init__(self, cache: PrefixCache, namespaces: Iterable[Namespace], now_s: float) -> None:
        """`namespaces`: those that hold blocks or promises now."""
        self._cache = cache
        self._now_ns = int(now_s * NS_PER_S)
        self._pending = set(namespaces)
        self._held: dict[Namespace, tuple[Payer, BlocksByClass]] = {}
        self._holdings: dict[tuple[Payer, str], _Holding] = {}
        self.update(now_s)

    def note(self, changed: set[Namespace]) -> None:
        """Note namespaces whose use has changed. O(changed)."""
        self._pending |= changed

    @property
    def is_behind(self) -> bool:
        """Whether changes were noted that no update has counted yet."""
        return bool(self._pending)

    def update(self, now_s: float, most: float = inf) -> None:
        """Count at most so many of the noted changes as of now. O(these)."""
        self._now_ns = max(self._now_ns, int(now_s * NS_PER_S))
        for _ in range(int(min(most, len(self._pending)))):
            namespace = self._pending.pop()
            payer, before = self._held.pop(namespace, (b"", {}))
            self._move(payer, before, -1)
            blocks = _by_class(self._cache.use(namespace))
            if blocks:
                payer = self._cache.payer_of(namespace)
                self._held[namespace] = (payer, blocks)
                self._move(payer, blocks, 1)

    def read(self, now_s: float) -> tuple[HeldTokens, ...]:
        """Return the whole token-seconds until now of each payer and class. O(payers)."""
        self.update(now_s)
        found = []
        for (payer, name), holding in self._holdings.items():
            holding.settle(self._now_ns)
            token_seconds = holding.block_ns * self._cache.block_size // NS_PER_S
            if token_seconds:
                found.append(HeldTokens(payer, name, token_seconds))
        return tuple(found)

    def check(self) -> None:
        """Recount the blocks. O(namespaces). Raises AssertionError."""
        counted: dict[tuple[Payer, str], int] = dict.fromkeys(self._holdings, 0)
        for payer, blocks in self._held.values():
            for name, count in blocks.items():
                counted[payer, name] += count
        held = {key: holding.blocks for key, holding in self._holdings.items()}
        assert counted == held, f"the storage meter holds {held}; counted {counted}"

    def _move(self, payer: Payer, blocks: BlocksByClass, sign: int) -> None:
        for name, count in blocks.items():
            holding = self._holdings.get((payer, name))
            if holding is None:
                holding = self._holdings[payer, name] = _Holding(self._now_ns)
            holding.settle(self._now_ns)
            holding.blocks += sign * count


def _by_class(use: NamespaceUse) -> BlocksByClass:
    """Return the blocks of each class, without zeros; see `NamespaceStats.unpromised_blocks`."""
    found = {name: blocks for name, blocks in use.promised.items() if blocks}
    unpromised = use.blocks - (sum(found.values()) - use.away)
    if unpromised:
        found[UNPROMISED] = unpromised
    return found
