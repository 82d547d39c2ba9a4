"""What each namespace holds and asks for now, kept on the gateway's side.

The first `Stats` on a connection tells of all namespaces, each later one of such whose numbers have
changed since they were told. It knows no tenant. `client` keeps one for each
connection, so another life of the engine begins with an empty one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.api import Namespace, NamespaceStats

Change = tuple[NamespaceStats | None, NamespaceStats | None]
"""How it was and how it is; None where there is or was nothing."""


class NamespaceTable:
    """Belongs to one thread."""

    def __init__(self) -> None:
        self._now: dict[Namespace, NamespaceStats] = {}
        self._before: dict[object, dict[Namespace, NamespaceStats | None]] = {}

    def __len__(self) -> int:
        return len(self._now)

    def __iter__(self) -> Iterator[NamespaceStats]:
        return iter(self._now.values())

    def add(self, changed: Iterable[NamespaceStats]) -> None:
        """These are as they say from now on. O(changed)."""
        for one in changed:
            name = one.namespace
            before = self._now.pop(name, None)
            if one.blocks or one.running or one.waiting:
                self._now[name] = one
            for noted in self._before.values():
                noted.setdefault(name, before)

    def take_changes(self, reader: object) -> list[Change]:
        """All that has changed since the reader's last call; with its first, all there is, and
        nothing is kept for it before. O(changed)."""
        noted = self._before.get(reader)
        self._before[reader] = {}
        if noted is None:
            return [(None, one) for one in self]
        return [(before, self._now.get(name)) for name, before in noted.items()]
