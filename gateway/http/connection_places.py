"""Which connections of a listener may stay: places by address, for strangers and for tenants.

A connection belongs to a stranger until its client has shown a valid key. Strangers hold at most
three quarters of the places, and those of one address no more than its own limit; a connection of a
tenant counts for no address, since others may share it. A full listener makes room: it closes the
connection that has been idle for longest, of the strangers or else of the tenant with the most
connections. So neither ten thousand idle strangers nor one tenant's idle pool keeps other clients
out. This module knows no socket; `gateway.http.connection` asks it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar


class Placed(Protocol):
    """A connection: its client's address, and the tenant whose key it has shown, or None."""

    address: str
    payer: Hashable

    def abort(self) -> None:
        """Close at once; an idle connection has nothing to say."""


C = TypeVar("C", bound=Placed)


class ConnectionPlaces(Generic[C]):
    """The places of one listener. Belongs to one event loop.

    A connection without a request in progress is idle, also while its next head arrives.
    """

    def __init__(self, places_max: int, places_per_address_max: int) -> None:
        """`places_per_address_max`: of strangers; 0 is no limit."""
        self._max = places_max
        self._per_address_max = places_per_address_max
        self._strangers_max = max(1, places_max * 3 // 4)
        self._strangers_min = max(1, places_max // 8)
        self._by_address: Counter[str] = Counter()
        self._by_payer: Counter[Hashable] = Counter()
        self._idle: dict[Hashable, OrderedDict[C, None]] = {}
        self.taken = 0

    def admit(self, connection: C) -> bool:
        """Give a new connection a place; return whether there is one.

        O(1); O(tenants) if the listener is full. May close an idle connection.
        """
        cap = self._per_address_max
        if cap and self._by_address[connection.address] >= cap:
            return False
        strangers = self._by_payer[None]
        if strangers >= self._strangers_max:
            if not self._close_idle(None):
                return False
        elif self.taken >= self._max and not self._make_room(strangers):
            return False
        self.taken += 1
        self._by_address[connection.address] += 1
        self._by_payer[connection.payer] += 1
        self.set_idle(connection)
        return True

    def release(self, connection: C) -> None:
        """Take the place of a connection that is lost. O(1)."""
        self.set_busy(connection)
        self.taken -= 1
        if connection.payer is None:
            _decrease(self._by_address, connection.address)
        _decrease(self._by_payer, connection.payer)

    def move(self, connection: C, payer: Hashable) -> None:
        """Count a busy connection for a tenant from now on. O(1)."""
        if connection.payer is None:
            _decrease(self._by_address, connection.address)
        _decrease(self._by_payer, connection.payer)
        connection.payer = payer
        self._by_payer[payer] += 1

    def set_busy(self, connection: C) -> None:
        """Note that a request is in progress: the connection keeps its place. O(1)."""
        idle = self._idle.get(connection.payer)
        if idle is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle[connection.payer]

    def set_idle(self, connection: C) -> None:
        """Note that no request is in progress. O(1)."""
        idle = self._idle.get(connection.payer)
        if idle is None:
            idle = self._idle[connection.payer] = OrderedDict()
        idle[connection] = None

    def _make_room(self, strangers: int) -> bool:
        """Close one idle connection of a full listener; return whether there was one.

        A newcomer is a stranger until its first request is read. Where strangers have an eighth of
        the places, the oldest of them leaves; below that a new client would be pushed out by the
        next one before it could show its key, so the tenant with the most connections gives way.
        """
        if strangers >= self._strangers_min and self._close_idle(None):
            return True
        tenants = [payer for payer in self._idle if payer is not None]
        if tenants:
            return self._close_idle(max(tenants, key=self._by_payer.__getitem__))
        return self._close_idle(None)

    def _close_idle(self, payer: Hashable) -> bool:
        idle = self._idle.get(payer)
        if not idle:
            return False
        oldest = next(iter(idle))
        self.set_busy(oldest)  # closing takes a turn of the loop; it is not chosen again
        oldest.abort()
        return True


K = TypeVar("K", bound=Hashable)


def _decrease(counts: Counter[K], key: K) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
