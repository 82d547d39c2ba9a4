"""The digests of prompts in strides: each stretch is digested once, in however many prompts."""

from __future__ import annotations

from collections.abc import Iterable

from engine.api import Namespace
from engine.strides import STRIDE_TOKENS, chain_strides, stride_key
from gateway.bench.simulation.traffic import Stretch


class _Reached:
    """Where a stretch ends: the digests of its strides, and the tokens behind the last of them."""

    __slots__ = ("before", "digests", "next", "rest")

    def __init__(self, before: bytes, digests: list[bytes], rest: list[int]) -> None:
        self.digests, self.rest = digests, rest
        self.before = digests[-1] if digests else before
        self.next: dict[Stretch, _Reached] = {}


class StretchStrides:
    """The digests that `stride_digests` gives, for prompts in stretches."""

    def __init__(self) -> None:
        self._roots: dict[Namespace, _Reached] = {}

    def digests(self, namespace: Namespace, stretches: Iterable[Stretch]) -> list[bytes]:
        """Return the digest of every whole stride. O(strides), and O(tokens) of new stretches."""
        at = self._roots.setdefault(namespace, _Reached(b"", [], []))
        found: list[bytes] = []
        for stretch in stretches:
            further = at.next.get(stretch)
            if further is None:
                tokens = at.rest + [stretch[0]] * stretch[1]
                new = chain_strides(stride_key(namespace), at.before, tokens)
                rest = tokens[len(new) * STRIDE_TOKENS :]
                further = at.next[stretch] = _Reached(at.before, new, rest)
            found += further.digests
            at = further
        return found
