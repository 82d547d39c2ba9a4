"""Lease endpoints: the last blocks that each lease of a namespace covers.

A lease covers a prefix, so a lease on a block also covers every block above it. Only the last block
is stored; a prefix that many leases share costs no more than one. The endpoints answer an erasure's
question: which blocks does this lease cover alone? They know no terms and no time. Each account has
one `LeaseEndpoints` for its tree; `lease_manager` extends leases, `block_manager` reports nodes
that leave the tree.

    root ─ a ─ b ─ c    Lease 1 ends at c, lease 2 at d: both cover a and b.
               └─ d     Erasing 1 takes c; erasing 2 as well takes a, and all below it.
"""

from __future__ import annotations

from engine.cache.tree.prefix_tree import Node
from engine.errors import InvariantViolation

HANDED_UP_MAX = 64
"""The number of leases that a block may inherit from descendants that left the tree. Beyond it,
further leases are not noted there: the block is covered without them.
"""


class LeaseEndpoints:
    """The endpoints of one namespace's leases. `Node.ending_leases` holds the inverse mapping."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[Node, None]] = {}

    def extend(self, lease_id: str, node: Node) -> None:
        """Extend a lease to cover `node`, which becomes its last block as far as is known. O(1)."""
        if node.parent is not None and lease_id in node.parent.ending_leases:
            self._remove(lease_id, node.parent)
        self._add(lease_id, node)

    def replace_node(self, old: Node, new: Node) -> None:
        """Move the endpoints of node `old` to the node `new` that replaces it. O(leases at
        `old`).
        """
        for lease_id in tuple(old.ending_leases):
            self._remove(lease_id, old)
            self._add(lease_id, new)

    def remove_node(self, leaf: Node) -> None:
        """Move the endpoints of a leaf that is about to leave the tree to its parent. O(leases at
        the leaf).
        """
        above = leaf.parent
        for lease_id in tuple(leaf.ending_leases):
            self._remove(lease_id, leaf)
            if above is not None and above.block >= 0 and len(above.ending_leases) < HANDED_UP_MAX:
                self._add(lease_id, above)

    def nodes_of(self, lease_id: str) -> list[Node]:
        """Return the last nodes that a lease covers. O(these)."""
        return list(self._nodes.get(lease_id, ()))

    def revoke(self, lease_id: str) -> list[Node]:
        """Remove a lease. Return the topmost nodes that it alone covered.

        O(blocks below them, and the nodes visited until another lease is found).
        """
        ended = list(self._nodes.get(lease_id, ()))
        for node in ended:
            self._remove(lease_id, node)
        return list({_topmost_uncovered(node): None for node in ended if not _is_covered(node)})

    def check_node(self, node: Node) -> int:
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

    def _add(self, lease_id: str, node: Node) -> None:
        if isinstance(node.ending_leases, set):
            node.ending_leases.add(lease_id)
        else:
            node.ending_leases = {lease_id}
        self._nodes.setdefault(lease_id, {})[node] = None

    def _remove(self, lease_id: str, node: Node) -> None:
        assert isinstance(node.ending_leases, set), "a lease ends here"
        node.ending_leases.remove(lease_id)
        nodes = self._nodes[lease_id]
        del nodes[node]
        if not nodes:
            del self._nodes[lease_id]


def _is_covered(top: Node) -> bool:
    """Return whether a lease ends at `top` or below. Stops at the first one found."""
    stack = [top]
    while stack:
        node = stack.pop()
        if node.ending_leases:
            return True
        stack.extend(node.children.values())
    return False


def _topmost_uncovered(node: Node) -> Node:
    """Return the topmost ancestor of an uncovered node that no lease covers either."""
    while (above := node.parent) is not None and above.block >= 0 and not above.ending_leases:
        if any(_is_covered(child) for child in above.children.values() if child is not node):
            break
        node = above
    return node
