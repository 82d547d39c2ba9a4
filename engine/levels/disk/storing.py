"""Storing: which copies in host memory are written to disk.

Promised prefixes are stored at once; others when they have been matched at least once and are long
enough, within the day's writes. Records hang on the records before them, so a path is stored from
its first run without a record on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from engine.levels.copies import CopyBook
from engine.levels.disk.waiting_paths import WaitingPaths
from engine.levels.promises import FOREVER_S
from engine.levels.stored_prefixes import Copy
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
        book: CopyBook,
        next_id: Callable[[], int],
        tokens_min: int,
        on_stored: Callable[[Sequence[Copy], Sequence[float], float], None],
    ) -> None:
        """`tokens_min`: the shortest prefix that is stored without a promise. `on_stored` is called
        with copies that have records now, until when the disk keeps each, and the time.
        """
        self._book = book
        self._next_id = next_id
        self._tokens_min = tokens_min
        self._on_stored = on_stored
        self._waiting = WaitingPaths(WAITING_MAX)
        self._stores: dict[int, tuple[list[Copy], list[int], list[float], Copy, int]] = {}
        self.has_budget = True
        self.failed = 0
        self.stored = 0

    @property
    def has_work(self) -> bool:
        """Return whether a store is under way or waits."""
        return bool(self._stores or self._waiting)

    def copied(self, copies: Iterable[Copy], now_s: float) -> None:
        """Consider copies that have just come to host memory."""
        wanted = None
        for copy in copies:
            if self._is_wanted(copy, now_s):
                wanted = copy
        if wanted is not None:
            self._waiting.add(wanted)

    def copied_all(self, copies: Iterable[Copy], now_s: float) -> None:
        """Have all promised copies stored that are not: the disk is back, or has just come.
        `copies`: children before parents. O(copies).
        """
        seen = set[Copy]()
        for copy in copies:
            if copy.promise_at_s > now_s and not copy.record_id and copy not in seen:
                self._waiting.add(copy)
                seen.update(copy.path())

    def next_stores(self, now_s: float) -> list[StoreRuns]:
        """Return the stores to send now."""
        commands: list[StoreRuns] = []
        for _ in range(len(self._waiting)):
            if len(self._stores) >= STORES_MAX:
                break
            end = self._waiting.take()
            if end.parent is None or self._book.formats.at_rest(end.namespace) == "never":
                continue
            path = end.path()
            first = next((i for i, copy in enumerate(path) if not copy.record_id), len(path))
            if first < len(path) and path[first].is_storing:
                self._waiting.add(end)  # what it hangs on is under way
            elif (command := self._store(end, path, first, now_s)) is not None:
                commands.append(command)
        return commands

    def finished(self, outcome: Stored, now_s: float) -> None:
        """Take the outcome of a store."""
        found = self._stores.pop(outcome.call_id, None)
        if found is None:
            return
        copies, slots, until_s, end, form = found
        stored: list[Copy] = []
        for index, (copy, slot) in enumerate(zip(copies, slots, strict=True)):
            copy.is_storing = False
            if index < len(outcome.record_ids) and copy.parent is not None:
                self._book.set_record(copy, outcome.record_ids[index], form)
                self.stored += 1
                stored.append(copy)
            self._book.release(slot)
        self._on_stored(stored, until_s[: len(stored)], now_s)
        if len(outcome.record_ids) < len(copies):
            self.failed += 1
            if outcome.code == "no_parent":  # the record before it is gone
                above = copies[0].parent
                if above is not None and not above.is_root:
                    self._forget_records(above)
        elif end.parent is not None and not end.record_id:
            self._waiting.add(end, is_next=True)

    # -- internals ----------------------------------------------------------------------------

    def _forget_records(self, copy: Copy) -> None:
        for one in copy.path():
            if one.parent is None or not one.record_id:
                continue
            self._book.set_record(one, 0)
            if one.slot < 0:
                self._book.prefixes.remove(one)
                return

    def _is_wanted(self, copy: Copy, now_s: float) -> bool:
        if copy.promise_at_s > now_s:
            return True
        if not self.has_budget or not (copy.hits or (copy.node is not None and copy.node.hits)):
            return False
        return len(copy.path()) * len(copy.run) >= self._tokens_min

    def _store(self, end: Copy, path: list[Copy], first: int, now_s: float) -> StoreRuns | None:
        """Return the store of the runs from `first` on, the first without a record, on the path to
        `end`, as far as they have one format; None if there is nothing to store.
        """
        copies: list[Copy] = []
        form, pool = 0, self._book.accounts.pool
        for copy in path[first : first + RUNS_MAX]:
            if copy.slot < 0 or not copy.check or copy.is_storing:
                break
            if copies and pool.format_of(copy.slot) != form:
                break
            form = pool.format_of(copy.slot)
            copies.append(copy)
        if not copies:
            return None
        parent = path[first - 1].record_id if first else ROOT
        runs, until_s, leases = [], list[float](), set[str]()
        for copy in copies:
            copy.is_storing = True
            self._book.hold(copy.slot)
            limit_s = None if copy.limit_at_s == math.inf else max(0.0, copy.limit_at_s - now_s)
            promise_s = max(0.0, copy.promise_at_s - now_s)
            promise_s = min(promise_s, FOREVER_S if limit_s is None else limit_s)
            until_s.append(now_s + promise_s)
            terms = copy.promise_terms() if promise_s else None
            copy.told_windows = () if terms is None else terms.window_groups
            runs.append(RunToStore(copy.run, copy.slot, copy.check, limit_s, promise_s, terms))
        for copy in path[first:]:
            leases |= set(copy.ending_leases)
        call_id = self._next_id()
        self._stores[call_id] = (copies, [copy.slot for copy in copies], until_s, end, form)
        return StoreRuns(
            call_id,
            copies[0].namespace,
            copies[0].payer,
            parent,
            tuple(runs),
            pool.formats[form].slot_bytes,
            tuple(sorted(leases)),
            pool.formats[form].fidelity,
            self._book.formats.at_rest(copies[0].namespace) == "remote",
        )
