"""Prefix statistics of one tenant: how often each prefix is used, what it hit, and where prompts
diverge.

A prompt is a chain of segment boundaries, and a tree node is a prefix of some prompts, up to one
boundary. A prompt that leaves the tree where another prompt went on differently is a *break* there:
everything behind it had to be computed again. A prompt that only extends the tree is not. The tree
contains digests and counts, no text. It is bounded: the least recently used leaves are evicted and
their counts added to their parents. The module knows no engine and no clock.
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
"""Prefixes of one tenant that are kept."""
PLACES_MAX = 256
"""Break places of one tenant that are kept."""
MARKS_MAX = 512
"""Boundaries of one prompt that are considered."""

PATH_CHARS_MAX = 120
"""Characters of a path that are kept."""

_INDEX = re.compile(r"\[(\d+)\]")


class SegmentEnd(Protocol):
    """The end of a segment: its path in the request, and how many tokens the prompt has up to
    it."""

    @property
    def path(self) -> str: ...
    @property
    def tokens(self) -> int: ...


class PrefixBreak(Struct, frozen=True):
    """`count` prompts diverged at `place`; `tokens` came after it."""

    place: str
    count: int
    tokens: int


class PrefixUsage(Struct, frozen=True):
    """A prefix. `uses`: prompts that began with it. `hits`: those that found all of it cached."""

    digest: int
    path: str
    tokens: int
    uses: int
    hits: int


class _Node:
    """A tree node. `uses` and `hits`: prompts that ended here.

    `all_uses` and `all_hits` include prompts that went further, as of the last `top`. `children`:
    the number of child nodes. `has_continued`: whether any prompt ever went further.
    """

    __slots__ = (
        "all_hits", "all_uses", "children", "digest", "has_continued", "hits", "parent", "path",
        "tokens", "uses",
    )  # fmt: skip

    def __init__(self, digest: int, parent: _Node | None, path: str, tokens: int) -> None:
        self.digest, self.parent, self.path, self.tokens = digest, parent, path, tokens
        self.uses = self.hits = self.all_uses = self.all_hits = self.children = 0
        self.has_continued = False


class PrefixStatistics:
    """The prefix tree of one tenant. Belongs to one thread."""

    def __init__(self, prefixes_max: int = PREFIXES_MAX) -> None:
        self._max = prefixes_max
        self._root = _Node(0, None, "", 0)
        self._nodes: OrderedDict[int, _Node] = OrderedDict()
        self._breaks: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def note(self, data: bytes, marks: Sequence[SegmentEnd], total: int, found: int) -> None:
        """Count a prompt.

        `data`: its first token ids, four bytes each. `marks`: its segment ends, in order. `found`
        of its `total` tokens were cached. O(tokens) at memory speed, and 1 us for each new prefix;
        of known prefixes only the deepest few are looked up.
        """
        node = self._root
        if marks:
            # `data` may be truncated; then this prefix is shorter than the prompt.
            known = self._nodes.get(xxh3_64_intdigest(data[: 4 * marks[-1].tokens]))
            if known is None:
                node = self._insert_prompt(data, marks, total)
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
        """Return how many prompts were counted. O(prefixes)."""
        return self._root.uses + sum(node.uses for node in self._nodes.values())

    def top(self, most: int = 20) -> list[PrefixUsage]:
        """Return the prefixes that saved most tokens. O(prefixes), at most three milliseconds."""
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
        """Return the places where most tokens were lost."""
        found = [PrefixBreak(place, *counts) for place, counts in self._breaks.items()]
        return sorted(found, key=lambda one: -one.tokens)[:most]

    def check(self) -> None:
        """Raise AssertionError if the tree is inconsistent. O(prefixes)."""
        assert len(self._nodes) <= self._max
        nodes = [self._root, *self._nodes.values()]
        kept = {id(node): 0 for node in nodes}
        for node in nodes[1:]:
            assert node.parent is not None
            assert node.parent.tokens < node.tokens
            kept[id(node.parent)] += 1
        assert all(kept[id(node)] == node.children for node in nodes)

    def _insert_prompt(self, data: bytes, marks: Sequence[SegmentEnd], total: int) -> _Node:
        """Insert a prompt's prefixes. Returns its last node."""
        if len(marks) > MARKS_MAX or 4 * marks[-1].tokens > len(data):
            marks = [mark for mark in marks[:MARKS_MAX] if 4 * mark.tokens <= len(data)]
        node, after = self._find_known(data, marks) if len(marks) > 1 else (self._root, 0)
        at = 4 * node.tokens
        hasher = xxh3_64(data[:at])
        new_nodes: list[_Node] = []
        for mark in marks[after:]:
            if mark.tokens <= node.tokens:
                continue  # an empty segment: the same prefix
            hasher.update(data[at : 4 * mark.tokens])
            at, digest = 4 * mark.tokens, hasher.intdigest()
            known = self._nodes.get(digest)
            if known is None:
                known = _Node(digest, node, mark.path[:PATH_CHARS_MAX], mark.tokens)
                new_nodes.append(known)
            elif new_nodes:
                self._insert_chain(new_nodes, known)
                new_nodes = []
            node = known
        if new_nodes:
            parted = new_nodes[0].parent
            assert parted is not None, "only the root has none"
            if parted.has_continued:
                self._count_break(fold_indexes(new_nodes[0].path), total - parted.tokens)
            self._insert_chain(new_nodes, None)
        return node

    def _find_known(self, data: bytes, marks: Sequence[SegmentEnd]) -> tuple[_Node, int]:
        """Return a deep known prefix of the prompt, and how many marks it covers.

        The search goes back from the end in doubling steps, because chats grow at the end.
        """
        at, step = len(marks) - 2, 1
        while at >= 0:
            node = self._nodes.get(xxh3_64_intdigest(data[: 4 * marks[at].tokens]))
            if node is not None:
                return node, at + 1
            at -= step
            step *= 2
        return self._root, 0

    def _insert_chain(self, new_nodes: Sequence[_Node], behind: _Node | None) -> None:
        """Insert a chain of new nodes, at the end or before the existing node `behind`.

        A chain comes before an existing node if the same text was split into fewer segments before.
        """
        for node in new_nodes:
            assert node.parent is not None, "only the root has none"
            node.parent.children += 1
            node.parent.has_continued = True
        if behind is not None and behind.parent is not None:
            last = new_nodes[-1]
            last.has_continued = True
            if behind.parent.tokens < last.tokens < behind.tokens:
                behind.parent.children -= 1
                behind.parent = last
                last.children += 1
        # Deepest first, so that leaves are evicted before their parents.
        self._nodes.update([(node.digest, node) for node in reversed(new_nodes)])

    def _evict(self) -> None:
        """Evict the least recently used leaves; inner nodes are kept and count as used."""
        while len(self._nodes) > self._max:
            digest, node = self._nodes.popitem(last=False)
            if node.children:
                self._nodes[digest] = node
            else:
                assert node.parent is not None, "the root is not in the table"
                node.parent.uses += node.uses
                node.parent.hits += node.hits
                node.parent.children -= 1

    def _count_break(self, place: str, tokens: int) -> None:
        count, lost = self._breaks.get(place, (0, 0))
        self._breaks[place] = (count + 1, lost + tokens)
        self._breaks.move_to_end(place)
        while len(self._breaks) > PLACES_MAX:
            self._breaks.popitem(last=False)


@lru_cache(maxsize=512)
def fold_indexes(path: str) -> str:
    """Return the path with indexes above 1 folded, so all later messages are one place."""
    folded = _INDEX.sub(lambda match: match[0] if int(match[1]) < 2 else "[2+]", path)
    return folded[:PATH_CHARS_MAX]
