"""The shape of a namespace's tree, for people to look at: counts, never tokens.

Chains without branches are one node, and of those only the largest are told, each under its
nearest told ancestor. `service` calls it when somebody asks; it changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.api import Branch, Namespace
from engine.cache.prefix_cache import PrefixCache
from engine.cache.prefix_tree import Node


def survey(cache: PrefixCache, namespace: Namespace, most: int, now_s: float) -> tuple[Branch, ...]:
    """The `most` largest branches with all their ancestors, parents first. O(blocks)."""
    root = cache.tree_root(namespace)
    if root is None:
        return ()
    weight: dict[int, tuple[int, int]] = {}
    for node in root.subtree():
        blocks, tokens = 1, len(node.run)
        for child in node.children.values():
            below = weight[id(child)]
            blocks, tokens = blocks + below[0], tokens + below[1]
        weight[id(node)] = (blocks, tokens)
    chains: list[tuple[int, int, list[Node]]] = []  # (parent's place, tokens under it, nodes)
    stack: list[tuple[int, Node]] = [(-1, child) for child in root.children.values()]
    while stack:
        parent, node = stack.pop()
        chain = [node]
        while len(chain[-1].children) == 1:
            chain.append(next(iter(chain[-1].children.values())))
        place = len(chains)
        chains.append((parent, weight[id(node)][1], chain))
        stack.extend((place, child) for child in chain[-1].children.values())
    chosen = _largest(chains, most)
    places = {place: number for number, place in enumerate(chosen)}
    return tuple(
        _branch(places.get(chains[place][0], -1), chains[place][1], chains[place][2], now_s)
        for place in chosen
    )


def _largest(chains: Sequence[tuple[int, int, list[Node]]], most: int) -> list[int]:
    """Places of the largest, in order. A parent holds all its children's tokens, and stands before
    them, so it is chosen whenever one of them is."""
    order = sorted(range(len(chains)), key=lambda place: (-chains[place][1], place))
    return sorted(order[:most])


def _branch(parent: int, total_tokens: int, chain: Sequence[Node], now_s: float) -> Branch:
    return Branch(
        parent=parent,
        tokens=sum(len(node.run) for node in chain),
        total_tokens=total_tokens,
        hits=chain[0].hits,
        promised_blocks=sum(node.promised for node in chain),
        idle_s=max(0.0, now_s - max(node.last_use_s for node in chain)),
    )
