"""What tenants hold, kept by what has changed: the same as if everything were added up."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from engine.api import NamespaceStats
from engine.client.namespace_stats import NamespaceTable
from gateway.analytics.tenant_usage import FIELDS, Holders

facts = st.builds(
    NamespaceStats,
    namespace=st.sampled_from([b"1a", b"1b", b"2a", b"?"]),
    blocks=st.integers(0, 3),
    pinned_blocks=st.integers(0, 1),
    running=st.integers(0, 1),
    waiting=st.integers(0, 1),
    promised_by_class=st.sampled_from([{}, {"5m": 1, "1h": 2}]),
)


def owner_of(namespace: bytes) -> int | None:
    """Its first sign, where that is a number."""
    first = namespace[:1]
    return int(first) if first.isdigit() else None


@given(st.lists(st.tuples(facts, st.sampled_from(["", "look", "other book", "none"])), max_size=20))
def test_the_sums_are_those_of_all_namespaces(history: list[tuple[NamespaceStats, str]]) -> None:
    """However often somebody looked, and whichever life of an engine it was."""
    book, holders = NamespaceTable(), Holders()
    for fact, what in history:
        if what == "other book":
            book = NamespaceTable()
        if what == "none":
            holders.look(None, owner_of)
        book.add([fact])
        if what == "look":
            holders.look(book, owner_of)
    holders.look(book, owner_of)

    sums: dict[int, dict[str, int]] = defaultdict(lambda: dict.fromkeys(FIELDS, 0))
    for one in book:
        owner = owner_of(one.namespace)
        if owner is not None:
            for name in FIELDS:
                sums[owner][name] += getattr(one, name)
    assert dict(holders.largest(9)) == sums
    assert [held["blocks"] for _, held in holders.largest(9)] == sorted(
        (held["blocks"] for held in sums.values()), reverse=True
    )
    assert len(holders.largest(1)) == min(1, len(sums))
