"""The suffix index: where the last tokens of a sequence stand in recent answers of its namespace.

Pure: tokens in, tokens out. Each namespace has the tokens of its latest answers in a ring, and
chains of places that follow the same 8, 5 or 3 tokens. A chain is found by a hash and proved by the
tokens. No lookup crosses a namespace: the acceptance of drafts can be measured from outside, so a
shared index would tell one tenant what another was answered.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from engine.api import Namespace
from engine.errors import InvariantViolation

ORDERS = (8, 5, 3)
"""How many last tokens are looked up, the longest first."""
CONTEXT_TOKENS = ORDERS[0]

BYTES_MAX = 64 * 2**20
TOKENS_MAX = 2**16
"""Most tokens that a namespace keeps."""
TOKENS_MIN = 2**8
GROWTH = 4

PLACES_MAX = 16
"""Most places, the latest ones, whose continuations are counted."""
WALK_MAX = 64
"""Most places of a chain that are compared: a client can have many contexts share a hash."""
FREQUENCY_MIN = 0.2
"""A draft goes on while so many of the places continue as it does."""

END = -1
"""Stands in the ring after each answer."""
NOWHERE = -1
NAMESPACE_BYTES = 4_096
"""What a namespace takes beside its arrays, at most."""

MULTIPLIER, SPREAD, WORD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 2**64 - 1


class _Chains:
    """The places of one ring that follow equal contexts of `order` tokens, the latest first."""

    def __init__(self, order: int, capacity: int) -> None:
        self.order = order
        self._shift = 65 - capacity.bit_length()
        self.latest = array("q", [NOWHERE]) * capacity
        """The latest place of each hash."""
        self.before = array("q", [NOWHERE]) * capacity
        """By place, modulo the capacity: the place before it with the same hash."""

    def first(self, context: Sequence[int]) -> int:
        """Return the latest place whose context has the same hash, or NOWHERE. O(1)."""
        hashed = 0
        for token in context:
            hashed = (hashed * MULTIPLIER + token) & WORD
        return self.latest[((hashed * SPREAD) & WORD) >> self._shift]

    def add(self, start: int, tokens: npt.NDArray[np.int64]) -> None:
        """Add the places among `tokens`, which stand at `start` in the ring. O(tokens log tokens).

        A place's context lies within one answer.
        """
        count = len(tokens) - self.order
        if count <= 0:
            return
        hashed = np.zeros(count, np.uint64)
        for offset in range(self.order):
            part = tokens[offset : offset + count].astype(np.uint64)
            hashed = hashed * np.uint64(MULTIPLIER) + part
        ends = np.concatenate(([0], np.cumsum(tokens == END)))
        places = np.flatnonzero(ends[self.order : -1] == ends[:count])
        buckets = (hashed[places] * np.uint64(SPREAD)) >> np.uint64(self._shift)
        order = np.argsort(buckets, kind="stable")
        buckets, places = buckets[order].astype(np.int64), places[order] + start + self.order
        is_first = np.append(True, buckets[1:] != buckets[:-1])[: len(buckets)]
        latest, before = np.frombuffer(self.latest, np.int64), np.frombuffer(self.before, np.int64)
        links = np.where(is_first, latest[buckets], np.roll(places, 1))
        before[places % len(before)] = links
        latest[buckets] = places  # of equal buckets the last one stays


class RecentAnswers:
    """The latest answers of one namespace. `capacity`: a power of two."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._mask = capacity - 1
        self._end = 0
        # The first places are repeated behind the last: a context never wraps.
        self._tokens = array("i", [END]) * (capacity + CONTEXT_TOKENS)
        self._chains = tuple(_Chains(order, capacity) for order in ORDERS)

    @property
    def bytes(self) -> int:
        """Return the bytes that it takes."""
        words = sum(len(one.latest) + len(one.before) for one in self._chains)
        return 8 * words + 4 * len(self._tokens) + NAMESPACE_BYTES

    def lacks_room(self, tokens: int) -> bool:
        """Return whether so many further tokens overwrite others."""
        return self._end + tokens > self.capacity

    def kept(self) -> array[int]:
        """Return the tokens that the ring has, oldest first, each answer with its END."""
        at = self._end & self._mask
        if self._end <= self.capacity:
            return self._tokens[: self._end]
        return self._tokens[at : self.capacity] + self._tokens[:at]

    def add(self, answer: Sequence[int]) -> None:
        """Add the end of an answer that ends with END. O(answer), in a few numpy calls."""
        tokens = np.asarray(answer[-self.capacity :], np.int64)
        start, self._end = self._end, self._end + len(tokens)
        ring = np.frombuffer(self._tokens, np.int32)
        ring[np.arange(start, self._end) & self._mask] = tokens
        ring[self.capacity :] = ring[:CONTEXT_TOKENS]
        for chains in self._chains:
            chains.add(start, tokens)

    def propose(self, tail: Sequence[int], limit: int, walk_max: int) -> list[int]:
        """Return at most `limit` tokens that followed the last tokens of `tail`. O(walk + limit).

        The most frequent continuation after the longest context that is found, the latest of
        equals.
        """
        for chains in self._chains:
            if len(tail) >= chains.order:
                places = list(self._places(chains, tail[-chains.order :], walk_max))
                if places:
                    return self._continue(places, limit)
        return []

    def _places(self, chains: _Chains, context: Sequence[int], walk_max: int) -> Iterator[int]:
        """Yield the places that follow `context`, the latest first, at most PLACES_MAX."""
        order, wanted, found = chains.order, array("i", context), 0
        oldest = max(0, self._end - self.capacity) + order
        place = chains.first(context)
        for _ in range(walk_max):
            if place < oldest or found == PLACES_MAX:
                return
            at = (place - order) & self._mask
            if self._tokens[at : at + order] == wanted:
                found += 1
                yield place
            place = chains.before[place & self._mask]

    def _continue(self, places: list[int], limit: int) -> list[int]:
        draft: list[int] = []
        fewest = FREQUENCY_MIN * len(places)
        for offset in range(limit):
            following: dict[int, list[int]] = {}
            for place in places:
                token = self._tokens[(place + offset) & self._mask]
                following.setdefault(token, []).append(place)
            token, places = max(following.items(), key=lambda item: len(item[1]))
            if token == END or len(places) < fewest:
                break
            draft.append(token)
        return draft

    def check(self) -> None:
        """Check that each chain goes backwards from known places. Raises InvariantViolation."""
        for chains in self._chains:
            for place in chains.latest:
                seen = [place]
                while self._end - self.capacity <= seen[-1] != NOWHERE:
                    seen.append(chains.before[seen[-1] & self._mask])
                if place >= self._end or any(later <= earlier for later, earlier in pairwise(seen)):
                    raise InvariantViolation(f"the chain of place {place} does not go backwards")


