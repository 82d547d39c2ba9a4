"""The daily close: a day's entries are counted, summed and hashed, and the day becomes final.

Afterwards the database refuses entries in the day; late ones are booked on the next open day. Days
are UTC. A day can be closed once it is over and none of its requests runs. The clock by itself does
not show that it is over, except for a day that the operator names: a gateway must have written
later, by its own clock. The command line calls it, also beside a running server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta

from msgspec import Struct

from tenancy.accounting.reconcile import reconcile_in
from tenancy.errors import BadName, CloseRefused
from tenancy.ledger.entries import read_number
from tenancy.storage.audit_log import Actor, record
from tenancy.storage.hourly_usage import HOURLY_USAGE
from tenancy.storage.interface import Row, Store, Transaction
from tenancy.types import DAY_MS, WallClock

DAYS_PER_CLOSE_MAX = 3_700
"""The most days that one call closes."""
CLOSES_MAX = 400
"""The most days of one list."""
TRIES_MAX = 3
"""How often days are counted again because new rows came."""
_PAGE = 50_000


class ClosedDay(Struct, frozen=True):
    """A closed day with its control totals. Money is pico-dollars.

    A copy stored elsewhere proves what the day contained.
    """

    day: str
    closed_ms: int
    entries: int
    prompt_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    output_tokens: int
    charge_pico: int
    adjustments: int
    adjusted_pico: int
    storage_token_seconds: int
    ledger_epoch: int
    digest: str
    """SHA-256 over the digest of the close before, the day's chains in ledger order, the chains of
    its adjustments, and these totals."""


def close_days(
    store: Store,
    clock: WallClock,
    through: str | None = None,
    *,
    despite_counts: bool = False,
    by: Actor,
) -> list[ClosedDay]:
    """Close every open day up to `through`, oldest first. Returns them. By default the last one is
    yesterday, or the day before that of the ledger's latest time, if that is earlier.

    The first day is that of the first entry. Counting is O(entries of the days), while others
    write; then one transaction of O(days) checks that no row of the days came meanwhile, or they
    are counted again. Raises BadName if `through` is no day, and CloseRefused with nothing closed:
    if a day is not over, is closed already, or has a running request; if the engine's counts
    differ, unless `despite_counts`; and if rows come at every try.
    """
    now_ms = clock()
    today = now_ms // DAY_MS
    last = today - 1 if through is None else _day_number(through)
    if last >= today:
        raise CloseRefused("day_not_over", f"Day is not over yet (UTC): {_day_name(last)}.")
    for _ in range(TRIES_MAX):
        with store.snapshot() as db:
            if through is None:
                last = min(last, _latest_ms(db) // DAY_MS - 1)
            closed = _last_closed(db)
            if closed is not None and last <= closed:
                if through is None:
                    return []
                raise CloseRefused("day_closed", f"Day is already closed: {_day_name(last)}.")
            _check_running(db, last)
            first = _first_day(db) if closed is None else closed + 1
            if first is None or last < first:
                return []
            count = last - first + 1
            if count > DAYS_PER_CLOSE_MAX:
                message = f"Too many days in one close: {count}; limit {DAYS_PER_CLOSE_MAX}."
                raise CloseRefused("too_many_days", message)
            period = (first * DAY_MS, (last + 1) * DAY_MS)
            if not despite_counts:
                _check_counts(db, *period)
            last_ids = _last_ids(db)
            rows, storage = _count_days(db, first, last), _storage_token_seconds(db, period)
        with store.change() as db:
            _check_running(db, last)
            if not despite_counts:
                _check_counts(db, *period)
            is_unchanged = (
                _last_closed(db) == closed and _storage_token_seconds(db, period) == storage
            )
            if is_unchanged and not _has_newer(db, last_ids, period):
                days = [_close(db, row, now_ms) for row in rows]
                for day in days:
                    digest = {"digest": day.digest, "despite_counts": despite_counts}
                    record(db, by, "ledger.close", f"day:{day.day}", after=digest)
                return days
    raise CloseRefused("days_change", "Entries of these days still arrive; try again.")


def list_closes(store: Store) -> list[ClosedDay]:
    """Return the latest closed days, at most `CLOSES_MAX`, oldest first."""
    rows = store.query(f"select {_COLUMNS} from closes order by day desc limit {CLOSES_MAX}")
    return [_closed_day(row) for row in reversed(rows)]


def totals_of(db: Transaction, day: int, before: bytes) -> tuple[Row, bytes]:
    """Return a day's control totals in column order, and its digest after the digest `before`."""
    period = (day * DAY_MS, (day + 1) * DAY_MS)
    digest = hashlib.sha256(before)
    entries, sums, charge = 0, [0, 0, 0, 0], 0
    for chain, *tokens, pico in _entries(db, period):
        digest.update(chain)
        entries += 1
        charge += pico
        sums = [total + more for total, more in zip(sums, tokens, strict=True)]
    adjusted = db.rows(
        "select chain, amount_pico from adjustments"
        f" where {_IN_PERIOD.format('booked_ms')} order by number",
        period,
    )
    for chain, _ in adjusted:
        digest.update(chain)
    totals: Row = (
        *(entries, *sums, str(charge), len(adjusted)),
        *(str(sum(amount for _, amount in adjusted)), _storage_token_seconds(db, period)),
    )
    digest.update(repr((day, *totals)).encode())
    return totals, digest.digest()


