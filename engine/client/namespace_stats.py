"""Statistics of each namespace, on the gateway's side.

The first `Stats` on a connection lists all namespaces, each later one lists the namespaces with
numbers that changed since. This module knows no tenant. Each connection has one table, so a
restarted engine begins with an empty one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.api import Namespace
from engine.statistics import NamespaceStats

Change = tuple[NamespaceStats | None, NamespaceStats | None]
"""Statistics before and after; None if the namespace did not or does not exist."""


class NamespaceTable:
    """The latest statistics of each namespace. Belongs to one thread."""

    def __init__(self) -> None:
        self._current: dict[Namespace, NamespaceStats] = {}
        self._changed_by_reader: dict[object, dict[Namespace, NamespaceStats | None]] = {}

    def __len__(self) -> int:
        return len(self._current)

    def __iter__(self) -> Iterator[NamespaceStats]:
        return iter(self._current.values())

    def add(self, changed: Iterable[NamespaceStats]) -> None:
        """Store changed statistics. O(changed)."""
        for stats in changed:
            name = stats.namespace
            before = self._current.pop(name, None)
            below = stats.host_bytes or stats.is_stored or stats.promised_below
            if stats.blocks or stats.running or stats.waiting or below:
                self._current[name] = stats
            for noted in self._changed_by_reader.values():
                noted.setdefault(name, before)

    def take_changes(self, reader: object) -> list[Change]:
        """Return the changes since the reader's last call; on its first call, all namespaces.

        Changes are kept for a reader only from its first call on. O(changes).
        """
        noted = self._changed_by_reader.get(reader)
        self._changed_by_reader[reader] = {}
        if noted is None:
            return [(None, stats) for stats in self]
        return [(before, self._current.get(name)) for name, before in noted.items()]
