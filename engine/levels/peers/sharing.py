"""Sharing: what other engines ask of this one's prefixes is copied to host memory and sent, or
held on the device while an engine of this host copies it.

Tokens are compared in the tree, never digests. Copies are held while they are sent, a few at a
time; what only the device has is offloaded shortly before. While sequences run here, all shares
together send `RUNNING_PART` of the bytes that host memory is read at. A share ends after `SHARE_S`,
and where the next run is gone, as after an erasure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from engine.api import Fidelity, Namespace
from engine.cache import BlockTable, PrefixCache
from engine.cache.tree.prefix_tree import Node, whole_runs
from engine.levels.load_choice import LevelPace
from engine.levels.offloading import Offloading
from engine.levels.places import RunPlaces
from engine.moves import LentBlocks, RunReader, ShareRuns

SHARE_S: Final = 10.0
"""The longest time for which anything is held for another engine."""
SHARES_MAX: Final = 8
"""Engines that are served at a time."""
UNSENT_MAX: Final = 8
"""Copies of a share that are held and not sent yet."""
AHEAD: Final = 2 * UNSENT_MAX
"""Runs of a share that are copied off the device before it is their turn."""
RUNNING_PART: Final = 0.1
"""The part of the bandwidth of copies that shares may take while sequences run."""
BURST_S: Final = 0.1
"""What has not been sent for so long may be sent at once."""


@dataclass(slots=True, eq=False)
class _Share:
    """`path`: the runs still to send; `asked`: how many of them are to be copied off the device;
    `unsent`: the slots that are held, in order; `lent`: holds the blocks that a reader on this host
    copies itself."""

    format: str
    until_s: float
    path: deque[Node]
    asked: int = 0
    unsent: deque[int] = field(default_factory=deque)
    lent: BlockTable | None = None
    is_ended: bool = False


class Sharing:
    """All shares of one engine. `sent`: copies that have left so far."""

    def __init__(
        self,
        cache: PrefixCache,
        places: RunPlaces,
        offloading: Offloading,
        view: Callable[[int, int], memoryview],
        pace: LevelPace,
        pool: bytes = b"",
        fidelity_of: Callable[[Namespace], Fidelity] = lambda namespace: "exact",
    ) -> None:
        """`view` returns the bytes of a slot of a size. `pace`: of copies from host memory. `pool`:
        the handle of this engine's, for engines of its host. `fidelity_of`: how far what a
        namespace has on the device may be from exact."""
        self._fidelity_of = fidelity_of
        self._cache, self._places, self._offloading, self._view = cache, places, offloading, view
        self._pace, self._pool, self._now_s = pace, pool, 0.0
        self._room = math.inf
        """The bytes that may be sent now; below 0 after a copy that was larger."""
        self._shares: dict[RunReader, _Share] = {}
        self.sent = 0

    def __len__(self) -> int:
        return len(self._shares)

    @property
    def is_lending(self) -> bool:
        """Return whether blocks of the device are held for readers. O(shares)."""
        return any(share.lent is not None for share in self._shares.values())

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
        if wanted.is_near:
            self._lend(path, wanted, reader, now_s)
            return
        share = _Share(wanted.format, now_s + SHARE_S, path=deque(path[wanted.first :]))
        self._shares[reader] = share
        self._send(reader, share, now_s)

    def _lend(self, path: list[Node], wanted: ShareRuns, reader: RunReader, now_s: float) -> None:
        """Hold the blocks that the device has of a path, and tell a reader on this host which they
        are. What is committed was written by a step that has been collected."""
        path = path[: next((i for i, node in enumerate(path) if node.block < 0), len(path))]
        lent = path[wanted.first :]
        account = self._cache.moves.account_of(path[0]) if lent else None
        if account is None:
            reader.end("lacking")
            return
        if self._cache.moves.spare_blocks < len(path):  # running sequences grow meanwhile
            reader.end("busy")
            return
        share = _Share(wanted.format, now_s + SHARE_S, deque(lent))
        share.lent = self._cache.moves.hold(account, path, now_s)
        self._shares[reader] = share
        self.sent += len(lent)
        blocks = tuple(node.block for node in lent)
        limits = tuple(_limit_s(node, now_s) for node in lent)
        fidelity = self._fidelity_of(wanted.namespace)
        reader.lend(LentBlocks(self._pool, blocks, limits, fidelity))

    def returned(self, reader: RunReader) -> None:
        """Let go the blocks that a reader has copied; tell it whether they were held till now."""
        share = self._shares.get(reader)
        if share is None or share.is_ended:
            reader.end("late")
            return
        share.is_ended = True
        reader.end("" if share.path[-1].parent is not None else "lacking")  # it was erased
        self._forget(reader, share)

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

    def turn(self, now_s: float, *, is_running: bool) -> None:
        """Send what may be sent now. `is_running`: sequences are. O(shares, these)."""
        passed_s, room, self._now_s = now_s - self._now_s, self._room, now_s
        self._room = math.inf
        if is_running:
            rate = RUNNING_PART * self._pace.bytes_per_s
            self._room = min(rate * BURST_S, room + rate * passed_s)
        for reader, share in list(self._shares.items()):
            self._send(reader, share, now_s)

    def _send(self, reader: RunReader, share: _Share, now_s: float) -> None:
        if share.is_ended:
            return
        why: str | None = None
        if now_s >= share.until_s:
            why = "late"
        elif share.lent is not None:
            return
        while why is None and share.path and len(share.unsent) < UNSENT_MAX and self._room > 0:
            self._copy_ahead(share)
            node = share.path[0]
            if node.host is None:
                if self._may_come(node):
                    return
                why = "lacking"
            elif self._places.format_of(node.host.slot).name != share.format or not node.host.check:
                why = "lacking"
            else:
                share.path.popleft()
                share.asked -= 1
                self._send_one(reader, share, node, now_s)
        if why is None and not share.path:
            why = ""
        if why is not None:
            share.is_ended = True
            reader.end(why)
            self._forget(reader, share)

    def _copy_ahead(self, share: _Share) -> None:
        """Have the next runs copied off the device, half of `AHEAD` at a time."""
        if share.asked > AHEAD // 2 or share.asked >= len(share.path):
            return
        share.asked = min(AHEAD, len(share.path))
        last = share.path[share.asked - 1]
        if not last.is_copied:
            self._offloading.promised(last, ())

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
        size = self._places.format_of(place.slot).slot_bytes
        self._room -= size
        reader.take(place.check, _limit_s(node, now_s), self._view(place.slot, size))

    def _forget(self, reader: RunReader, share: _Share) -> None:
        if share.is_ended and not share.unsent:
            del self._shares[reader]
            if share.lent is not None:
                self._cache.moves.unhold(share.lent)


def _limit_s(node: Node, now_s: float) -> float | None:
    """Return the seconds for which a node may be matched; None without a limit."""
    return None if node.limit_at_s == math.inf else max(0.0, node.limit_at_s - now_s)
