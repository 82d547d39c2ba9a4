"""Lease endpoints: the last blocks that each lease of a namespace covers.

A lease covers a prefix, so a lease on a block also covers every block above it. Only the last block
is stored; a prefix that many leases share costs no more than one. The endpoints answer an erasure's
question: which blocks does this lease cover alone? They know no terms and no time. Each account has
one `LeaseEndpoints` for its tree: `lease_manager` and `engine.levels` extend leases,
`block_manager` reports nodes that leave the tree. What outlives the engine are the copies below the
device, so that a lease also ends at the last of those that it covers.

    root ─ a ─ b ─ c    Lease 1 ends at c, lease 2 at d: both cover a and b.
               └─ d     Erasing 1 takes c; erasing 2 as well takes a, and all below it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Generic, Protocol, Self, TypeVar

from engine.errors import InvariantViolation

NO_LEASES: Set[str] = frozenset()
HANDED_UP_MAX = 64
"""The number of leases that a block may inherit from descendants that left the tree. Beyond it,
further leases are not noted there: the block is covered without them.
"""


class LeasedNode(Protocol):
    """One run of tokens in a tree of prefixes. The root's run is empty, and it has no parent."""

    ending_leases: Set[str]
    """The leases whose last block this is: `NO_LEASES`, or a set of its own."""

    @property
    def run(self) -> tuple[int, ...]:
        """Return its tokens."""

    @property
    def is_copied(self) -> bool:
        """Return whether it has a place below the device."""

    @property
    def parent(self) -> Self | None:
        """Return the node above."""

    @property
    def children(self) -> Mapping[tuple[int, ...], Self]:
        """Return the nodes below, by their runs."""


N = TypeVar("N", bound=LeasedNode)


class LeaseEndpoints(Generic[N]):
    """The endpoints of one namespace's leases. `LeasedNode.ending_leases` has the inverse."""

    def __init__(self, on_changed: Callable[[N], None] | None = None) -> None:
        """`on_changed` is called with each node where a lease has come to end, or does so no
        more.
        """
        self._nodes: dict[str, dict[N, None]] = {}
        self._on_changed = on_changed

    def extend(self, lease_id: str, node: N) -> None:
        """Extend a lease to cover `node`, which becomes its last block as far as is known. O(1)."""
        above = node.parent
        is_extended = above is not None and lease_id in above.ending_leases
        if above is not None and is_extended and (not above.is_copied or node.is_copied):
            self._remove(lease_id, above)
        self._add(lease_id, node)

    def replace_node(self, old: N, new: N) -> None:
        """Move the endpoints of node `old` to the node `new` that replaces it. O(leases at
        `old`).
        """
        for lease_id in tuple(old.ending_leases):
            self._remove(lease_id, old)
            self._add(lease_id, new)

    def hand_up(self, node: N, above: N | None) -> None:
        """Move the endpoints of a node that is about to leave the tree to `above`, the nearest
        above it that stays. O(leases at the node).
        """
        for lease_id in tuple(node.ending_leases):
            self._remove(lease_id, node)
            if above is not None and above.run and len(above.ending_leases) < HANDED_UP_MAX:
                self._add(lease_id, above)

    def nodes_of(self, lease_id: str) -> list[N]:
        """Return the last nodes that a lease covers. O(these)."""
        return list(self._nodes.get(lease_id, ()))

    def revoke(self, lease_id: str) -> list[N]:
        """Remove a lease. Return the topmost nodes that it alone covered.

        O(blocks below them, and the nodes visited until another lease is found).
        """
        ended = self.nodes_of(lease_id)
        for node in ended:
            self._remove(lease_id, node)
        return list({_topmost_uncovered(node): None for node in ended if not _is_covered(node)})

    def check_node(self, node: N) -> int:
        """Return how many leases end at a node. O(leases at the node).

        Raises: InvariantViolation where an endpoint is missing here.
        """
        for lease_id in node.ending_leases:
            if node not in self._nodes.get(lease_id, ()):
                raise InvariantViolation(f"a lease ends at {node.run} and is missing in the index")
        return len(node.ending_leases)

    def check_total(self, ends: int) -> None:
        """Check that `ends` endpoints are stored. O(leases).

        Raises: InvariantViolation where the number differs.
        """
        noted = sum(map(len, self._nodes.values()))
        if noted != ends or not all(self._nodes.values()):
            raise InvariantViolation(f"{noted} lease endpoints, recounted: {ends}")

    def _add(self, lease_id: str, node: N) -> None:
        if isinstance(node.ending_leases, set):
            node.ending_leases.add(lease_id)
        else:
            node.ending_leases = {lease_id}
        self._nodes.setdefault(lease_id, {})[node] = None
        if self._on_changed is not None:
            self._on_changed(node)

    def _remove(self, lease_id: str, node: N) -> None:
        assert isinstance(node.ending_leases, set), "a lease ends here"
        node.ending_leases.remove(lease_id)
        nodes = self._nodes[lease_id]
        del nodes[node]
        if not nodes:
            del self._nodes[lease_id]
        if self._on_changed is not None:
            self._on_changed(node)


def _is_covered(top: LeasedNode) -> bool:
    """Return whether a lease ends at `top` or below. Stops at the first one found."""
    stack = [top]
    while stack:
        node = stack.pop()
        if node.ending_leases:
            return True
        stack.extend(node.children.values())
    return False


def _topmost_uncovered(node: N) -> N:
    """Return the topmost ancestor of an uncovered node that no lease covers either."""
    while (above := node.parent) is not None and above.run and not above.ending_leases:
        if any(_is_covered(child) for child in above.children.values() if child is not node):
            break
        node = above
    return node
