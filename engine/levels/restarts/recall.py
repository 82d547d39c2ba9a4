"""Recall: the promises that the disk still keeps for an engine before become this one's.

The disk tells them page by page, from the root on, whenever it has opened. Each record becomes a
copy that is known here, and its promise is charged, kept, renewed, ended and erased like one that
this engine has made. An erasure during a page makes the engine ask for that page again: its answer
may name what is gone.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.levels.copies import CopyBook
from engine.levels.promises import KeptPromises
from engine.levels.stored_prefixes import Copy
from engine.moves import ROOT, Recall, Recalled, RecalledRun, RecordId, Storage

A_PAGE = 128
"""Records of a page, which enter the tree in about 3 ms."""


class PromiseRecall:
    """The recall of one engine."""

    def __init__(
        self,
        book: CopyBook,
        promises: KeptPromises,
        storage: Storage,
        next_id: Callable[[], int],
    ) -> None:
        self._book, self._promises, self._storage = book, promises, storage
        self._next_id = next_id
        self._call_id = 0
        self._after: RecordId = ROOT
        self._is_void = False
        self._copies: dict[RecordId, Copy] = {}

    @property
    def is_under_way(self) -> bool:
        """Return whether a page is awaited."""
        return self._call_id != 0

    def begin(self) -> None:
        """Ask the disk for what it promises, from the first record on."""
        self._copies.clear()
        self._ask(ROOT)

    def erasing(self) -> None:
        """Take note of an erasure, before the disk is told of it."""
        self._is_void = True

    def take(self, outcome: Recalled, now_s: float) -> None:
        """Take a page, and ask for the next one. About 20 us a record."""
        if outcome.call_id != self._call_id:
            return
        self._call_id = 0
        if outcome.code:  # the disk is away; it is asked again when it has opened
            self._copies.clear()
            return
        if self._is_void:
            self._ask(self._after)
            return
        promised: list[Copy] = []
        until_s: list[float] = []
        for run in outcome.runs:
            copy = self._bring(run, now_s)
            if copy is not None and run.promise_s > 0:
                copy.told_windows = () if run.terms is None else run.terms.window_groups
                self._promises.take_over(copy, now_s + run.promise_s, run.terms, now_s)
                promised.append(copy)
                until_s.append(now_s + run.promise_s)
        self._promises.confirm(promised, until_s, now_s)
        if outcome.last == ROOT:
            self._copies.clear()
        else:
            self._ask(outcome.last)

    # -- internals ----------------------------------------------------------------------------

    def _ask(self, after: RecordId) -> None:
        self._call_id, self._after, self._is_void = self._next_id(), after, False
        self._storage.send(Recall(self._call_id, after, A_PAGE))

    def _bring(self, run: RecalledRun, now_s: float) -> Copy | None:
        """Return the copy of a record; None if what it hangs on is gone, or if this engine has no
        such format.
        """
        book, namespace = self._book, run.namespace
        form = book.formats.of_record(run.fidelity, run.slot_bytes)
        if form is None or len(run.tokens) != book.prefixes.run_tokens:
            return None
        parent: Copy | None = self._copies.get(run.parent)
        if run.parent == ROOT:
            parent = book.prefixes.root(namespace)
        if parent is None or (not parent.is_root and parent.parent is None):
            return None
        book.formats.allow(namespace, run.fidelity)
        copy = book.know(parent, run.tokens, run, form, run.payer or namespace, now_s)
        for lease_id in run.lease_ids:
            book.prefixes.extend_lease(lease_id, copy)
        self._copies[run.record_id] = copy
        return copy
