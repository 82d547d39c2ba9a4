"""The suffix index against a plain search over the same answers, with two tokens."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafts.suffix_index import (
    CONTEXT_TOKENS,
    FREQUENCY_MIN,
    ORDERS,
    PLACES_MAX,
    SuffixIndex,
)
from tests.examples import examples

END = -1
TOKENS = st.lists(st.integers(0, 1), max_size=40)


class PlainIndex:
    """The same by brute force: a list of tokens a namespace, searched from its end."""

    def __init__(self, tokens_max: int) -> None:
        self.tokens_max = tokens_max
        self.kept: dict[bytes, list[int]] = {}

    def add(self, namespace: bytes, context: list[int], answer: list[int]) -> None:
        tokens = [*self.kept.get(namespace, []), *context[-CONTEXT_TOKENS:], *answer, END]
        self.kept[namespace] = tokens[-self.tokens_max :]

    def propose(self, namespace: bytes, tail: list[int], limit: int) -> list[int]:
        kept = self.kept.get(namespace, [])
        for order in ORDERS:
            wanted = tail[-order:]
            places = [
                place
                for place in range(len(kept) - 1, order - 1, -1)
                if len(wanted) == order and kept[place - order : place] == wanted
            ][:PLACES_MAX]
            if places:
                return self._continue(kept, places, limit)
        return []

    def _continue(self, kept: list[int], places: list[int], limit: int) -> list[int]:
        draft: list[int] = []
        live = places
        while len(draft) < limit:
            counts = Counter(kept[place + len(draft)] for place in live)
            token = counts.most_common(1)[0][0]
            live = [place for place in live if kept[place + len(draft)] == token]
            if token == END or len(live) / len(places) < FREQUENCY_MIN:
                break
            draft.append(token)
        return draft


@pytest.mark.parametrize("tokens_max", [64, 1024])
@given(data=st.data())
@settings(max_examples=examples(60))
def test_drafts_are_those_of_a_plain_search(tokens_max: int, data: st.DataObject) -> None:
    """The ring, its growth and its chains find what a search of the kept tokens finds, also behind
    the ring's seam and after answers longer than it."""
    index, plain = SuffixIndex(tokens_max=tokens_max, walk_max=10**9), PlainIndex(tokens_max)
    for _ in range(data.draw(st.integers(1, 12))):
        namespace = data.draw(st.sampled_from([b"a", b"b"]))
        context, answer = data.draw(TOKENS), data.draw(TOKENS) * data.draw(st.integers(1, 9))
        index.add(namespace, context, answer)
        plain.add(namespace, context, answer)
        index.check()
        tail, limit = data.draw(TOKENS), data.draw(st.integers(0, 15))

        assert index.propose(b"a", tail, limit) == plain.propose(b"a", tail, limit)


def test_a_rare_continuation_is_no_draft() -> None:
    """Below a fifth of the places a draft costs more than it saves."""
    index = SuffixIndex()
    for token in range(6):
        index.add(b"a", [], [1, 2, 3, 10 + token, 4])

    assert index.propose(b"a", [1, 2, 3], 4) == []


def test_the_most_frequent_continuation_is_drafted() -> None:
    """Three of four recent answers went on this way."""
    index = SuffixIndex()
    for token in (7, 7, 9, 7):
        index.add(b"a", [], [1, 2, 3, token, token, token])

    assert index.propose(b"a", [5, 1, 2, 3], 15) == [7, 7, 7]


def test_no_namespace_reads_another() -> None:
    """A draft from a foreign namespace would show in its timing what others were answered."""
    index = SuffixIndex()
    index.add(b"a", [], list(range(20)))

    assert index.propose(b"a", [3, 4, 5], 2) == [6, 7]
    assert index.propose(b"b", [3, 4, 5], 2) == []


def test_an_erased_namespace_proposes_nothing() -> None:
    """What was erased must not come back as a draft; others keep theirs."""
    index = SuffixIndex()
    index.add(b"a", [], list(range(20)))
    index.add(b"b", [], list(range(20)))

    index.erase(b"a")

    assert index.propose(b"a", [3, 4, 5], 2) == []
    assert index.propose(b"b", [3, 4, 5], 2) == [6, 7]
    index.check()


def test_the_namespace_used_longest_ago_is_forgotten_first() -> None:
    """Room goes to the namespaces that have requests; reading is a use."""
    one = SuffixIndex()
    one.add(b"a", [], list(range(20)))
    index = SuffixIndex(bytes_max=2 * one.bytes)
    index.add(b"a", [], list(range(20)))
    index.add(b"b", [], list(range(20)))
    index.propose(b"a", [3, 4, 5], 2)

    index.add(b"c", [], list(range(20)))

    assert index.propose(b"b", [3, 4, 5], 2) == []
    assert index.propose(b"a", [3, 4, 5], 2) == [6, 7]
    index.check()


def _fill(index: SuffixIndex, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(60):
        answer = [chance.randrange(50_000)] * chance.randrange(1_000)
        index.add(b"%d" % chance.randrange(30), [], answer)


def test_its_bytes_are_bounded_and_counted() -> None:
    """However much tenants are answered, the process gives the index no more than its bound."""
    bytes_max = 2**19
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = SuffixIndex(bytes_max, tokens_max=2**14)
        _fill(index, seed=5)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    index.check()

    assert bytes_max / 2 < index.bytes <= bytes_max
    assert taken <= bytes_max + 2**17  # numpy keeps small buffers for later


def test_a_chain_is_compared_a_bounded_way() -> None:
    """A client can have many contexts share a hash; a lookup then compares a few of them."""
    index = SuffixIndex(walk_max=1)
    for token in (7, 7, 9):
        index.add(b"a", [], [1, 2, 3, token])

    assert index.propose(b"a", [1, 2, 3], 1) == [9]
