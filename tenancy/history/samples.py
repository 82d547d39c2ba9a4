"""Samples of each minute and tenant: refusals, times to first token, blocks.

They hold what the ledger does not: requests that never ran, and the state of the cache. A gateway
writes one row a minute for each active tenant and one for all; after two days the minutes of an
hour become one row, and after 35 days rows are deleted. The module knows no gateway and no engine.
`gateway.background.history_sampling` writes samples, `history` and the admin API read them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct, structs

from tenancy.storage.interface import Row, Store, Transaction, Value
from tenancy.types import DAY_MS, HOUR_MS, MINUTE_MS

ALL_TENANTS = 0
"""The tenant id of the sums of all; no tenant has it."""
MINUTES_KEPT_MS = 50 * HOUR_MS
"""How long minutes stay apart: two days, and the rest of an hour at either end."""
KEPT_MS = 35 * DAY_MS
FOLDED_HOURS_MAX, FOLDED_TENANTS = 4, 8
"""Hours folded by one call, and tenants by one transaction, so that other writers wait only
briefly."""

_NAMES = (
    *("tenant_id", "span_ms", "at_ms", "gateway", "minutes", "refused"),
    *("blocks_promised", "blocks_cached", "blocks_free", "details"),
)
_COLUMNS = ", ".join(_NAMES)
_WRITE = (
    f"insert into history_samples ({_COLUMNS}) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    " on conflict (tenant_id, span_ms, at_ms, gateway) do update set "
    + ", ".join(f"{name} = excluded.{name}" for name in _NAMES[4:])
)


class SampleDetails(Struct, frozen=True, array_like=True):
    """Counts of a sample: refusals by code, and times to first token by bucket.

    Buckets are those of `tenancy.reuse.miss_ratio_curve.bucket_of`, in milliseconds.
    """

    refusals: dict[str, int] = {}
    hits: dict[int, int] = {}
    """Half of the prompt or more was cached."""
    misses: dict[int, int] = {}


class Sample(Struct, frozen=True):
    """What one gateway saw of a tenant, or of all, in a minute or an hour from `at_ms` on.

    Blocks are means over the time; None without an engine. `blocks_free` is known for all only.
    """

    tenant_id: int
    at_ms: int
    details: SampleDetails = SampleDetails()
    blocks_promised: int | None = None
    blocks_cached: int | None = None
    blocks_free: int | None = None
    gateway: str = ""
    minutes: int = 1
    span_ms: int = MINUTE_MS

    @property
    def refused(self) -> int:
        """The number of refused requests."""
        return sum(self.details.refusals.values())


def write_samples(store: Store, samples: Sequence[Sample]) -> None:
    """Write samples of one minute, or of a part of it, by one gateway, in one transaction: counts
    are added to an existing row's, and blocks replace its own. Raises StoreError."""
    if not samples:
        return
    first = samples[0]
    with store.change() as db:
        rows = db.rows(
            f"select {_COLUMNS} from history_samples where span_ms = ? and at_ms = ?"
            " and gateway = ?",
            (first.span_ms, first.at_ms, first.gateway),
        )
        before = {one.tenant_id: one for one in map(_sample, rows)}
        _write(
            db,
            [
                _continued(before[one.tenant_id], one) if one.tenant_id in before else one
                for one in samples
            ],
        )


def read_samples(store: Store, tenant_id: int, since_ms: int, until_ms: int) -> list[Sample]:
    """Return a tenant's samples that begin in [since_ms, until_ms), of all gateways, by time.

    O(samples). Raises StoreError.
    """
    rows = store.query(
        f"select {_COLUMNS} from history_samples where tenant_id = ?"
        f" and span_ms in ({MINUTE_MS}, {HOUR_MS}) and at_ms >= ? and at_ms < ?",
        (tenant_id, since_ms, until_ms),
    )
    return sorted(map(_sample, rows), key=lambda one: one.at_ms)


def sampled_times(store: Store, since_ms: int, until_ms: int) -> list[int]:
    """Return the starts in [since_ms, until_ms) of the minutes and hours in which a gateway ran.

    O(samples). Raises StoreError.
    """
    rows = store.query(
        "select distinct at_ms from history_samples where tenant_id = ?"
        f" and span_ms in ({MINUTE_MS}, {HOUR_MS}) and at_ms >= ? and at_ms < ?",
        (ALL_TENANTS, since_ms, until_ms),
    )
    return [at_ms for (at_ms,) in rows]


def refused_since(store: Store, since_ms: int) -> list[Sample]:
    """Return the minutes from `since_ms` on in which requests were refused, of all tenants and of
    `ALL_TENANTS`. Raises StoreError."""
    rows = store.query(
        f"select {_COLUMNS} from history_samples where span_ms = ? and at_ms >= ? and refused > 0",
        (MINUTE_MS, since_ms),
    )
    return list(map(_sample, rows))


