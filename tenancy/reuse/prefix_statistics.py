"""The tree of a tenant's prefixes: how often each is used, what it hit, and where prompts leave it.

A prompt is a chain of boundaries, and a node is the beginning of some prompts, up to one of them. A
prompt that leaves the tree where another went on differently is a break there, and what stands
behind it had to be computed again; one that only goes further than any before is not. Digests and
counts, no words; bounded: what was used longest ago goes, leaves first, and is counted on where it
hung. It knows no engine and no clock; `gateway.analytics.aggregates` tells it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from heapq import nlargest
from operator import attrgetter
from typing import Protocol

from msgspec import Struct
from xxhash import xxh3_64, xxh3_64_intdigest

PREFIXES_MAX = 3_072
PLACES_MAX = 256
MARKS_MAX = 512
"""Boundaries of one prompt, looked at."""

PATH_CHARS_MAX = 120

_INDEX = re.compile(r"\[(\d+)\]")


class SegmentEnd(Protocol):
    """The end of a segment: where it stood in the request, and how many tokens end there."""

    @property
    def path(self) -> str: ...
    @property
    def tokens(self) -> int: ...


class PrefixBreak(Struct, frozen=True):
    """`count` prompts broke at `place`; `tokens` stood behind."""

    place: str
    count: int
    tokens: int


class PrefixUsage(Struct, frozen=True):
    """`uses`: prompts that began with it; `hits`: those of them that found all of it cached."""

    digest: int
    path: str
    tokens: int
    uses: int
    hits: int


class _Node:
    """A prefix. `uses`, `hits`: those that went no further, `all_uses` and `all_hits` with all that
    did, as of the last `top`; `children`: nodes right behind it; `is_left_behind`: did a prompt
    ever go further?"""

    __slots__ = (
        "all_hits", "all_uses", "children", "digest", "hits", "is_left_behind", "parent", "path",
        "tokens", "uses",
    )  # fmt: skip

    def __init__(self, digest: int, parent: _Node | None, path: str, tokens: int) -> None:
        self.digest, self.parent, self.path, self.tokens = digest, parent, path, tokens
        self.uses = self.hits = self.all_uses = self.all_hits = self.children = 0
        self.is_left_behind = False


class PrefixStatistics:
    """One tenant's. Belongs to one thread."""

    def __init__(self, prefixes_max: int = PREFIXES_MAX) -> None:
        self._max = prefixes_max
        self._root = _Node(0, None, "", 0)
        self._nodes: OrderedDict[int, _Node] = OrderedDict()
        self._breaks: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def note(self, data: bytes, marks: Sequence[SegmentEnd], total: int, found: int) -> None:
        """One more prompt: its first token ids, four bytes each, and where its segments end, from
        the beginning; `found` of its `total` tokens were cached. O(tokens) at memory's speed, 1 us
        for each prefix that is new; of those known, the deepest few are looked at."""
        node = self._root
        if marks:
            # What is cut off behind `data` may stay: then this is a prefix of the prompt, too.
            known = self._nodes.get(xxh3_64_intdigest(data[: 4 * marks[-1].tokens]))
            if known is None:
                node = self._grow(data, marks, total)
            else:
                self._nodes.move_to_end(known.digest)
                node = known
        node.uses += 1
        while node.tokens > found and node.parent is not None:
            node = node.parent
        node.hits += 1
        if len(self._nodes) > self._max:
            self._evict()

    def prompts(self) -> int:
        """How many were noted. O(prefixes)."""
        return self._root.uses + sum(node.uses for node in self._nodes.values())

    def top(self, most: int = 20) -> list[PrefixUsage]:
        """Those that saved most, first. O(prefixes), three milliseconds at most."""
        by_depth = sorted(self._nodes.values(), key=attrgetter("tokens"), reverse=True)
        for node in (self._root, *by_depth):
            node.all_uses, node.all_hits = node.uses, node.hits
        for node in by_depth:
            assert node.parent is not None, "the root is not in the table"
            node.parent.all_uses += node.all_uses
            node.parent.all_hits += node.all_hits
        best = nlargest(most, by_depth, key=lambda node: node.tokens * node.all_hits)
        return [
            PrefixUsage(node.digest, node.path, node.tokens, node.all_uses, node.all_hits)
            for node in best
        ]

    def breaks(self, most: int = 20) -> list[PrefixBreak]:
        """Where most tokens were lost, first."""
        found = [PrefixBreak(place, *counts) for place, counts in self._breaks.items()]
        return sorted(found, key=lambda one: -one.tokens)[:most]

    def check(self) -> None:
        """Raises AssertionError if the tree is none. O(prefixes)."""
        assert len(self._nodes) <= self._max
        nodes = [self._root, *self._nodes.values()]
        kept = {id(node): 0 for node in nodes}
        for node in nodes[1:]:
            assert node.parent is not None
            assert node.parent.tokens < node.tokens
            kept[id(node.parent)] += 1
        assert all(kept[id(node)] == node.children for node in nodes)

    def _grow(self, data: bytes, marks: Sequence[SegmentEnd], total: int) -> _Node:
        """A prompt's way through the tree, and into it. The last node of it."""
        if len(marks) > MARKS_MAX or 4 * marks[-1].tokens > len(data):
            marks = [mark for mark in marks[:MARKS_MAX] if 4 * mark.tokens <= len(data)]
        node, after = self._known(data, marks) if len(marks) > 1 else (self._root, 0)
        at = 4 * node.tokens
        hasher = xxh3_64(data[:at])
        fresh: list[_Node] = []
        for mark in marks[after:]:
            if mark.tokens <= node.tokens:
                continue  # an empty segment: the same prefix
            hasher.update(data[at : 4 * mark.tokens])
            at, digest = 4 * mark.tokens, hasher.intdigest()
            known = self._nodes.get(digest)
            if known is None:
                known = _Node(digest, node, mark.path[:PATH_CHARS_MAX], mark.tokens)
                fresh.append(known)
            elif fresh:
                self._put(fresh, known)
                fresh = []
            node = known
        if fresh:
            parted = fresh[0].parent
            assert parted is not None, "only the root has none"
            if parted.is_left_behind:
                self._count(fold_indexes(fresh[0].path), total - parted.tokens)
            self._put(fresh, None)
        return node

    def _known(self, data: bytes, marks: Sequence[SegmentEnd]) -> tuple[_Node, int]:
        """A deep prefix of the prompt that is in the tree, with all before it, and how many marks
        that is: looked for from the end, in steps that double, as chats grow there."""
        at, step = len(marks) - 2, 1
        while at >= 0:
            node = self._nodes.get(xxh3_64_intdigest(data[: 4 * marks[at].tokens]))
            if node is not None:
                return node, at + 1
            at -= step
            step *= 2
        return self._root, 0

    def _put(self, fresh: Sequence[_Node], behind: _Node | None) -> None:
        """A chain into the tree, at its end or before a node that was there: somebody had cut the
        same words into fewer segments."""
        for node in fresh:
            assert node.parent is not None, "only the root has none"
            node.parent.children += 1
            node.parent.is_left_behind = True
        if behind is not None and behind.parent is not None:
            last = fresh[-1]
            last.is_left_behind = True
            if behind.parent.tokens < last.tokens < behind.tokens:
                behind.parent.children -= 1
                behind.parent = last
                last.children += 1
        # The deepest is the first to go.
        self._nodes.update([(node.digest, node) for node in reversed(fresh)])

    def _evict(self) -> None:
        """The leaves that were used longest ago go; what has leaves is passed over, and as new."""
        while len(self._nodes) > self._max:
            digest, node = self._nodes.popitem(last=False)
            if node.children:
                self._nodes[digest] = node
            else:
                assert node.parent is not None, "the root is not in the table"
                node.parent.uses += node.uses
                node.parent.hits += node.hits
                node.parent.children -= 1

    def _count(self, place: str, tokens: int) -> None:
        count, lost = self._breaks.get(place, (0, 0))
        self._breaks[place] = (count + 1, lost + tokens)
        self._breaks.move_to_end(place)
        while len(self._breaks) > PLACES_MAX:
            self._breaks.popitem(last=False)


@lru_cache(maxsize=512)
def fold_indexes(path: str) -> str:
    """A path with its later indexes folded: the third message and the thirtieth are one place."""
    return _INDEX.sub(lambda match: f"[{match[1]}]" if int(match[1]) < 2 else "[2+]", path)[:120]
