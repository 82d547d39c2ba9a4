"""`TenantCacheUsage`: incremental sums equal the sums over all namespaces."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from engine.client.namespace_stats import NamespaceTable
from engine.statistics import NamespaceStats
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


def test_models_are_summed_and_told_apart() -> None:
    """A restarted engine begins anew; the other model's figures stay."""
    tables, usage = {"a": NamespaceTable(), "b": NamespaceTable()}, TenantCacheUsage()
    for name, table in tables.items():
        table.add([NamespaceStats(b"1" + name.encode(), 3 + ord(name) % 2, 0, 1, 0)])
        usage.update([table], owner_of, name)
    both = usage.of(1)["blocks"], usage.total("blocks"), usage.total("blocks", "b")
    by_model = {name: row["blocks"] for name, row in usage.by_model(1).items()}
    usage.update([NamespaceTable()], owner_of, "a")

    assert both == (7, 7, 3)
    assert by_model == {"a": 4, "b": 3}
    assert usage.of(1)["running"] == 1
    assert usage.by_model(1).keys() == {"b"}
    assert [held["blocks"] for _, held in usage.largest(9)] == [3]


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
            usage.update([], owner_of)
        table.add([stats])
        if what == "update":
            usage.update([table], owner_of)
    usage.update([table], owner_of)

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