def fold_samples(store: Store, now_ms: int) -> bool:
    """Make hours of minutes older than two days, and delete what is older than 35 days.

    Folds up to `FOLDED_HOURS_MAX` hours, the oldest first; returns whether more are left. Raises
    StoreError.
    """
    before_ms = (now_ms - MINUTES_KEPT_MS) // HOUR_MS * HOUR_MS
    due = "from history_samples where span_ms = ? and at_ms < ?"
    expired = store.query(f"select 1 {due} limit 1", (HOUR_MS, now_ms - KEPT_MS))
    if expired:
        with store.change() as db:
            db.execute(f"delete {due}", (HOUR_MS, now_ms - KEPT_MS))
    for _ in range(FOLDED_HOURS_MAX):
        (oldest,) = store.query(f"select min(at_ms) {due}", (MINUTE_MS, before_ms))[0]
        if oldest is None:
            return False
        _fold_hour(store, oldest // HOUR_MS * HOUR_MS)
    return True


def combine(samples: Sequence[Sample]) -> Sample:
    """Return the sum of samples of one tenant by one gateway, in place of the first: counts are
    added, blocks are means weighted by minutes. O(counts)."""
    first = samples[0]
    means: dict[str, int | None] = {}
    for name in ("blocks_promised", "blocks_cached", "blocks_free"):
        known = [(getattr(one, name), one.minutes) for one in samples]
        weighted = [(blocks, minutes) for blocks, minutes in known if blocks is not None]
        total = sum(minutes for _, minutes in weighted)
        sums = sum(blocks * minutes for blocks, minutes in weighted)
        means[name] = round(sums / total) if total else None
    return structs.replace(
        first,
        details=add_details(one.details for one in samples),
        minutes=sum(one.minutes for one in samples),
        **means,
    )


def _continued(before: Sample, more: Sample) -> Sample:
    """Return a minute's sample with a further part of the minute: the same minute, once."""
    details = add_details((before.details, more.details))
    if (more.blocks_promised, more.blocks_cached, more.blocks_free) == (None, None, None):
        return structs.replace(before, details=details)
    return structs.replace(more, details=details)


def add_details(details: Iterable[SampleDetails]) -> SampleDetails:
    """Return the sums of all counts. O(counts)."""
    refusals: defaultdict[str, int] = defaultdict(int)
    hits: defaultdict[int, int] = defaultdict(int)
    misses: defaultdict[int, int] = defaultdict(int)
    for one in details:
        for code, count in one.refusals.items():
            refusals[code] += count
        _add(hits, one.hits)
        _add(misses, one.misses)
    return SampleDetails(dict(refusals), dict(hits), dict(misses))


def _add(sums: defaultdict[int, int], more: Mapping[int, int]) -> None:
    for bucket, count in more.items():
        sums[bucket] += count


def _fold_hour(store: Store, hour_ms: int) -> None:
    """Replace the minutes of one hour by one row for each tenant and gateway.

    Minutes so old do not change, so they are read and summed before a transaction; one transaction
    replaces those of few tenants. Of two gateways that fold at once, one finds them gone.
    """
    span = (MINUTE_MS, hour_ms, hour_ms + HOUR_MS)
    where = "history_samples where span_ms = ? and at_ms >= ? and at_ms < ?"
    tenants = store.query(f"select distinct tenant_id from {where}", span)
    for first in range(0, len(tenants), FOLDED_TENANTS):
        folded: list[tuple[int, int, Sample]] = []
        for (tenant_id,) in tenants[first : first + FOLDED_TENANTS]:
            rows = store.query(
                f"select {_COLUMNS} from {where} and tenant_id = ?", (*span, tenant_id)
            )
            folded += _hours_of(hour_ms, list(map(_sample, rows)))
        with store.change() as db:
            _write(
                db,
                [
                    hour
                    for tenant_id, count, hour in folded
                    if db.execute(
                        f"delete from {where} and tenant_id = ? and gateway = ?",
                        (*span, tenant_id, hour.gateway),
                    )
                    == count
                ],
            )


def _hours_of(hour_ms: int, samples: Sequence[Sample]) -> list[tuple[int, int, Sample]]:
    """Return (tenant, number of minutes, their sum) for each gateway."""
    by_gateway: defaultdict[str, list[Sample]] = defaultdict(list)
    for one in samples:
        by_gateway[one.gateway].append(one)
    return [
        (
            minutes[0].tenant_id,
            len(minutes),
            structs.replace(combine(minutes), at_ms=hour_ms, span_ms=HOUR_MS),
        )
        for minutes in by_gateway.values()
    ]


def _write(db: Transaction, samples: Iterable[Sample]) -> None:
    rows: list[tuple[Value, ...]] = [
        (
            *(one.tenant_id, one.span_ms, one.at_ms, one.gateway, one.minutes, one.refused),
            *(one.blocks_promised, one.blocks_cached, one.blocks_free),
            msgspec.msgpack.encode(one.details),
        )
        for one in samples
    ]
    db.execute_many(_WRITE, rows)


_DETAILS = msgspec.msgpack.Decoder(SampleDetails).decode


def _sample(row: Row) -> Sample:
    tenant_id, span_ms, at_ms, gateway, minutes, _, promised, cached, free, details = row
    return Sample(
        tenant_id=tenant_id,
        at_ms=at_ms,
        details=_DETAILS(bytes(details)),
        blocks_promised=promised,
        blocks_cached=cached,
        blocks_free=free,
        gateway=gateway,
        minutes=minutes,
        span_ms=span_ms,
    )
