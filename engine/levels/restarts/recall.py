"""Recall: the promises that the disk still keeps for an engine before become this one's.

The disk tells them page by page, from the root on, whenever it has opened. Each record becomes a
place that is known here, and its promise is charged, kept, renewed, ended and erased like one that
this engine has made. An erasure during a page makes the engine ask for that page again: its answer
may name what is gone.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.cache import PrefixCache
from engine.cache.tree.prefix_tree import Node
from engine.levels.places import RunPlaces
from engine.levels.promises import KeptPromises
from engine.moves import ROOT, Recall, Recalled, RecalledRun, RecordId, Storage

A_PAGE = 128
"""Records of a page, which enter the tree in about 3 ms."""


class PromiseRecall:
    """The recall of one engine."""

    def __init__(
        self,
        cache: PrefixCache,
        places: RunPlaces,
        promises: KeptPromises,
        storage: Storage,
        next_id: Callable[[], int],
    ) -> None:
        self._cache, self._places = cache, places
        self._promises, self._storage = promises, storage
        self._next_id = next_id
        self._call_id = 0
        self._after: RecordId = ROOT
        self._is_void = False
        self._nodes: dict[RecordId, Node] = {}

    @property
    def is_under_way(self) -> bool:
        """Return whether a page is awaited."""
        return self._call_id != 0

    def begin(self) -> None:
        """Ask the disk for what it promises, from the first record on."""
        self._nodes.clear()
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
            self._nodes.clear()
            return
        if self._is_void:
            self._ask(self._after)
            return
        promised: list[Node] = []
        until_s: list[float] = []
        for run in outcome.runs:
            node = self._bring(run)
            if node is not None and node.record is not None and run.promise_s > 0:
                node.record.told_windows = () if run.terms is None else run.terms.window_groups
                self._promises.take_over(node, now_s + run.promise_s, run.terms, now_s)
                promised.append(node)
                until_s.append(now_s + run.promise_s)
        self._promises.confirm(promised, until_s, now_s)
        if outcome.last == ROOT:
            self._nodes.clear()
        else:
            self._ask(outcome.last)

    # -- internals ----------------------------------------------------------------------------

    def _ask(self, after: RecordId) -> None:
        self._call_id, self._after, self._is_void = self._next_id(), after, False
        self._storage.send(Recall(self._call_id, after, A_PAGE))

    def _bring(self, run: RecalledRun) -> Node | None:
        """Return the node of a record; None if what it hangs on is gone, or if this engine has no
        such format.
        """
        places, namespace = self._places, run.namespace
        form = places.formats.of_record(run.fidelity, run.slot_bytes)
        if form is None or len(run.tokens) != places.run_tokens:
            return None
        parent = self._nodes.get(run.parent)
        if run.parent != ROOT and (parent is None or not parent.is_copied):
            return None
        places.formats.allow(namespace, run.fidelity)
        node = places.know(namespace, run.payer or namespace, parent, run.tokens, run, form)
        for lease_id in run.lease_ids:
            self._cache.extend_lease(lease_id, node)
        self._nodes[run.record_id] = node
        return node
