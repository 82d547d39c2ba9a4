"""Where leases end: of each lease in a namespace, the last blocks that it covers.

A lease covers a prefix, so whoever covers a block covers all above it: only where it ends needs
keeping, and a beginning that many leases share costs no more than one. It answers what an erasure
asks: which blocks does this lease cover, and no other? It knows no terms and no time. An account
has one for its tree; `lease_book` says how far leases reach, `holdings` what leaves the tree.

    root ─ a ─ b ─ c    c ends lease 1, d ends lease 2: both cover a and b.
               └─ d     Erasing 1 takes c; erasing 2 as well takes a, and all below it.
"""

from __future__ import annotations

from engine.cache.prefix_tree import Node
from engine.errors import InvariantViolation

HANDED_UP_MAX = 64
"""Leases whose last blocks have left the tree end at the block above. Where so many end already,
further ones are not noted: what they shared is covered without them."""


class LeaseExpiry:
    """Of one namespace. `Node.ends` says the same from the other side."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[Node, None]] = {}

    def reach(self, lease_id: str, node: Node) -> None:
        """A lease covers this block: as far as is known here, its last. O(1)."""
        if node.parent is not None and lease_id in node.parent.ends:
            self._leave(lease_id, node.parent)
        self._end(lease_id, node)

    def move(self, old: Node, new: Node) -> None:
        """Another node takes a node's place. O(its leases)."""
        for lease_id in tuple(old.ends):
            self._leave(lease_id, old)
            self._end(lease_id, new)

    def goes(self, leaf: Node) -> None:
        """It is about to leave the tree: what ended here ends above. O(its leases)."""
        above = leaf.parent
        for lease_id in tuple(leaf.ends):
            self._leave(lease_id, leaf)
            if above is not None and above.block >= 0 and len(above.ends) < HANDED_UP_MAX:
                self._end(lease_id, above)

    def strike(self, lease_id: str) -> list[Node]:
        """The lease is no more: the topmost nodes that it alone covered. O(blocks below them, and
        what is looked at until another lease is found)."""
        ended = list(self._nodes.get(lease_id, ()))
        for node in ended:
            self._leave(lease_id, node)
        return list({_top(node): None for node in ended if not _is_covered(node)})

    def check(self, node: Node) -> int:
        """How many leases end at a node. Raises InvariantViolation where one is not noted here.
        O(these)."""
        for lease_id in node.ends:
            if node not in self._nodes.get(lease_id, ()):
                raise InvariantViolation(f"a lease ends at {node.run} and is not noted")
        return len(node.ends)

    def check_sum(self, ends: int) -> None:
        """Raises InvariantViolation where other than so many ends are noted. O(leases)."""
        noted = sum(map(len, self._nodes.values()))
        if noted != ends or not all(self._nodes.values()):
            raise InvariantViolation(f"{noted} ends of leases, recounted: {ends}")

    def _end(self, lease_id: str, node: Node) -> None:
        if isinstance(node.ends, set):
            node.ends.add(lease_id)
        else:
            node.ends = {lease_id}
        self._nodes.setdefault(lease_id, {})[node] = None

    def _leave(self, lease_id: str, node: Node) -> None:
        assert isinstance(node.ends, set), "a lease ends here"
        node.ends.remove(lease_id)
        nodes = self._nodes[lease_id]
        del nodes[node]
        if not nodes:
            del self._nodes[lease_id]


def _is_covered(top: Node) -> bool:
    """Does a lease end here or below? Looks no further than to the first."""
    stack = [top]
    while stack:
        node = stack.pop()
        if node.ends:
            return True
        stack.extend(node.children.values())
    return False


def _top(node: Node) -> Node:
    """Of a node that nothing covers, the topmost above it that nothing covers either."""
    while (above := node.parent) is not None and above.block >= 0 and not above.ends:
        if any(_is_covered(child) for child in above.children.values() if child is not node):
            break
        node = above
    return node
