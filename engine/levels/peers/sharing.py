"""Sharing: what other engines ask of this one's prefixes is copied to host memory and sent.

Tokens are compared in the tree, never digests. Copies are held while they are sent, a few at a
time; what only the device has is offloaded first. A share ends after `SHARE_S`, and where the next
run is gone, as after an erasure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from engine.cache import PrefixCache
from engine.cache.tree.prefix_tree import Node, whole_runs
from engine.levels.offloading import Offloading
from engine.levels.places import RunPlaces
from engine.moves import RunReader, ShareRuns

SHARE_S: Final = 10.0
"""The longest time for which anything is held for another engine."""
SHARES_MAX: Final = 8
"""Engines that are served at a time."""
UNSENT_MAX: Final = 8
"""Copies of a share that are held and not sent yet."""


@dataclass(slots=True, eq=False)
class _Share:
    """`path`: the runs still to send; `unsent`: the slots that are held, in order."""

    format: str
    until_s: float
    path: deque[Node]
    unsent: deque[int] = field(default_factory=deque)
    is_ended: bool = False


class Sharing:
    """All shares of one engine. `sent`: copies that have left so far."""

    def __init__(
        self,
        cache: PrefixCache,
        places: RunPlaces,
        offloading: Offloading,
        view: Callable[[int, int], memoryview],
    ) -> None:
        """`view` returns the bytes of a slot of a size."""
        self._cache, self._places, self._offloading, self._view = cache, places, offloading, view
        self._shares: dict[RunReader, _Share] = {}
        self.sent = 0

    def __len__(self) -> int:
        return len(self._shares)

    def begin(self, wanted: ShareRuns, reader: RunReader, now_s: float) -> None:
        """Begin to send what is here of what is wanted. O(runs)."""
        places, namespace = self._places, wanted.namespace
        root = self._cache.tree_root(namespace)
        path = [] if root is None else whole_runs(root, wanted.tokens, places.run_tokens)
        ends = (i for i, node in enumerate(path) if node.limit_at_s <= now_s)
        path = path[: next(ends, len(path))]
        if len(self._shares) >= SHARES_MAX or len(path) <= wanted.first:
            reader.end("busy" if len(path) > wanted.first else "lacking")
            return
        if not path[-1].is_copied:
            self._offloading.promised(path[-1], ())
        share = _Share(wanted.format, now_s + SHARE_S, path=deque(path[wanted.first :]))
        self._shares[reader] = share
        self._send(reader, share, now_s)

    def told_sent(self, reader: RunReader) -> None:
        """Let go the copy that a reader has held longest: it has left, or the reader has."""
        share = self._shares[reader]
        self._places.release(share.unsent.popleft())
        self._forget(reader, share)

    def leave(self, reader: RunReader) -> None:
        """Send nothing more to a reader that has left; what it holds it still tells as sent."""
        share = self._shares.get(reader)
        if share is not None:
            share.is_ended = True
            self._forget(reader, share)

    def turn(self, now_s: float) -> None:
        """Send what may be sent now. O(shares, these)."""
        for reader, share in list(self._shares.items()):
            self._send(reader, share, now_s)

    def _send(self, reader: RunReader, share: _Share, now_s: float) -> None:
        if share.is_ended:
            return
        why: str | None = None
        if now_s >= share.until_s:
            why = "late"
        while why is None and share.path and len(share.unsent) < UNSENT_MAX:
            node = share.path[0]
            if node.host is None:
                if self._may_come(node):
                    return
                why = "lacking"
            elif self._places.format_of(node.host.slot).name != share.format or not node.host.check:
                why = "lacking"
            else:
                share.path.popleft()
                self._send_one(reader, share, node, now_s)
        if why is None and not share.path:
            why = ""
        if why is not None:
            share.is_ended = True
            reader.end(why)
            self._forget(reader, share)

    def _may_come(self, node: Node) -> bool:
        """Return whether a copy of a node that is on the device is under way."""
        is_here = node.parent is not None and node.block >= 0 and not node.is_copied
        return is_here and (self._offloading.moves > 0 or self._offloading.has_promised)

    def _send_one(self, reader: RunReader, share: _Share, node: Node, now_s: float) -> None:
        place = node.host
        assert place is not None, "only what has a copy is sent"
        self._places.hold(place.slot)
        share.unsent.append(place.slot)
        self.sent += 1
        limit_s = None if node.limit_at_s == math.inf else max(0.0, node.limit_at_s - now_s)
        size = self._places.format_of(place.slot).slot_bytes
        reader.take(place.check, limit_s, self._view(place.slot, size))

    def _forget(self, reader: RunReader, share: _Share) -> None:
        if share.is_ended and not share.unsent:
            del self._shares[reader]
