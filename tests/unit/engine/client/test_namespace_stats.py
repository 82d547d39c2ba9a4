"""`NamespaceTable`: changes add up to the full statistics."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.client.namespace_stats import Change, NamespaceTable
from engine.statistics import NamespaceStats

facts = st.builds(
    NamespaceStats,
    namespace=st.sampled_from([b"a", b"b", b"c"]),
    blocks=st.integers(0, 2),
    pinned_blocks=st.just(0),
    running=st.integers(0, 1),
    waiting=st.just(0),
)


def played(picture: dict[bytes, NamespaceStats], changes: list[Change]) -> None:
    """Apply changes to a reader's picture; its state before each change must agree."""
    for before, after in changes:
        if before is not None:
            assert picture.pop(before.namespace) == before
        if after is not None:
            assert after.namespace not in picture
            picture[after.namespace] = after


@given(st.lists(st.tuples(facts, st.booleans()), max_size=20))
def test_reader_of_changes_sees_the_present_state(
    history: list[tuple[NamespaceStats, bool]],
) -> None:
    """Whenever it reads: it need not see namespaces that came and went between two reads."""
    book, picture = NamespaceTable(), dict[bytes, NamespaceStats]()
    for fact, is_read in history:
        book.add([fact])
        if is_read:
            played(picture, book.take_changes("a"))
            assert picture == {one.namespace: one for one in book}

    assert all(one.blocks or one.running for one in book)
    assert len(book) == len(list(book))


def test_removes_empty_namespaces() -> None:
    """A million namespaces used once must not grow a gateway for ever."""
    book = NamespaceTable()
    book.add([NamespaceStats(b"a", 1, 0, 0, 0), NamespaceStats(b"b", 0, 0, 0, 1)])
    assert len(book) == 2

    book.add([NamespaceStats(b"a", 0, 0, 0, 0), NamespaceStats(b"b", 0, 0, 0, 0)])

    assert len(book) == 0