class SuffixIndex:
    """The recent answers of all namespaces, within `bytes_max`.

    The namespace that was used longest ago is forgotten first.
    """

    def __init__(
        self,
        bytes_max: int = BYTES_MAX,
        tokens_max: int = TOKENS_MAX,
        walk_max: int = WALK_MAX,
    ) -> None:
        self._bytes_max, self._tokens_max, self._walk_max = bytes_max, tokens_max, walk_max
        self._answers: OrderedDict[Namespace, RecentAnswers] = OrderedDict()
        self.bytes = 0

    def add(self, namespace: Namespace, context: Sequence[int], answer: Sequence[int]) -> None:
        """Add an answer that followed the tokens `context`. O(answer); it may copy what the
        namespace has, and forget others.
        """
        tokens = [*context[-CONTEXT_TOKENS:], *answer, END]
        found = self._answers.get(namespace)
        if found is None:
            found = self._put(namespace, min(TOKENS_MIN, self._tokens_max), ())
        capacity = found.capacity
        while capacity < self._tokens_max and found.lacks_room(len(tokens)):
            capacity = min(capacity * GROWTH, self._tokens_max)
            found = self._put(namespace, capacity, found.kept())
        found.add(tokens)
        self._answers.move_to_end(namespace)
        while self.bytes > self._bytes_max:
            _, oldest = self._answers.popitem(last=False)
            self.bytes -= oldest.bytes

    def propose(self, namespace: Namespace, tail: Sequence[int], limit: int) -> list[int]:
        """Return at most `limit` tokens that may follow `tail`, of which the last 8 are read."""
        found = self._answers.get(namespace)
        if found is None:
            return []
        self._answers.move_to_end(namespace)
        return found.propose(tail, limit, self._walk_max)

    def erase(self, namespace: Namespace) -> None:
        """Forget all answers of a namespace. O(1)."""
        found = self._answers.pop(namespace, None)
        if found is not None:
            self.bytes -= found.bytes

    def check(self) -> None:
        """Recount the bytes and walk all chains. Raises InvariantViolation. O(tokens)."""
        counted = sum(found.bytes for found in self._answers.values())
        if counted != self.bytes or counted > self._bytes_max:
            expected = f"{self.bytes} of at most {self._bytes_max}"
            raise InvariantViolation(f"the suffix index has {counted} bytes; expected {expected}")
        for found in self._answers.values():
            found.check()

    def _put(self, namespace: Namespace, capacity: int, kept: Sequence[int]) -> RecentAnswers:
        made = RecentAnswers(capacity)
        if kept:
            made.add(kept)
        self.erase(namespace)
        self._answers[namespace] = made
        self.bytes += made.bytes
        return made
