"""What a level below is told of a promise, and what an engine takes over from it."""

from __future__ import annotations

import math
from typing import Final

from engine.cache.tree.leases import BlockTerms
from engine.cache.tree.prefix_tree import Node
from engine.moves import PromiseTerms

UNKNOWN_CLASS: Final = "unknown"
"""The class of a promise of which a level knows the end alone."""


def told_terms(node: Node) -> PromiseTerms | None:
    """Return how a node's promise is counted and renewed, for the next engine; None without one."""
    terms = node.terms
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
        promised_windows(node),
    )


def promised_windows(node: Node) -> tuple[int, ...]:
    """Return the window groups whose blocks of this run are promised, on any level."""
    windows = [*enumerate(node.beside or ()), *enumerate(node.away or ())]
    return tuple(sorted({g for g, block in windows if block is not None and block.promised}))


def terms_of(told: PromiseTerms | None, until_s: float, limit_at_s: float) -> BlockTerms:
    """Return the terms of a promise that an engine before has made until then. `told`: how it is
    counted and renewed, None where that is not known.
    """
    terms = BlockTerms(limit_at_s)
    if told is None:
        terms.extend_promise(until_s, UNKNOWN_CLASS)
        return terms
    terms.extend_promise(until_s, told.name)
    terms.renew_class, terms.use_class = told.renew_name, told.use_name
    terms.renew_limit_s, terms.renew_promise_s = told.renew_limit_s, told.renew_promise_s
    terms.use_limit_s, terms.use_promise_s = told.use_limit_s, told.use_promise_s
    return terms
