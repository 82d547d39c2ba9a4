"""Storing: which copies in host memory are written to disk.

Promised prefixes are stored at once; others when they have been matched at least once and are long
enough, within the day's writes. Records hang on the records before them, so a path is stored from
its first run without a record on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from engine.cache import PrefixCache
from engine.cache.tree.places import HostPlace
from engine.cache.tree.prefix_tree import Node
from engine.levels.disk.waiting_paths import WaitingPaths
from engine.levels.places import RunPlaces
from engine.levels.promise_terms import told_terms
from engine.levels.promises import FOREVER_S
from engine.moves import ROOT, RunToStore, Stored, StoreRuns

RUNS_MAX: Final = 64
"""Runs of one store."""
STORES_MAX: Final = 4
"""Stores under way at a time."""
WAITING_MAX: Final = 4096
"""Paths that may wait for their store; the payer with most of them gives up its oldest."""


class Storing:
    """The paths that wait to be stored, and the stores under way."""

    def __init__(
        self,
        cache: PrefixCache,
        places: RunPlaces,
        next_id: Callable[[], int],
        tokens_min: int,
        on_stored: Callable[[Sequence[Node], Sequence[float], float], None],
    ) -> None:
        """`tokens_min`: the shortest prefix that is stored without a promise. `on_stored` is called
        with copies that have records now, until when the disk keeps each, and the time.
        """
        self._cache, self._places = cache, places
        self._next_id = next_id
        self._tokens_min = tokens_min
        self._on_stored = on_stored
        self._waiting = WaitingPaths(WAITING_MAX)
        self._stores: dict[int, _Store] = {}
        self.has_budget = True
        self.failed = 0
        self.stored = 0

    @property
    def has_work(self) -> bool:
        """Return whether a store is under way or waits."""
        return bool(self._stores or self._waiting)

    def copied(self, copies: Iterable[Node]) -> None:
        """Consider runs that have just come to host memory."""
        wanted = None
        for node in copies:
            if node.parent is not None and self._is_wanted(node):
                wanted = node
        if wanted is not None:
            self._wait(wanted)

    def copied_all(self, copies: Iterable[Node]) -> None:
        """Have all promised runs stored that are not: the disk is back, or has just come. `copies`:
        children before parents. O(copies).
        """
        seen = set[Node]()
        for node in copies:
            if node.promised and node.record is None and node not in seen:
                self._wait(node)
                seen.update(node.path())

    def next_stores(self, now_s: float) -> list[StoreRuns]:
        """Return the stores to send now."""
        commands: list[StoreRuns] = []
        for _ in range(len(self._waiting)):
            if len(self._stores) >= STORES_MAX:
                break
            end = self._waiting.take()
            if end.parent is None or self._places.formats.at_rest(end.namespace) == "never":
                continue
            path = end.path()
            first = next((i for i, node in enumerate(path) if node.record is None), len(path))
            place = path[first].host if first < len(path) else None
            if place is not None and place.is_storing:
                self._wait(end)  # what it hangs on is under way
            elif (command := self._store(end, path, first, now_s)) is not None:
                commands.append(command)
        return commands

    def finished(self, outcome: Stored, now_s: float) -> None:
        """Take the outcome of a store."""
        found = self._stores.pop(outcome.call_id, None)
        if found is None:
            return
        stored: list[Node] = []
        for index, (node, place, run) in enumerate(found.runs):
            place.is_storing = False
            if index < len(outcome.record_ids) and node.parent is not None:
                self._places.set_record(node, outcome.record_ids[index], place.form)
                if node.record is not None and run.terms is not None:
                    node.record.told_windows = run.terms.window_groups
                self.stored += 1
                stored.append(node)
            self._places.release(place.slot)
        until_s = [found.sent_s + run.promise_s for _, _, run in found.runs]
        self._on_stored(stored, until_s[: len(stored)], now_s)
        if len(outcome.record_ids) < len(found.runs):
            self.failed += 1
            above = found.runs[0][0].parent
            if outcome.code == "no_parent" and above is not None:  # the record before it is gone
                self._forget_records(above)
        elif found.end.parent is not None and found.end.record is None:
            self._wait(found.end, is_next=True)

    # -- internals ----------------------------------------------------------------------------

    def _wait(self, end: Node, *, is_next: bool = False) -> None:
        self._waiting.add(self._cache.payer_of(end.namespace), end, is_next=is_next)

    def _forget_records(self, end: Node) -> None:
        for node in end.path():
            if node.parent is not None and node.record is not None:
                self._places.lose_record(node)

    def _is_wanted(self, node: Node) -> bool:
        if node.promised:
            return True
        if not self.has_budget or not node.hits:
            return False
        return len(node.path()) * len(node.run) >= self._tokens_min

    def _store(self, end: Node, path: list[Node], first: int, now_s: float) -> StoreRuns | None:
        """Return the store of the runs from `first` on, the first without a record, on the path to
        `end`, as far as they have one format; None if there is nothing to store.
        """
        runs: list[tuple[Node, HostPlace, RunToStore]] = []
        for node in path[first : first + RUNS_MAX]:
            place = node.host
            if place is None or not place.check or place.is_storing:
                break
            if runs and place.form != runs[0][1].form:
                break
            runs.append((node, place, _run_of(node, place, now_s)))
        if not runs:
            return None
        for _, place, _ in runs:
            place.is_storing = True
            self._places.hold(place.slot)
        leases = set[str]()
        for node in path[first:]:
            leases |= set(node.ending_leases)
        call_id, namespace = self._next_id(), end.namespace
        self._stores[call_id] = _Store(runs, end, now_s)
        form = self._places.formats.formats[runs[0][1].form]
        return StoreRuns(
            call_id,
            namespace,
            self._cache.payer_of(namespace),
            path[first - 1].record_id if first else ROOT,
            tuple(run for _, _, run in runs),
            form.slot_bytes,
            tuple(sorted(leases)),
            form.fidelity,
            self._places.formats.at_rest(namespace) == "remote",
        )


class _Store(NamedTuple):
    """A store under way: its runs, the end of their path, and when it was sent."""

    runs: list[tuple[Node, HostPlace, RunToStore]]
    end: Node
    sent_s: float


def _run_of(node: Node, place: HostPlace, now_s: float) -> RunToStore:
    """Return a run as the disk is to keep it."""
    terms, limit_s, promise_s = node.terms, None, 0.0
    if terms is not None and terms.limit_at_s < math.inf:
        limit_s = max(0.0, terms.limit_at_s - now_s)
    if terms is not None and node.promised:
        promise_s = max(0.0, terms.promise_at_s - now_s)
        promise_s = min(promise_s, FOREVER_S if limit_s is None else limit_s)
    told = told_terms(node) if promise_s else None
    return RunToStore(node.run, place.slot, place.check, limit_s, promise_s, told)
