"""Near fetches: prefixes that an engine of this host has on its device, copied into blocks of this
one's pool.

What has come is committed as if a request had computed it: the one that waited finds it on the
device. The blocks belong to a block table until then, which pins what comes before them, too. Those
who want what is on its way wait for it. The other engine says at the end whether it held what was
read all the time; if not, nothing counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from msgspec.structs import replace

from engine.api import CacheGrant, Fidelity, Namespace, Peer
from engine.cache import BlockTable, PrefixCache
from engine.cache.tree.prefix_tree import common_prefix_length
from engine.levels.level_use import FetchedTokens
from engine.levels.load_choice import LevelPace
from engine.levels.peers.fetching import FETCH_S_MAX, FETCH_S_MIN, PeerFetching
from engine.levels.places import RunPlaces
from engine.moves import FetchBlocks, FetchedBlocks, NearPeers, NearPools, PeerMiss
from engine.statistics import LevelStats

PAUSE_S: Final = 60.0
"""For so long no pool is read after one that was out of reach: copies come instead."""
LOOK_S: Final = 1.0
"""Seconds between two looks for pools of engines that have ended."""


class Waiting(NamedTuple):
    """A request that waits for a fetch, and what another way of fetching needs to know of it.
    `known`: whole runs of it that some level here has."""

    sequence_id: int
    grant: CacheGrant
    tokens: Sequence[int]
    peer: Peer
    known: int


class _Ended(NamedTuple):
    """A request whose fetch has ended, and what that has put on the device. `left_s`: for copies,
    where nothing came and they may; else 0. `why` not all came."""

    waiting: Waiting
    fetched: FetchedTokens
    left_s: float
    why: PeerMiss


@dataclass(slots=True, eq=False)
class _Fetch:
    """A fetch that has not ended. `table`: of the blocks that it fills; `after_step`: it fills them
    only when this step has been collected, since a step in flight may still write to their former
    owner; None until the first turn. `until_s`: its deadline, from when it has begun."""

    command: FetchBlocks
    table: BlockTable
    waiting: list[Waiting]
    until_s: float = math.inf
    after_step: int | None = None
    is_sent: bool = False
    is_void: bool = False


class NearFetching:
    """All near fetches of one engine. `pace`: the measured one; `misses`: fetches that have ended,
    by why not all came; `fetched`: runs that came."""

    def __init__(
        self,
        cache: PrefixCache,
        places: RunPlaces,
        copies: PeerFetching,
        peers: NearPeers,
        pools: NearPools,
        next_id: Callable[[], int],
        tokens_min: int,
        block_bytes: int,
        note_fidelity: Callable[[Namespace, Fidelity], None],
    ) -> None:
        """`copies`: fetches of copies, where blocks cannot be had. `tokens_min`: the least tokens
        for which a peer is asked. `note_fidelity`: called with how far from exact may be what has
        come into a namespace."""
        self._places, self._copies = places, copies
        self._note_fidelity = note_fidelity
        self._cache, self._peers = cache, peers
        self._next_id, self._tokens_min = next_id, tokens_min
        self.pace = LevelPace("peer", [block_bytes], bytes_per_s=pools.bytes_per_s)
        self.domain = pools.domain
        self.misses = Counter[PeerMiss]()
        self.fetched = self.ended_total = 0
        self._pools = pools
        self._now_s, self._paused_until_s, self._looked_at_s = 0.0, -math.inf, -math.inf
        self._open: dict[int, _Fetch] = {}
        self._ended: list[_Ended] = []

    def __len__(self) -> int:
        return len(self._open)

    @property
    def bytes_per_s(self) -> float:
        """Return the measured rate; 0 while no pool is asked for, since one was out of reach."""
        return 0.0 if self._now_s < self._paused_until_s else self.pace.bytes_per_s

    def begin(
        self,
        sequence_id: int,
        grant: CacheGrant,
        tokens: Sequence[int],
        peer: Peer,
        compute_s: float,
        now_s: float,
    ) -> float:
        """Begin to fetch what a peer has of a request's tokens; return the seconds within which it
        ends, 0 where nothing is begun. It ends itself after `compute_s`, the predicted seconds to
        compute the rest, from when no step in flight is in its way: nor could the request compute
        before that. Copies come instead where no block can and they are predicted to take no
        longer. O(runs).
        """
        here = len(self._cache.find(grant.namespace, tokens, now_s).path)
        known = max(here, len(self._places.match(grant.namespace, tokens, now_s)))
        lacking = min(peer.tokens, len(tokens) - 1) - known * self._cache.block_size
        if lacking < self._tokens_min or not (grant.read and grant.write):
            return 0.0
        one = Waiting(sequence_id, grant, tokens, peer, known)
        return self._begin(one, compute_s, now_s) or self._copy(one, compute_s, now_s)

    def _copy(self, one: Waiting, seconds: float, now_s: float) -> float:
        """Begin to fetch copies, as `begin`. The gateway has judged by the pace of pools alone."""
        sequence_id, grant, tokens, peer, _ = one
        blocks = peer.tokens // self._cache.block_size
        if self._copies.pace.seconds(blocks) > seconds:
            return 0.0
        return self._copies.begin(sequence_id, grant, tokens, peer.tokens, peer, seconds, now_s)

    def _begin(self, waiting: Waiting, compute_s: float, now_s: float) -> float:
        """Begin to fetch blocks, as `begin`."""
        _, grant, tokens, peer, known = waiting
        size, namespace = self._cache.block_size, grant.namespace
        runs = min(peer.tokens, len(tokens) - 1) // size
        if now_s < self._paused_until_s or self._copies.is_paused(namespace, now_s):
            return 0.0
        timeout_s = min(FETCH_S_MAX, max(FETCH_S_MIN, compute_s))
        wanted = tuple(tokens[: runs * size])
        if (other := self._bringing(namespace, wanted, known * size)) is not None:
            other.waiting.append(waiting)
            return FETCH_S_MAX + timeout_s
        table = self._cache.fills.begin(namespace, grant.quota, wanted, now_s)
        if table is None:
            return 0.0
        call_id, first = self._next_id(), table.committed
        asked = tuple(tokens[: peer.tokens])  # as its ticket has them
        what = namespace, asked, first, tuple(table.blocks[first:]), timeout_s
        command = FetchBlocks(call_id, peer, *what)
        self._open[call_id] = _Fetch(command, table, [waiting])
        return FETCH_S_MAX + timeout_s

    def leave(self, sequence_id: int) -> bool:
        """Stop the fetch of a sequence that does not wait any more, unless others wait for it;
        return whether it had one."""
        for call_id, one in self._open.items():
            left = [other for other in one.waiting if other.sequence_id != sequence_id]
            if len(left) < len(one.waiting):
                one.waiting = left
                if not left:
                    self._peers.stop(call_id)
                return True
        return False

    def take_ended(self, now_s: float) -> dict[int, FetchedTokens]:
        """Return the sequences whose fetch has ended since the last call, with what it has put on
        the device that no level here had. One for which nothing came waits on, for copies."""
        ended, self._ended = self._ended, []
        found: dict[int, FetchedTokens] = {}
        for waiting, fetched, left_s, why in ended:
            if left_s and self._copy(waiting, left_s, now_s):
                continue
            self._count(why)
            found[waiting.sequence_id] = fetched
        return found

    def erase(self, namespace: Namespace) -> None:
        """Let nothing count that is under way into a namespace of which something is erased."""
        for call_id, one in self._open.items():
            if one.command.namespace == namespace:
                one.is_void = True
                self._peers.stop(call_id)

    def turn(self, now_s: float, launched: int, collected: int) -> None:
        """Commit what has come, and begin to copy into blocks that no step in flight writes to.
        `launched`, `collected`: the last steps that were. O(these)."""
        self._now_s = now_s
        if now_s >= self._looked_at_s + LOOK_S:
            self._looked_at_s = now_s
            self._pools.let_go_ended()
        for one in self._open.values():
            if one.after_step is None:
                one.after_step = launched
            if not one.is_sent and collected >= one.after_step:
                one.is_sent, one.until_s = True, now_s + one.command.timeout_s
                self._peers.fetch_blocks(one.command)
                if one.is_void or not one.waiting:
                    self._peers.stop(one.command.call_id)
        for outcome in self._peers.poll_blocks():
            self._end(self._open.pop(outcome.call_id), outcome, now_s)

    def add_to(self, stats: LevelStats) -> LevelStats:
        """Return the statistics of peers with what came by near fetches: it is on the device."""
        misses = {why: count for why, count in self.misses.items() if why}
        return replace(
            stats,
            loaded_total=stats.loaded_total + self.fetched,
            failed_total=stats.failed_total + sum(misses.values()),
            bytes_per_s=self.pace.bytes_per_s if self.fetched else stats.bytes_per_s,
            chosen_total=stats.chosen_total + self.ended_total,
            not_loaded=dict(Counter(stats.not_loaded) + Counter(misses)),
        )

    def _bringing(self, namespace: Namespace, wanted: Sequence[int], known: int) -> _Fetch | None:
        """Return the fetch under way that is about to bring at least half of what is wanted behind
        the first `known` tokens; None without one. O(fetches + tokens)."""
        for one in self._open.values():
            if one.command.namespace == namespace and one.waiting and not one.is_void:
                shared = common_prefix_length(one.command.tokens, wanted)
                if 2 * (shared - known) >= len(wanted) - known:
                    return one
        return None

    def _end(self, one: _Fetch, outcome: FetchedBlocks, now_s: float) -> None:
        """Commit what a fetch has brought, and let the rest of its blocks go."""
        cache, table, first = self._cache, one.table, one.command.first
        is_void = one.is_void or not one.waiting  # who has left is billed for a hit as its own
        limits_s = () if is_void else outcome.limits_s
        why: PeerMiss = "stopped" if is_void else outcome.why
        came, left_s = len(limits_s), 0.0
        if why == "unreadable":
            self._paused_until_s = now_s + PAUSE_S
        if came:
            self.fetched += came
            self.pace.record_block(outcome.seconds / came)
            limits = [math.inf if limit is None else now_s + limit for limit in limits_s]
            cache.fills.commit(table, one.command.tokens, limits, now_s)
            self._note_fidelity(one.command.namespace, outcome.fidelity)
        elif why in ("lacking", "unreadable"):
            left_s = max(0.0, one.until_s - now_s)
        cache.fills.end(table)
        if not one.waiting:
            self._count(why)
        size, end = cache.block_size, first + came
        for waiting in one.waiting:
            start = min(end, max(first, waiting.known))
            fetched = FetchedTokens("peer", start * size, end * size)
            self._ended.append(_Ended(waiting, fetched, left_s, why))

    def _count(self, why: PeerMiss) -> None:
        """Count a fetch that has ended, and why not all came."""
        self.ended_total += 1
        self.misses[why] += 1
