"""A bounded cache in which each owner finds only its own entries.

A lookup never sees what another owner stored, so its time tells nothing about others. A full cache
takes room from the owner that holds the most, so no owner can push out the entries of the rest. The
module knows no tenants and no tokens: an owner is a number. The tokenizer, the renderer and the
embedder cache their work in it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

OWNERS_MAX = 1_024
"""Maximum number of owners; the owner that was idle longest is dropped with its entries."""


class OwnerCache(Generic[K, V]):
    """Values by owner and key, least recently used first out. Thread-safe.

    `size_max`: bound of the sizes of all entries together; an entry above an eighth of it is not
    kept. Cost: O(1), and O(owners) for an entry that pushes another out.
    """

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._parts: OrderedDict[int, OrderedDict[K, tuple[V, int]]] = OrderedDict()
        self._sizes: dict[int, int] = {}
        self._lock = threading.Lock()
        self.size = 0

    def get(self, owner: int, key: K) -> V | None:
        """Return the owner's value, or None. Values are never None."""
        with self._lock:
            part = self._parts.get(owner)
            entry = None if part is None else part.get(key)
            if part is None or entry is None:
                return None
            self._parts.move_to_end(owner)
            part.move_to_end(key)
            return entry[0]

    def put(self, owner: int, key: K, value: V, size: int) -> None:
        """Store a value; an existing one stays."""
        if size > self._size_max // 8:
            return
        with self._lock:
            part = self._parts.setdefault(owner, OrderedDict())
            self._parts.move_to_end(owner)
            if key in part:
                return  # another thread stored it first
            part[key] = value, size
            self._grow(owner, size)
            if len(self._parts) > OWNERS_MAX:
                self._drop(next(iter(self._parts)))
            while self.size > self._size_max:
                self._shrink(max(self._sizes, key=self._sizes.__getitem__))

    def erase(self, owner: int, covers: Callable[[K], bool]) -> int:
        """Remove the owner's entries with keys that `covers` accepts; return their number.

        O(the owner's entries).
        """
        with self._lock:
            part = self._parts.get(owner)
            if part is None:
                return 0
            keys = [key for key in part if covers(key)]
            for key in keys:
                _, size = part.pop(key)
                self._grow(owner, -size)
            if keys and not part:
                self._drop(owner)
            return len(keys)

    @property
    def owners(self) -> frozenset[int]:
        """The owners that have entries."""
        with self._lock:
            return frozenset(self._parts)

    def _grow(self, owner: int, size: int) -> None:
        self.size += size
        self._sizes[owner] = self._sizes.get(owner, 0) + size

    def _shrink(self, owner: int) -> None:
        _, (_, size) = self._parts[owner].popitem(last=False)
        self._grow(owner, -size)
        if not self._parts[owner]:
            self._drop(owner)

    def _drop(self, owner: int) -> None:
        del self._parts[owner]
        self.size -= self._sizes.pop(owner)
