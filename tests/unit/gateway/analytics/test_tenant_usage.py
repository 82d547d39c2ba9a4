"""`TenantCacheUsage`: incremental sums equal the sums over all namespaces."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from engine.api import NamespaceStats
from engine.client.namespace_stats import NamespaceTable
from gateway.analytics.tenant_usage import FIELDS, TenantCacheUsage

NAMESPACE_STATS = st.builds(
    NamespaceStats,
    namespace=st.sampled_from([b"1a", b"1b", b"2a", b"?"]),
    blocks=st.integers(0, 3),
    pinned_blocks=st.integers(0, 1),
    running=st.integers(0, 1),
    waiting=st.integers(0, 1),
    promised_by_class=st.sampled_from([{}, {"5m": 1, "1h": 2}]),
)


def owner_of(namespace: bytes) -> int | None:
    """Return the first character as a tenant id, if it is a digit."""
    first = namespace[:1]
    return int(first) if first.isdigit() else None


@given(
    st.lists(
        st.tuples(NAMESPACE_STATS, st.sampled_from(["", "update", "other table", "none"])),
        max_size=20,
    )
)
def test_sums_equal_those_over_all_namespaces(history: list[tuple[NamespaceStats, str]]) -> None:
    """However often they were updated, over any number of engine restarts."""
    table, usage = NamespaceTable(), TenantCacheUsage()
    for stats, what in history:
        if what == "other table":
            table = NamespaceTable()
        if what == "none":
            usage.update(None, owner_of)
        table.add([stats])
        if what == "update":
            usage.update(table, owner_of)
    usage.update(table, owner_of)

    sums: dict[int, dict[str, int]] = defaultdict(lambda: dict.fromkeys(FIELDS, 0))
    for one in table:
        owner = owner_of(one.namespace)
        if owner is not None:
            for name in FIELDS:
                sums[owner][name] += getattr(one, name)
    assert dict(usage.largest(9)) == sums
    assert [held["blocks"] for _, held in usage.largest(9)] == sorted(
        (held["blocks"] for held in sums.values()), reverse=True
    )
    assert len(usage.largest(1)) == min(1, len(sums))
