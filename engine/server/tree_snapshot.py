"""What the service reads of a namespace's tree: its shape, and the tokens of a lease.

The shape is that on the device, for operators: counts, never tokens. A chain of nodes without a
fork is one branch. Only the largest branches are returned, each under its nearest returned
ancestor. `engine.server.service` calls both; they change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.api import AtRest, Branch, FindLease, LeaseFound, Namespace
from engine.cache.prefix_cache import PrefixCache
from engine.cache.tree.prefix_tree import Node, upward
from engine.core.core import Core
from engine.protocol import pack_tokens


def survey(
    cache: PrefixCache, namespace: Namespace, branches_max: int, now_s: float
) -> tuple[Branch, ...]:
    """Return the `branches_max` largest branches and all their ancestors, parents first.
    O(blocks)."""
    root = cache.tree_root(namespace)
    if root is None:
        return ()
    weight: dict[int, tuple[int, int]] = {}
    for node in _device_nodes(root):
        blocks, tokens = 1, len(node.run)
        for child in _children(node):
            more = weight[id(child)]
            blocks, tokens = blocks + more[0], tokens + more[1]
        weight[id(node)] = (blocks, tokens)
    # (index of the parent, tokens in the subtree, nodes)
    chains: list[tuple[int, int, list[Node]]] = []
    stack: list[tuple[int, Node]] = [(-1, child) for child in _children(root)]
    while stack:
        parent, node = stack.pop()
        chain = [node]
        while len(below := _children(chain[-1])) == 1:
            chain += below
        place = len(chains)
        chains.append((parent, weight[id(node)][1], chain))
        stack.extend((place, child) for child in below)
    chosen = _largest(chains, branches_max)
    places = {place: number for number, place in enumerate(chosen)}
    return tuple(
        _branch(places.get(chains[place][0], -1), chains[place][1], chains[place][2], now_s)
        for place in chosen
    )


def find_lease(core: Core, call: FindLease) -> LeaseFound:
    """Return the tokens up to the end of a lease, where it is kept longest. O(tokens)."""
    longest: list[Node] = []
    for end in core.cache.lease_ends(call.namespace, call.lease_id):
        path = list(upward(end))
        if len(path) > len(longest) and end.limit_at_s > core.clock():
            longest = path
    tokens = [token for node in reversed(longest) for token in node.run]
    at_rest: AtRest = "remote" if core.levels is None else core.levels.at_rest(call.namespace)
    return LeaseFound(call.call_id, pack_tokens(tokens), at_rest)


def _children(node: Node) -> list[Node]:
    """Return the children on the device. O(these)."""
    if node.child_order is not None:
        return [node.children[run] for run in node.child_order]
    return [child for child in node.children.values() if child.block >= 0]


def _device_nodes(root: Node) -> list[Node]:
    """Return the nodes on the device, children before parents. O(these)."""
    found, stack = list[Node](), [root]
    while stack:
        node = stack.pop()
        found.append(node)
        stack += _children(node)
    found.reverse()
    return found


def _largest(chains: Sequence[tuple[int, int, list[Node]]], branches_max: int) -> list[int]:
    """Return the indices of the largest branches, in order.

    A parent holds all tokens of its children and comes before them, so it is chosen with any of
    them.
    """
    order = sorted(range(len(chains)), key=lambda place: (-chains[place][1], place))
    return sorted(order[:branches_max])


def _branch(parent: int, total_tokens: int, chain: Sequence[Node], now_s: float) -> Branch:
    return Branch(
        parent=parent,
        tokens=sum(len(node.run) for node in chain),
        total_tokens=total_tokens,
        hits=chain[0].hits,
        promised_blocks=sum(node.promised for node in chain),
        idle_s=max(0.0, now_s - max(node.last_use_s for node in chain)),
    )
