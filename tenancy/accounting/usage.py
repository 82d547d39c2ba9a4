"""Usage queries: sums of entries by tenant, key, model and time.

Whole days and hours come from sums that are written with the entries; only the partial hours at the
ends of a period are summed from entries. So a query over ten million entries reads thousands of
rows. The module writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct, structs

from tenancy.ledger.aggregates import ENTRY_SUMS
from tenancy.ledger.entries import ROW_FIELDS, entry_of
from tenancy.pricing.charges import PICO_PER_MICRO
from tenancy.storage.hourly_usage import HOUR_SUMS
from tenancy.storage.interface import Row, Store, Value
from tenancy.types import DAY_MS, HOUR_MS, TokenSums, UsageEntry

UsageGroup = Literal["tenant", "key", "model", "user", "hour", "day"]
"""A column to group by."""


class UsageTotal(TokenSums, frozen=True):
    """A sum of ledger entries. Money is pico-dollars. Fields of groups are None unless the query
    groups by them."""

    tenant: str
    requests: int = 0
    hits: int = 0
    """Requests that read the cache."""
    ttft_hits: int = 0
    """Hits that reported a time to first token."""
    ttft_hit_ms: int = 0
    """The sum of these times."""
    ttft_misses: int = 0
    ttft_miss_ms: int = 0
    charge_pico: int = 0
    """Before adjustments."""
    saved_pico: int = 0
    adjusted_pico: int = 0
    key_id: int | None = None
    model: str | None = None
    from_ms: int | None = None
    """The start of the hour or day."""
    user: str | None = None
    """"" for entries that name none."""


_SUMS = (*HOUR_SUMS, "adjusted_micros", "adjusted_rest")
_GROUPS: dict[UsageGroup, str] = {
    "tenant": "name",
    "key": "key_id",
    "model": "model",
    "user": "coalesce((select user_ref from request_users"
    " where request_users.request_id = ledger.request_id), '')",
    "hour": "hour_ms",
    "day": f"hour_ms / {DAY_MS} * {DAY_MS}",
}


class _SumTable(Struct, frozen=True):
    """A table of sums, its time column and the length of its periods."""

    table: str
    since: str
    length_ms: int


_DAYS = _SumTable("usage_days", "day_ms", DAY_MS)
_HOURS = _SumTable("usage_hours", "hour_ms", HOUR_MS)
_LAST = 2**63 - 1
_ENTRIES = ", ".join(f"ledger.{name}" for name in ROW_FIELDS)


def usage(
    store: Store,
    *,
    tenant: str | None = None,
    key_id: int | None = None,
    model: str | None = None,
    since_ms: int = 0,
    until_ms: int | None = None,
    by: Sequence[UsageGroup] = (),
) -> list[UsageTotal]:
    """Return sums of what was booked in [since_ms, until_ms), by tenant and the groups of `by`.

    O(days * keys * models) of the tenants, or hours if `by` names the hour; O(entries of the
    period) if `by` names the user.
    """
    groups: list[UsageGroup] = ["tenant", *(name for name in by if name != "tenant")]
    end_ms = 2**62 if until_ms is None else max(until_ms, since_ms)
    sums: dict[Row, list[int]] = {}
    tables: tuple[_SumTable, ...] = (_HOURS,) if "hour" in groups else (_DAYS, _HOURS)
    if "user" in groups:
        tables = ()  # sums of hours and days know no users
    for source, first_ms, after_ms in _split_period(since_ms, end_ms, tables):
        values = (tenant, key_id, model, first_ms, after_ms)
        if source is None:
            _add_partial_hour(store, sums, groups, values)
        else:
            _add_whole(store, sums, groups, source, values)
    return [_total(groups, group, sums[group]) for group in sorted(sums)]


_SUMMED = tuple(
    name
    for name in UsageTotal.__struct_fields__
    if name not in ("tenant", "key_id", "model", "from_ms", "user")
)


def sum_tenants(found: list[UsageTotal]) -> list[UsageTotal]:
    """Sum over all tenants for each key, model, user and hour or day, in that order. O(rows)."""
    totals: dict[tuple[int, str, str, int], UsageTotal] = {}
    for one in found:
        group = (one.key_id or 0, one.model or "", one.user or "", one.from_ms or 0)
        before = totals.get(group, UsageTotal(tenant=""))
        sums = {name: getattr(before, name) + getattr(one, name) for name in _SUMMED}
        totals[group] = structs.replace(one, tenant="", **sums)
    return [totals[group] for group in sorted(totals)]


def span_of(
    store: Store, tenant: str | None, since_ms: int, until_ms: int | None
) -> tuple[int, int]:
    """Return the id before a period's first entry, and the id of its last one.

    Entries booked at about the same time have ids close together. O(entries of the period), or O(1)
    for all time.
    """
    if since_ms <= 0 and until_ms is None:
        return 0, _LAST
    first, last = store.query(
        "select min(entry_id), max(entry_id) from ledger where tenant_id in"
        " (select tenant_id from tenants where cast(?1 as text) is null or name = ?1)"
        " and booked_ms >= ?2 and booked_ms < ?3",
        (tenant, since_ms, _LAST if until_ms is None else until_ms),
    )[0]
    return (0, 0) if first is None else (first - 1, last)


def entries_of(
    store: Store,
    tenant: str | None,
    since_ms: int,
    until_ms: int | None,
    after: int,
    count: int,
    last: int = _LAST,
) -> list[tuple[int, int, str, UsageEntry]]:
    """Return up to `count` entries of a period with ids above `after`, up to `last`, in ledger
    order.

    Each is (entry id, booked at, tenant, entry). O(entries between the two ids, up to the count).
    """
    rows = store.query(
        f"select entry_id, booked_ms, name, {_ENTRIES} from ledger join tenants using (tenant_id)"
        " where entry_id > ?1 and entry_id <= ?6 and (cast(?2 as text) is null or name = ?2)"
        " and booked_ms >= ?3 and (cast(?4 as bigint) is null or booked_ms < ?4)"
        " order by entry_id limit ?5",
        (after, tenant, since_ms, until_ms, count, last),
    )
    return [(row[0], row[1], row[2], entry_of(row[3:])) for row in rows]


_WHERE = (
    "tenant_id in (select tenant_id from tenants where cast(?1 as text) is null or name = ?1)"
    " and (cast(?2 as bigint) is null or key_id = ?2)"
    " and (cast(?3 as text) is null or model = ?3)"
)


def _split_period(
    since_ms: int, end_ms: int, tables: Sequence[_SumTable]
) -> Iterator[tuple[_SumTable | None, int, int]]:
    """Split a period into whole days, whole hours and partial hours: (table, from, to), none empty.

    since  |  hours  |      whole days      | hours | end        and the same within the ends
    """
    if since_ms >= end_ms:
        return
    if not tables:
        yield None, since_ms, end_ms
        return
    source, *finer = tables
    first_ms = -(-since_ms // source.length_ms) * source.length_ms
    after_ms = end_ms // source.length_ms * source.length_ms
    if first_ms >= after_ms:
        yield from _split_period(since_ms, end_ms, finer)
        return
    yield from _split_period(since_ms, first_ms, finer)
    yield source, first_ms, after_ms
    yield from _split_period(after_ms, end_ms, finer)


def _add_whole(
    store: Store,
    sums: dict[Row, list[int]],
    groups: Sequence[UsageGroup],
    source: _SumTable,
    values: Sequence[Value],
) -> None:
    """Add whole hours or days from their sums and the recent ones, in one statement.

    One statement reads one commit. Summing the union as a whole would sort it first, which takes
    twice as long, so each part is summed.
    """
    parts = []
    for table, since, columns in (
        (source.table, source.since, _SUMS),
        (
            "recent_sums",
            f"hour_ms / {source.length_ms} * {source.length_ms}",
            (*HOUR_SUMS, "0", "0"),
        ),
    ):
        names = ", ".join(_GROUPS[name].replace("hour_ms", since) for name in groups)
        parts.append(
            f"select {names}, {', '.join(f'sum({column})' for column in columns)} from {table}"
            f" join tenants using (tenant_id) where {_WHERE} and {since} >= ?4 and {since} < ?5"
            f" group by {', '.join(str(1 + i) for i in range(len(groups)))}"
        )
    for row in store.query(" union all ".join(parts), values):
        _add(sums, row[: len(groups)], row[len(groups) :])


def _add_partial_hour(
    store: Store, sums: dict[Row, list[int]], groups: Sequence[UsageGroup], values: Sequence[Value]
) -> None:
    """Add a partial hour from its entries and adjustments."""
    hour = f"booked_ms / {HOUR_MS} * {HOUR_MS}"
    names = [_GROUPS[name].replace("hour_ms", hour) for name in groups]
    by = ", ".join(str(1 + i) for i in range(len(groups)))
    where = f"{_WHERE} and booked_ms >= ?4 and booked_ms < ?5"
    sql = (
        f"select {', '.join(names)}, {', '.join(ENTRY_SUMS)} from ledger"
        f" join tenants using (tenant_id) where {where} group by {by}"
    )
    for row in store.query(sql, values):
        _add(sums, row[: len(groups)], (*row[len(groups) :], 0, 0))
    names = [name.replace("booked_ms", "a.booked_ms") for name in names]
    where = where.replace("tenant_id", "a.tenant_id", 1).replace("booked_ms", "a.booked_ms")
    sql = (
        f"select {', '.join(names)}, sum(amount_pico / {PICO_PER_MICRO}),"
        f" sum(amount_pico % {PICO_PER_MICRO}) from adjustments as a"
        " join tenants using (tenant_id) join ledger using (request_id)"
        f" where {where} group by {by}"
    )
    nothing = [0] * len(HOUR_SUMS)
    for row in store.query(sql, values):
        _add(sums, row[: len(groups)], (*nothing, *row[len(groups) :]))


def _add(sums: dict[Row, list[int]], group: Row, more: Sequence[int]) -> None:
    sums_so_far = sums.get(group)
    sums[group] = (
        list(more) if sums_so_far is None else list(map(sum, zip(sums_so_far, more, strict=True)))
    )


def _total(groups: Sequence[UsageGroup], group: Row, row: Sequence[int]) -> UsageTotal:
    facts = dict(zip(_SUMS, row, strict=True))
    for name in ("charge", "saved", "adjusted"):
        whole, rest = facts.pop(f"{name}_micros"), facts.pop(f"{name}_rest")
        facts[f"{name}_pico"] = whole * PICO_PER_MICRO + rest
    of = dict(zip(groups, group, strict=True))
    return UsageTotal(
        tenant=of["tenant"],
        **facts,
        key_id=of.get("key"),
        model=of.get("model"),
        from_ms=of.get("hour", of.get("day")),
        user=of.get("user"),
    )
