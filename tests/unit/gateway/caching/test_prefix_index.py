"""The book of written prefixes: leases that only lengthen, bounds that hit their owner."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import Retention
from gateway.caching.prefix_index import SAME_CONTENT_MAX, PrefixIndex, digest_prefixes

FIVE = Retention("5m", 300, 300, "request_start")
PINNED = Retention("resource", 60, 60, "absolute", renewed_on_read=False, pinned=True)


def write(book: PrefixIndex, digest: bytes, terms: Retention, at_s: float, owner: int = 1) -> None:
    book.write((b"ns", digest), 8, owner, "epoch", {}, terms, at_s, is_granted=True)


def test_a_read_starts_the_clock_again() -> None:
    """A class that is renewed on read lives as long as it is read in time."""
    book = PrefixIndex(10, 10)
    write(book, b"a", FIVE, 0.0)
    entry = book.find((b"ns", b"a"))
    assert entry is not None

    book.renew(entry, 200.0)

    assert entry.is_live(499.0)
    assert not entry.is_live(500.0)


def test_what_has_expired_is_not_revived_by_a_read() -> None:
    """A limit that has passed has passed: only a new write brings the prefix back."""
    book = PrefixIndex(10, 10)
    write(book, b"a", FIVE, 0.0)
    entry = book.find((b"ns", b"a"))
    assert entry is not None

    book.renew(entry, 300.0)

    assert not entry.is_live(300.0)


def test_an_absolute_clock_moves_when_it_is_set_again_and_never_by_a_read() -> None:
    """A resource's expiry is what its owner last said: later, or sooner."""
    book = PrefixIndex(10, 10)
    write(book, b"a", PINNED, 0.0)
    entry = book.find((b"ns", b"a"))
    assert entry is not None
    book.renew(entry, 50.0)
    unmoved = entry.is_live(60.0)

    write(book, b"a", Retention("resource", 5, 5, "absolute", pinned=True), 10.0)

    assert not unmoved
    assert not entry.is_live(15.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=120))
def test_nobody_is_remembered_beyond_the_bounds(calls: list[tuple[int, int]]) -> None:
    """A tenant that writes without end turns over its own entries, up to its own bound."""
    book = PrefixIndex(20, 8)

    for at_s, (owner, which) in enumerate(calls):
        write(book, bytes([owner, which]), FIVE, float(at_s), owner)
        book.check()

    quiet = {owner for owner, _ in calls}
    assert len(book) <= 20
    assert all(
        book.find((b"ns", bytes([owner, which]))) is not None
        for owner, which in calls[-1:]
        if owner in quiet
    )


def test_a_namespace_is_forgotten_whole() -> None:
    """After an erasure nothing is read that is not there."""
    book = PrefixIndex(10, 10)
    write(book, b"a", FIVE, 0.0)
    write(book, b"b", FIVE, 0.0)

    gone = book.erase_namespace(b"ns")

    assert gone == 2
    assert len(book) == 0
    book.check()


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=60), st.data())
def test_a_digest_depends_on_the_prefix_alone(tokens: list[int], data: st.DataObject) -> None:
    """Whatever else is asked for, and whatever follows, an end's digest is its prefix's."""
    ends = data.draw(st.lists(st.integers(1, len(tokens)), min_size=1, max_size=5))

    found = digest_prefixes(tokens, ends)

    assert found == {end: digest_prefixes(tokens[:end], [end])[end] for end in ends}


def test_a_class_without_a_limit_is_live_for_ever() -> None:
    """A minimum lifetime promises; it does not end anything."""
    book = PrefixIndex(10, 10)
    write(book, b"a", Retention("30m", 1800), 0.0)
    entry = book.find((b"ns", b"a"))
    assert entry is not None

    best = entry.best(1e9)

    assert best is not None
    assert best.expires_at_s == math.inf
    assert not entry.is_promised(1800.0)


@pytest.mark.parametrize("granted", [True, False])
def test_only_what_was_granted_is_promised(granted: bool) -> None:
    """A lease the engine refused is an entry, but nobody's promise."""
    book = PrefixIndex(10, 10)
    book.write((b"ns", b"a"), 8, 1, "epoch", {}, FIVE, 0.0, is_granted=granted)
    entry = book.find((b"ns", b"a"))
    assert entry is not None

    assert entry.is_live(1.0)
    assert entry.is_promised(1.0) is granted


def crowded(namespaces: int) -> PrefixIndex:
    """A tenant with a partition for each of its users, who all begin with the same words."""
    book = PrefixIndex(50_000, 50_000)
    for number in range(namespaces):
        key = (f"user {number}".encode(), b"digest")
        book.write(key, 8, 1, "epoch", {}, FIVE, 0.0, is_granted=True, content=b"same")
    return book


def forgetting_s(book: PrefixIndex) -> float:
    """Of a hundred namespaces, in processor time."""
    began_s = time.process_time()
    assert sum(book.erase_namespace(f"user {number}".encode()) for number in range(100)) == 100
    return time.process_time() - began_s


def test_erasing_costs_what_is_erased_whatever_else_there_is() -> None:
    """A tenant with thousands of namespaces asks for all of them at once, on the loop."""
    few, many = crowded(200), crowded(20_000)

    assert forgetting_s(many) < 20 * forgetting_s(few)
    few.check()
    many.check()


def test_of_the_same_words_the_latest_few_are_looked_at() -> None:
    """A miss is explained on the loop, and each new user of such a tenant begins with one."""
    book = crowded(1_000)

    found = book.find_same_content(0, b"same")

    assert len(found) == SAME_CONTENT_MAX
    assert found[0].key[0] == b"user 999"


def writing_s(owners: int) -> float:
    """A hundred writes into a full book that so many share, in processor time."""
    book = PrefixIndex(8_000, 8_000)
    for number in range(8_000):
        write(book, number.to_bytes(4, "big"), FIVE, 0.0, number % owners)
    began_s = time.process_time()
    for number in range(8_000, 8_100):
        write(book, number.to_bytes(4, "big"), FIVE, 0.0, number % owners)
    spent_s = time.process_time() - began_s
    book.check()
    return spent_s


def test_a_full_book_costs_no_more_however_many_share_it() -> None:
    """Whose entry goes is not looked for among thousands of tenants at each write."""
    assert writing_s(4_000) < 10 * writing_s(4)
