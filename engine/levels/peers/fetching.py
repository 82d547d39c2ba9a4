"""Fetches: prefixes that another engine has, or a store that replicas share, brought into slots of
host memory for one request.

What has come has a place as any other copy, so that the request loads it as it would load what it
had left there itself. Runs come in order, each verified; the first that fails ends the fetch, and
what is missing is computed. A request that wants what another one's fetch is about to bring waits
for that one. Nothing is fetched into a namespace for a while after an erasure, since
the other engine may not have heard of it yet.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Literal

from engine.api import CacheGrant, Namespace, Payer, Peer
from engine.cache import PrefixCache
from engine.cache.tree.prefix_tree import Node
from engine.levels.level_use import FetchedTokens
from engine.levels.load_choice import LevelPace
from engine.levels.places import RunPlaces
from engine.moves import FetchedRun, FetchRuns, PeerMiss, Peers
from engine.statistics import LevelStats

FETCH_S_MIN: Final = 0.25
FETCH_S_MAX: Final = 10.0
"""A fetch may take what computing its tokens is predicted to take, within these."""
NotFetched = Literal["no_room", "slower", "paused"]
"""Why none was begun: no slots; computing is predicted to be faster; fetches had lost time."""
GETS: Final = 8
"""Runs that a shared store brings side by side."""
GRACE_S: Final = 0.05
"""A request waits so much longer than its fetch, whose end says more."""
ERASED_S: Final = 120.0
"""For so long after an erasure nothing is fetched into its namespace: a ticket and a transfer may
be 40 s old, and another gateway hears of a missed erasure within a minute."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """A fetch under way. `sequence_ids`: those that wait for it; `until_s`: its deadline; `slots`:
    those without an outcome yet, in order; `parent`: the last run that has come, or that was known
    before; `came`: the runs that have, from `first` on."""

    sequence_ids: list[int]
    until_s: float
    namespace: Namespace
    payer: Payer
    epoch: int
    form: int
    runs: deque[tuple[int, ...]]
    slots: deque[int]
    parent: Node | None
    compute_s: float
    began_s: float
    first: int
    came: int = 0
    is_void: bool = False


class PeerFetching:
    """All fetches of one engine, from its peers or from a shared store. `pace`: the measured one.

    Whether a peer is worth asking its gateway has judged; for a shared store the pace says so here.
    """

    def __init__(
        self,
        cache: PrefixCache,
        places: RunPlaces,
        peers: Peers,
        next_id: Callable[[], int],
        tokens_min: int,
        source: Literal["peer", "remote"] = "peer",
    ) -> None:
        """`tokens_min`: the least tokens for which a peer is asked; `source`: what it is."""
        self._cache, self._places, self._peers = cache, places, peers
        self._next_id, self._tokens_min = next_id, tokens_min
        self._source: Final = source
        sizes = [one.slot_bytes for one in places.formats.formats]
        self.pace = LevelPace(source, sizes, GETS if source == "remote" else 1)
        self._open: dict[int, _Fetch] = {}
        self._ended: dict[int, FetchedTokens] = {}
        self._erased_at_s: OrderedDict[Namespace, float] = OrderedDict()
        self._fetched = 0
        self._outcomes = Counter[PeerMiss | NotFetched]()

    def __len__(self) -> int:
        return len(self._open)

    def begin(
        self,
        sequence_id: int,
        grant: CacheGrant,
        tokens: Sequence[int],
        there: int,
        peer: Peer | None,
        compute_s: float,
        now_s: float,
    ) -> float:
        """Begin to fetch what a peer, or the shared store, has of a request's `tokens` and no level
        has here; return the seconds that it is worth waiting for, 0 where nothing is begun.
        `there`: the tokens that it has; `compute_s`: predicted seconds to compute them. O(runs).
        """
        size, places, namespace = self._places.run_tokens, self._places, grant.namespace
        path = places.match(namespace, tokens, now_s)
        runs, first = min(there, len(tokens) - 1) // size, len(path)
        if (runs - first) * size < self._tokens_min or not (grant.read and grant.write):
            return 0.0
        if self.is_paused(namespace, now_s):
            return 0.0
        form, payer = places.formats.of(namespace), grant.quota.payer or grant.payer
        parent = path[-1] if path else None
        if (why := self._why_not(runs - first, form, compute_s, now_s)) is not None:
            self._outcomes[why] += 1
            return 0.0
        timeout_s = min(FETCH_S_MAX, max(FETCH_S_MIN, compute_s))
        wanted = [tuple(tokens[i * size : (i + 1) * size]) for i in range(first, runs)]
        if (other := self._bringing(namespace, parent, wanted, now_s)) is not None:
            other.sequence_ids.append(sequence_id)
            return min(timeout_s, other.until_s - now_s) + GRACE_S
        if parent is not None and parent.host is not None:
            places.hold(parent.host.slot)  # what comes hangs on it
        slots = list[int]()
        while len(slots) < runs - first:
            if slots:
                slot = places.take_another(payer, namespace, form)
            else:
                slot = places.take_slot(payer, namespace, form, grant.quota)
            if slot is None:
                break
            slots.append(slot)
        if parent is not None and parent.host is not None:
            places.release(parent.host.slot)
        if not slots:
            self._outcomes["no_room"] += 1
            return 0.0
        call_id, epoch = self._next_id(), places.epochs[namespace]
        self._open[call_id] = _Fetch(
            *([sequence_id], now_s + timeout_s, namespace, payer, epoch, form),
            *(deque(wanted[: len(slots)]), deque(slots), parent, compute_s, now_s, first),
        )
        what = namespace, tuple(tokens[:there]), first, tuple(slots)
        form_of = places.formats.formats[form]
        self._peers.fetch(FetchRuns(call_id, peer, *what, form_of, timeout_s))
        return timeout_s + GRACE_S

    def is_paused(self, namespace: Namespace, now_s: float) -> bool:
        """Return whether nothing is fetched into a namespace, since something of it was erased."""
        return now_s - self._erased_at_s.get(namespace, -math.inf) < ERASED_S

    def _why_not(self, blocks: int, form: int, compute_s: float, now_s: float) -> NotFetched | None:
        """Return why a shared store is not asked for so many blocks; None if it is."""
        if self._source == "peer":
            return None
        if not self.pace.is_open(now_s):
            return "paused"
        return "slower" if self.pace.seconds(blocks, form) > compute_s else None

    def _bringing(
        self,
        namespace: Namespace,
        parent: Node | None,
        wanted: Sequence[tuple[int, ...]],
        now_s: float,
    ) -> _Fetch | None:
        """Return the fetch under way that is about to bring at least half of the `wanted` runs
        behind `parent`; None without one. O(fetches + these)."""
        for one in self._open.values():
            if one.namespace == namespace and one.parent is parent and now_s < one.until_s:
                pairs = zip(one.runs, wanted, strict=False)
                shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                is_live = not one.is_void and one.epoch == self._places.epochs[namespace]
                if is_live and one.sequence_ids and 2 * shared >= len(wanted):
                    return one
        return None

    def leave(self, sequence_id: int) -> FetchedTokens | None:
        """Stop the fetch of a sequence that does not wait any more, unless others wait for it;
        return what has come; None where it had none."""
        for call_id, one in self._open.items():
            if sequence_id in one.sequence_ids:
                one.sequence_ids.remove(sequence_id)
                if not one.sequence_ids:
                    self._peers.stop(call_id)
                return self._fetched_by(one)
        return None

    def take_ended(self) -> dict[int, FetchedTokens]:
        """Return the sequences whose fetch has ended since the last call, with what has come."""
        ended, self._ended = self._ended, {}
        return ended

    def _fetched_by(self, one: _Fetch) -> FetchedTokens:
        size = self._places.run_tokens
        return FetchedTokens(self._source, one.first * size, (one.first + one.came) * size)

    def erase(self, namespace: Namespace, now_s: float) -> None:
        """Drop what is under way into a namespace that is erased, and begin nothing for a while."""
        self._erased_at_s[namespace] = now_s
        self._erased_at_s.move_to_end(namespace)
        while next(iter(self._erased_at_s.values())) < now_s - ERASED_S:
            self._erased_at_s.popitem(last=False)
        for call_id, one in self._open.items():
            if one.namespace == namespace:
                self._peers.stop(call_id)

    def turn(self, now_s: float) -> None:
        """Give places to the runs that have come. O(these)."""
        for outcome in self._peers.poll():
            one = self._open[outcome.call_id]
            self._take(one, outcome, now_s)
            if not one.slots:
                del self._open[outcome.call_id]
                self._outcomes[outcome.why] += 1
                if self._source == "remote" and not one.is_void:
                    self.pace.record_load(now_s - one.began_s, one.compute_s, now_s)
                fetched = self._fetched_by(one)
                self._ended.update(dict.fromkeys(one.sequence_ids, fetched))

    def stats(self, loaded_tokens: int, sent: int) -> LevelStats:
        """Return the statistics of what peers have brought and got (`sent`); `not_loaded`: fetches
        that ended before all had come, or were not begun, by why."""
        return LevelStats(
            "peer",
            "open",
            stored_total=sent,
            fetched_total=self._fetched,
            failed_total=sum(self.misses.values()),
            damaged_total=self._outcomes["damaged"],
            loaded_tokens_total=loaded_tokens,
            bytes_per_s=self.pace.bytes_per_s,
            chosen_total=self._outcomes.total(),
            not_loaded=self.misses,
        )

    @property
    def misses(self) -> dict[str, int]:
        """Return the fetches that ended before all had come, or were not begun, by why."""
        return {why: count for why, count in self._outcomes.items() if why}

    @property
    def begun_total(self) -> int:
        """Return the fetches that have ended, or were not begun."""
        return self._outcomes.total()

    def close(self) -> None:
        """End all fetches: no slot is written any more."""
        self._peers.close()

    def _take(self, one: _Fetch, outcome: FetchedRun, now_s: float) -> None:
        """Give the next run of a fetch its place, or its slot back."""
        slot, run = one.slots.popleft(), one.runs.popleft()
        places, parent = self._places, one.parent
        is_gone = parent is not None and (parent.parent is None or not parent.is_copied)
        one.is_void |= bool(outcome.why) or is_gone or one.epoch != places.epochs[one.namespace]
        if one.is_void:
            places.release(slot)
            return
        self._fetched += 1
        one.came += 1
        self.pace.record_block(outcome.seconds, one.form)
        node = self._cache.add_run(one.namespace, one.payer, parent, run)
        is_new = node.block < 0 and not node.is_copied
        if node.host is None:
            places.give(node, slot, outcome.check)
        else:
            places.release(slot)
        limit_at_s = math.inf if outcome.limit_s is None else now_s + outcome.limit_s
        self._cache.promises.extend_limit(node, limit_at_s, now_s, is_new=is_new)
        one.parent = node
