"""Where in their prompts a tenant's prefixes break: the branching of what it sends.

A prompt is a chain of boundaries. One that leaves the known chains where another prompt went on
differently is a break there, and what stands behind it had to be computed again; one that only
goes further than any before is not. Digests and counts, no words; bounded by what was seen lately.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence

from msgspec import Struct

SEEN_MAX = 20_000
PLACES_MAX = 256
_INDEX = re.compile(r"\[(\d+)\]")


class Mark(Struct, frozen=True, gc=False):
    """The end of a segment: where it stood in the request, and a digest of everything up to it."""

    path: str
    tokens: int
    digest: bytes


class Break(Struct, frozen=True):
    """`count` prompts broke at `place`; `tokens` stood behind."""

    place: str
    count: int
    tokens: int


class Volatility:
    """One tenant's breaks. Belongs to one thread."""

    def __init__(self, seen_max: int = SEEN_MAX) -> None:
        self._seen_max = seen_max
        self._seen: OrderedDict[bytes, bool] = OrderedDict()
        self._breaks: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self.prompts = 0

    def note(self, marks: Sequence[Mark], total_tokens: int) -> None:
        """One more prompt. O(marks)."""
        self.prompts += 1
        before, behind = b"", total_tokens
        is_known = True
        for mark in marks:
            if is_known and mark.digest not in self._seen:
                is_known = False
                if self._seen.get(before, False):
                    self._count(place_of(mark.path), behind)
            if not is_known or mark.digest in self._seen:
                self._seen[before] = True
                self._seen.move_to_end(before)
            self._seen.setdefault(mark.digest, False)
            self._seen.move_to_end(mark.digest)
            before, behind = mark.digest, total_tokens - mark.tokens
        while len(self._seen) > self._seen_max:
            self._seen.popitem(last=False)

    def breaks(self, most: int = 20) -> list[Break]:
        """Where most tokens were lost, first."""
        found = [Break(place, *counts) for place, counts in self._breaks.items()]
        return sorted(found, key=lambda one: -one.tokens)[:most]

    def _count(self, place: str, tokens: int) -> None:
        count, lost = self._breaks.get(place, (0, 0))
        self._breaks[place] = (count + 1, lost + tokens)
        self._breaks.move_to_end(place)
        while len(self._breaks) > PLACES_MAX:
            self._breaks.popitem(last=False)


def place_of(path: str) -> str:
    """A path with its later indexes folded: the third message and the thirtieth are one place."""
    return _INDEX.sub(lambda match: f"[{match[1]}]" if int(match[1]) < 2 else "[2+]", path)[:120]