def _check_running(db: Transaction, last: int) -> None:
    """Raise CloseRefused if a request of these days still runs."""
    if db.rows("select 1 from holds where booked_ms < ? limit 1", ((last + 1) * DAY_MS,)):
        message = f"Requests admitted on {_day_name(last)} or before still run; try again."
        raise CloseRefused("requests_running", message)


def _check_counts(db: Transaction, since_ms: int, until_ms: int) -> None:
    """Raise CloseRefused if the engine and the ledger counted differently in these days."""
    for epoch in reconcile_in(db):
        if epoch.has_mismatch and epoch.first_seen_ms < until_ms and epoch.last_seen_ms >= since_ms:
            raise CloseRefused(
                "counts_apart",
                f"Engine epoch {epoch.epoch} and the ledger counted different tokens; see trunkline"
                " reconcile. To close nevertheless: --despite-counts.",
            )


def _latest_ms(db: Transaction) -> int:
    """Return when a gateway last wrote: its engine's counts, each minute, or an entry."""
    counted_ms = read_number(db, "select coalesce(max(last_seen_ms), 0) from engine_epochs")
    last = db.rows("select ended_ms from ledger order by entry_id desc limit 1")
    return max(counted_ms, last[0][0] if last else 0)


def _last_ids(db: Transaction) -> tuple[int, int]:
    """Return the ids of the last entry and the last adjustment."""
    return (
        read_number(db, "select coalesce(max(entry_id), 0) from ledger"),
        read_number(db, "select coalesce(max(number), 0) from adjustments"),
    )


def _has_newer(db: Transaction, ends: tuple[int, int], period: tuple[int, int]) -> bool:
    """Return whether the period has entries or adjustments after these ids."""
    return any(
        db.rows(
            f"select 1 from {table} where {name} > ? and booked_ms >= ? and booked_ms < ? limit 1",
            (end, *period),
        )
        for table, name, end in zip(
            ("ledger", "adjustments"), ("entry_id", "number"), ends, strict=True
        )
    )


def _storage_token_seconds(db: Transaction, period: tuple[int, int]) -> int:
    """Return the token-seconds stored in the period; they only grow."""
    sql = "select coalesce(sum(token_seconds), 0) from storage_hours"
    return int(db.rows(f"{sql} where {_IN_PERIOD.format('hour_ms')}", period)[0][0])


def _count_days(db: Transaction, first: int, last: int) -> list[Row]:
    """Return the days' rows, without the time of the close and the ledger epoch."""
    found = db.rows("select digest from closes order by day desc limit 1")
    before = found[0][0] if found else b""
    rows: list[Row] = []
    for day in range(first, last + 1):
        totals, before = totals_of(db, day, before)
        rows.append((day, *totals, before))
    return rows


def _entries(db: Transaction, period: tuple[int, int]) -> Iterator[Row]:
    """Yield the period's entries in ledger order, in pages, as a day may not fit into memory.

    Entries of a day have ids close together, so only those between the first and last are read.
    """
    ends = db.rows(
        "select min(entry_id), max(entry_id) from ledger"
        f" where {_IN_PERIOD.format('booked_ms')} group by tenant_id",
        period,
    )
    after, last = (
        min((row[0] for row in ends), default=0) - 1,
        max((row[1] for row in ends), default=0),
    )
    while page := db.rows(
        "select entry_id, chain, prompt_tokens, cache_read_tokens, cache_write_tokens,"
        " output_tokens, charge_pico from ledger where entry_id > ? and entry_id <= ?"
        " and booked_ms >= ? and booked_ms < ? order by entry_id limit ?",
        (after, last, *period, _PAGE),
    ):
        yield from (row[1:] for row in page)
        after = page[-1][0]


_IN_PERIOD = "tenant_id in (select tenant_id from tenants) and {0} >= ? and {0} < ?"
"""Lists the tenants, so that the database uses an index."""


def _close(db: Transaction, row: Row, now_ms: int) -> ClosedDay:
    day, *totals, digest = row
    epoch = read_number(db, "select max(number) from ledger_epochs")
    db.execute(
        f"insert into closes ({_COLUMNS}) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (day, now_ms, *totals, epoch, digest),
    )
    return _closed_day((day, now_ms, *totals, epoch, digest))


def _last_closed(db: Transaction) -> int | None:
    day: int | None = db.rows("select max(day) from closes")[0][0]
    return day


def _first_day(db: Transaction) -> int | None:
    first: int | None = db.rows(f"select min(hour_ms) from {HOURLY_USAGE}")[0][0]
    return None if first is None else first // DAY_MS


_COLUMNS = ", ".join(ClosedDay.__struct_fields__)


def _closed_day(row: Row) -> ClosedDay:
    names = [name for name in ClosedDay.__struct_fields__ if name not in ("day", "digest")]
    facts = {name: int(value) for name, value in zip(names, row[1:-1], strict=True)}
    return ClosedDay(day=_day_name(row[0]), digest=row[-1].hex(), **facts)


def _day_number(name: str) -> int:
    try:
        day = date.fromisoformat(name)
    except ValueError as error:
        message = f"Invalid day: {name[:40]!r}; expected YYYY-MM-DD."
        raise BadName("bad_day", message) from error
    return (day - date(1970, 1, 1)).days


def _day_name(day: int) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=day)).date().isoformat()
