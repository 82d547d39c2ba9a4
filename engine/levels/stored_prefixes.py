"""The tree of copies below the device: token runs by namespace, each in a host slot, on disk or
both.

It stands beside the device's prefix tree and is closed upward: where a run has a copy, all runs
before it have one. Only whole runs have copies. Tokens prove equality, as on the device. The tree
knows no block, no payer's share and no clock; `HostAccounts` owns the slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import count, islice

from engine.api import LevelName, Namespace, Payer
from engine.cache.tree.lease_endpoints import NO_LEASES, LeaseEndpoints
from engine.cache.tree.leases import BlockTerms, Deadlines
from engine.cache.tree.prefix_tree import Node, Run, nodes_under, upward, whole_runs
from engine.errors import InvariantViolation
from engine.moves import PromiseTerms, RecordId


@dataclass(slots=True, eq=False, repr=False)
class Copy:
    """The copies of one run below the device.

    `slot`: its slot of host memory, or -1; `check`: the digest of that slot's bytes, if known.
    `record_id`: its record on disk, or 0; `record_format`: the format of that; `is_remote`: it was
    in the remote store alone when it was looked up. `limit_at_s`: not matched at or after;
    `promise_at_s`: promised until. `terms`: those of the promise that this copy keeps for the
    device, or None; `window_terms`: the same for its window blocks, by window group, empty where it
    keeps none; `told_windows`: the window groups of whose promises the disk knows; `kept_until_s`:
    until when the disk keeps the record at least, to be renewed from `renew_at_s` on;
    `has_promise_deadline`: that will be examined. `hits`: how often it was matched. `node`: the
    device's node with the same tokens, where one is known. `ending_leases`: the leases whose last
    copy this is. `is_storing`: a store is under way. `order_key`: its place among the copies that
    may be dropped, or None. `is_unverified`: another engine made it, and its bytes have not been
    compared with `check` yet. A copy that left the tree has no parent; the root of a namespace has
    an empty run.
    """

    namespace: Namespace
    payer: Payer
    run: Run
    parent: Copy | None
    serial: int
    children: dict[Run, Copy] = field(default_factory=dict)
    slot: int = -1
    check: bytes = b""
    record_id: RecordId = 0
    record_format: int = 0
    is_remote: bool = False
    limit_at_s: float = math.inf
    promise_at_s: float = -math.inf
    terms: BlockTerms | None = None
    window_terms: Sequence[BlockTerms | None] = ()
    told_windows: Sequence[int] = ()
    kept_until_s: float = -math.inf
    renew_at_s: float = -math.inf
    has_promise_deadline: bool = False
    last_use_s: float = 0.0
    hits: int = 0
    node: Node | None = None
    ending_leases: Set[str] = NO_LEASES
    has_deadline: bool = False
    is_storing: bool = False
    is_unverified: bool = False
    is_kept: bool = False
    order_key: tuple[float, int] | None = None

    @property
    def level(self) -> LevelName:
        """The nearest level on which it is known to be."""
        if self.slot >= 0:
            return "host"
        return "remote" if self.is_remote else "disk"

    @property
    def is_root(self) -> bool:
        """Return whether this is the root of its namespace, which has no copy."""
        return not self.run

    @property
    def keeps_promise(self) -> bool:
        """Return whether it keeps a promise for the device: of its run, or of window blocks."""
        return self.terms is not None or bool(self.window_terms)

    def is_over(self, now_s: float) -> bool:
        """Return whether its limit has passed; reads on the device may have moved it. O(1)."""
        if self.limit_at_s > now_s:
            return False
        if self.terms is not None and self.terms.limit_at_s > self.limit_at_s:
            self.limit_at_s = self.terms.limit_at_s
        return self.limit_at_s <= now_s

    def promise_terms(self) -> PromiseTerms | None:
        """Return how its promise is counted and renewed, for the next engine; None without one."""
        terms = self.terms
        if terms is None and self.node is not None:
            terms = self.node.terms
        if terms is None or terms.promise_at_s == -math.inf:
            return None
        return PromiseTerms(
            terms.promised_class,
            terms.renew_class,
            terms.use_class,
            terms.renew_limit_s,
            terms.renew_promise_s,
            terms.use_limit_s,
            terms.use_promise_s,
            self._promised_windows(),
        )

    def _promised_windows(self) -> tuple[int, ...]:
        """Return the window groups whose blocks of this run are promised, on any level."""
        groups = {group for group, terms in enumerate(self.window_terms) if terms is not None}
        if self.node is not None and self.node.parent is not None:
            beside = enumerate(self.node.beside or ())
            groups |= {group for group, one in beside if one is not None and one.promised}
        return tuple(sorted(groups))

    def subtree(self) -> list[Copy]:
        """Return this copy and all below it, children before parents."""
        found, stack = [], [self]
        while stack:
            copy = stack.pop()
            found.append(copy)
            stack.extend(copy.children.values())
        found.reverse()
        return found

    def path(self) -> list[Copy]:
        """Return the copies from the first run to this one. O(depth)."""
        found = list(upward(self))
        found.reverse()
        return found


class StoredPrefixes:
    """The copies of every namespace.

    `on_removed` is called with each copy that has left the tree, `on_changed` with each whose
    children have changed, `on_terms` with each whose limit has changed, and `on_leases` with each
    where a lease has come to end, or does so no more. `expired_total` counts copies that reached
    their limit.
    """

    def __init__(
        self,
        run_tokens: int,
        on_removed: Callable[[Copy], None],
        on_changed: Callable[[Copy], None],
        on_terms: Callable[[Copy], None],
        on_leases: Callable[[Copy], None],
    ) -> None:
        self.run_tokens = run_tokens
        self.expired_total = 0
        self._on_removed = on_removed
        self._on_changed = on_changed
        self._on_terms = on_terms
        self._on_leases = on_leases
        self._roots: dict[Namespace, Copy] = {}
        self._leases: dict[Namespace, LeaseEndpoints[Copy]] = {}
        self._limits: Deadlines[Copy] = Deadlines()
        self._serials = count(1)

    def __iter__(self) -> Iterator[Copy]:
        """Iterate over every copy, children before parents. O(copies)."""
        for root in self._roots.values():
            yield from (copy for copy in root.subtree() if not copy.is_root)

    def has(self, namespace: Namespace) -> bool:
        """Return whether the namespace has any copy. O(1)."""
        return namespace in self._roots

    def root(self, namespace: Namespace) -> Copy:
        """Return the namespace's root; it is kept once something is added below it."""
        return self._roots.get(namespace) or Copy(namespace, b"", (), None, 0)

    def along(self, namespace: Namespace, tokens: Iterable[int]) -> list[Copy]:
        """Return the copies of the leading whole runs of `tokens`, also those whose limit has
        passed. O(runs matched).
        """
        root = self._roots.get(namespace)
        return [] if root is None else whole_runs(root, tokens, self.run_tokens)

    def match(self, namespace: Namespace, tokens: Sequence[int], now_s: float) -> list[Copy]:
        """Return the copies of the longest leading part of `tokens`, in whole runs, leaving one
        token at least. O(runs matched).
        """
        path: list[Copy] = []
        for copy in self.along(namespace, islice(tokens, max(0, len(tokens) - 1))):
            if copy.is_over(now_s):
                break
            path.append(copy)
        return path

    def add(self, parent: Copy, run: Run, payer: Payer, now_s: float) -> Copy:
        """Add a copy of `run` below `parent`, which has none yet. O(1)."""
        if len(run) != self.run_tokens or run in parent.children:
            raise InvariantViolation("a copy is made once for each whole run")
        if parent.is_root:
            if self._roots.setdefault(parent.namespace, parent) is not parent:
                raise InvariantViolation("a copy below a root that is not the namespace's")
            self._leases.setdefault(parent.namespace, LeaseEndpoints(self._on_leases))
        copy = Copy(parent.namespace, payer, run, parent, next(self._serials))
        copy.last_use_s = now_s
        parent.children[run] = copy
        self._on_changed(parent)
        return copy

    def remove(self, top: Copy) -> int:
        """Remove a copy and all below it. Return how many. O(these)."""
        parent = top.parent
        if parent is None:
            raise InvariantViolation("a copy was removed twice")
        del parent.children[top.run]
        gone, leases = top.subtree(), self._leases[parent.namespace]
        for copy in gone:
            leases.hand_up(copy, parent)
            copy.parent = None
        for copy in gone:
            self._on_removed(copy)
        if not parent.is_root:
            self._on_changed(parent)
        elif not parent.children:
            del self._roots[parent.namespace], self._leases[parent.namespace]
        return len(gone)

    # -- limits -------------------------------------------------------------------------------

    def set_limit(self, copy: Copy, limit_at_s: float) -> None:
        """Set the time from which a copy is not matched. O(log copies) the first time."""
        copy.limit_at_s = limit_at_s
        self._on_terms(copy)
        if limit_at_s < math.inf and not copy.has_deadline:
            copy.has_deadline = True
            self._limits.add(limit_at_s, copy)

    def expire(self, now_s: float) -> int:
        """Remove every copy whose limit has passed, and what lies below. Return how many."""
        gone = 0
        for copy in self._limits.take_due(now_s):
            copy.has_deadline = False
            if copy.parent is None:
                continue
            if not copy.is_over(now_s):
                self.set_limit(copy, copy.limit_at_s)
            else:
                gone += self.remove(copy)
        self.expired_total += gone
        return gone

    # -- erasure ------------------------------------------------------------------------------

    def under(self, namespace: Namespace, tokens: Sequence[int] | None) -> list[Copy]:
        """Return the topmost copies whose tokens begin with all of `tokens`; None: of the whole
        namespace. O(runs of `tokens`, children of the last).
        """
        root = self._roots.get(namespace)
        return [] if root is None else nodes_under(root, tokens or (), self.run_tokens)

    def extend_lease(self, lease_id: str, copy: Copy) -> None:
        """Note that a lease covers everything up to `copy`. O(1)."""
        if not copy.is_root:
            self._leases[copy.namespace].extend(lease_id, copy)

    def ends_of(self, namespace: Namespace, lease_id: str) -> list[Copy]:
        """Return the last copies that a lease covers. O(these)."""
        leases = self._leases.get(namespace)
        return [] if leases is None else leases.nodes_of(lease_id)

    def revoke(self, namespace: Namespace, lease_id: str) -> list[Copy]:
        """Forget a lease. Return the topmost copies that it alone covered."""
        leases = self._leases.get(namespace)
        return [] if leases is None else leases.revoke(lease_id)

    def check(self) -> None:
        """Check the shape of the tree and the ends of leases. Raises InvariantViolation.
        O(copies).
        """
        for namespace, root in self._roots.items():
            ends, leases = 0, self._leases[namespace]
            for copy in root.subtree():
                for run, child in copy.children.items():
                    if child.parent is not copy or child.run != run:
                        raise InvariantViolation("a copy below another parent")
                if copy.is_root:
                    continue
                if copy.slot < 0 and not copy.record_id:
                    raise InvariantViolation("a run in the tree of copies without a copy")
                ends += leases.check_node(copy)
            leases.check_total(ends)
