"""What each tenant holds of the cache, kept as it changes: sums over its namespaces.

Whoever asks pays for what has changed since somebody looked, not for all there is. It reads no
clock and knows no engine but the book of one; `storage_meter` lets it look twice a second, and the
analytics desk before it answers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from engine.api import Namespace, NamespaceStats
from engine.client.namespace_stats import NamespaceTable

FIELDS = ("blocks", "pinned_blocks", "promised_blocks", "running", "waiting")


class Holders:
    """Of one gateway. Belongs to one thread."""

    def __init__(self) -> None:
        self._book: NamespaceTable | None = None
        self._held: dict[int, list[int]] = {}

    def look(
        self, book: NamespaceTable | None, owner_of: Callable[[Namespace], int | None]
    ) -> None:
        """At what the engine has told. By another than the last time, nothing of what was is.
        O(namespaces that changed)."""
        changes = [] if book is None else book.take_changes(self)
        if book is not self._book:
            self._book = book
            self._held.clear()
            changes = [(None, one) for one in book or ()]
        for before, after in changes:
            for one, sign in ((before, -1), (after, 1)):
                if one is not None and (owner := owner_of(one.namespace)) is not None:
                    self._move(owner, one, sign)

    def largest(self, most: int) -> list[tuple[int, dict[str, int]]]:
        """Tenants that hold most blocks, with what they hold, largest first. O(tenants)."""
        found = heapq.nlargest(most, self._held.items(), key=lambda one: one[1][0])
        return [(tenant, dict(zip(FIELDS, sums, strict=True))) for tenant, sums in found]

    def _move(self, owner: int, one: NamespaceStats, sign: int) -> None:
        sums = self._held.setdefault(owner, [0] * len(FIELDS))
        for place, name in enumerate(FIELDS):
            sums[place] += sign * getattr(one, name)
        if not any(sums):
            del self._held[owner]
