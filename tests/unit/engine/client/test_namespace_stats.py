"""What namespaces hold, kept by what has changed: the same as if all were told each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.api import NamespaceStats
from engine.client.namespace_stats import Change, NamespaceTable

facts = st.builds(
    NamespaceStats,
    namespace=st.sampled_from([b"a", b"b", b"c"]),
    blocks=st.integers(0, 2),
    pinned_blocks=st.just(0),
    running=st.integers(0, 1),
    waiting=st.just(0),
)


def played(picture: dict[bytes, NamespaceStats], changes: list[Change]) -> None:
    """Bring a reader's own picture up to date; it must agree with what was before."""
    for before, after in changes:
        if before is not None:
            assert picture.pop(before.namespace) == before
        if after is not None:
            assert after.namespace not in picture
            picture[after.namespace] = after


@given(st.lists(st.tuples(facts, st.booleans()), max_size=20))
def test_a_reader_of_changes_sees_what_is_there(history: list[tuple[NamespaceStats, bool]]) -> None:
    """Whenever it looks: what came and went between two looks it need not know of."""
    book, picture = NamespaceTable(), dict[bytes, NamespaceStats]()
    for fact, is_read in history:
        book.add([fact])
        if is_read:
            played(picture, book.take_changes("a"))
            assert picture == {one.namespace: one for one in book}

    assert all(one.blocks or one.running for one in book)
    assert len(book) == len(list(book))


def test_a_namespace_that_holds_and_asks_nothing_is_not_there() -> None:
    """A million that came once must not grow a gateway for ever."""
    book = NamespaceTable()
    book.add([NamespaceStats(b"a", 1, 0, 0, 0), NamespaceStats(b"b", 0, 0, 0, 1)])
    assert len(book) == 2

    book.add([NamespaceStats(b"a", 0, 0, 0, 0), NamespaceStats(b"b", 0, 0, 0, 0)])

    assert len(book) == 0
