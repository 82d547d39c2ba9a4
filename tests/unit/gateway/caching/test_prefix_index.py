"""The index of written prefixes: leases only lengthen, and bounds apply to their owner."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import Retention
from gateway.caching.prefix_index import SAME_CONTENT_MAX, PrefixIndex, digest_prefixes
from tests.lines_run import lines_run

FIVE = Retention("5m", 300, 300, "request_start")
PINNED = Retention("resource", 60, 60, "absolute", renewed_on_read=False, pinned=True)


def write(book: PrefixIndex, digest: bytes, terms: Retention, at_s: float, owner: int = 1) -> None:
    book.write((b"ns", digest), 8, owner, "epoch", {}, terms, at_s, is_granted=True)


@pytest.mark.parametrize(("read_s", "ends_s"), [(200.0, 500.0), (300.0, 300.0)])
def test_read_renews_a_lease_that_has_not_expired(read_s: float, ends_s: float) -> None:
    """Only a new write brings an expired prefix back."""
    book = PrefixIndex(10, 10)
    write(book, b"a", FIVE, 0.0)
    entry = book.find((b"ns", b"a"))
    assert entry is not None

    book.renew(entry, read_s)

    assert entry.is_live(ends_s - 1.0)
    assert not entry.is_live(ends_s)


def test_absolute_lease_moves_only_by_write() -> None:
    """A resource's expiry is its owner's latest value, later or sooner."""
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
def test_evicts_entries_of_owner_above_bound(calls: list[tuple[int, int]]) -> None:
    """A tenant that writes endlessly replaces its own entries."""
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


def test_erases_whole_namespace() -> None:
    book = PrefixIndex(10, 10)
    write(book, b"a", FIVE, 0.0)
    write(book, b"b", FIVE, 0.0)

    gone = book.erase_namespace(b"ns")

    assert gone == 2
    assert len(book) == 0
    book.check()


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=60), st.data())
def test_digest_depends_only_on_prefix(tokens: list[int], data: st.DataObject) -> None:
    """Not on the other ends or on later tokens."""
    ends = data.draw(st.lists(st.integers(1, len(tokens)), min_size=1, max_size=5))

    found = digest_prefixes(tokens, ends)

    assert found == {end: digest_prefixes(tokens[:end], [end])[end] for end in ends}


def test_class_without_limit_never_expires() -> None:
    """A minimum lifetime promises; it ends nothing."""
    book = PrefixIndex(10, 10)
    write(book, b"a", Retention("30m", 1800), 0.0)
    entry = book.find((b"ns", b"a"))
    assert entry is not None

    best = entry.best(1e9)

    assert best is not None
    assert best.expires_at_s == math.inf
    assert not entry.is_promised(1800.0)


@pytest.mark.parametrize("granted", [True, False])
def test_only_granted_leases_are_promised(granted: bool) -> None:
    """A lease that the engine refused is an entry without a promise."""
    book = PrefixIndex(10, 10)
    book.write((b"ns", b"a"), 8, 1, "epoch", {}, FIVE, 0.0, is_granted=granted)
    entry = book.find((b"ns", b"a"))
    assert entry is not None

    assert entry.is_live(1.0)
    assert entry.is_promised(1.0) is granted


def crowded(namespaces: int) -> PrefixIndex:
    """An index of a tenant with a partition per user, all with the same first content."""
    book = PrefixIndex(50_000, 50_000)
    for number in range(namespaces):
        key = (f"user {number}".encode(), b"digest")
        book.write(key, 8, 1, "epoch", {}, FIVE, 0.0, is_granted=True, content=b"same")
    return book


def forget_hundred(book: PrefixIndex) -> None:
    """Erase a hundred namespaces."""
    assert sum(book.erase_namespace(f"user {number}".encode()) for number in range(100)) == 100


def test_lines_run_tells_a_search_from_a_lookup() -> None:
    """Or the bounds below would hold for anything."""
    things = list(range(1_000))

    assert lines_run(lambda: next(one for one in things if one == 999)) > 900
    assert lines_run(lambda: things.index(999)) < 5


def test_erasure_cost_is_independent_of_index_size() -> None:
    """A tenant may erase thousands of namespaces at once, on the event loop."""
    few, many = crowded(200), crowded(20_000)

    assert lines_run(lambda: forget_hundred(many)) < 2 * lines_run(lambda: forget_hundred(few))
    few.check()
    many.check()


def test_find_same_content_is_bounded() -> None:
    """A miss is explained on the event loop."""
    book = crowded(1_000)

    found = book.find_same_content(0, b"same")

    assert len(found) == SAME_CONTENT_MAX
    assert found[0].key[0] == b"user 999"


def writing_lines(owners: int) -> int:
    """Return the lines that a hundred writes into a full index with many owners run."""
    book = PrefixIndex(8_000, 8_000)
    for number in range(8_000):
        write(book, number.to_bytes(4, "big"), FIVE, 0.0, number % owners)

    def write_hundred() -> None:
        for number in range(8_000, 8_100):
            write(book, number.to_bytes(4, "big"), FIVE, 0.0, number % owners)

    lines = lines_run(write_hundred)
    book.check()
    return lines


def test_write_cost_is_independent_of_owner_count() -> None:
    """The owner to evict from is not searched for at each write."""
    assert writing_lines(4_000) < 3 * writing_lines(4)
