"""The entry as the ledger has it: a row, chained to the one before it, and added to its sums.

    chain of an entry = SHA-256(chain of the entry before ‖ MessagePack of the row without it)

It knows no prices, no budgets and no holds: entries come priced. `bookkeeping` writes them, on a
`Page` for each transaction; `audit` computes the same again, and questions read rows back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import structs

from tenancy.pricing import PICO_PER_MICRO
from tenancy.store import Transaction, Value, marks
from tenancy.types import UsageEntry

DAY_MS = 86_400_000
HOUR_MS = 3_600_000
NO_CHAIN = b""
_NO_COUNTS = "{}"
_NO_TIMES = (0, 0, 0, 0)
_PACKED = msgspec.msgpack.Encoder().encode
_SORTED = msgspec.json.Encoder(order="sorted").encode

ENTRY_FIELDS = (
    *("request_id", "tenant_id", "key_id", "model", "ending", "started_ms", "ended_ms"),
    *("prompt_tokens", "cache_read_tokens", "cache_write_tokens", "fresh_tokens"),
    *("output_tokens", "physical_cached_tokens", "reads", "writes", "workspace", "tier"),
    *("dialect", "recomputed_promised_tokens", "ttft_ms", "epoch", "rate_card_id"),
    *("charge_pico", "saved_pico", "booked_ms"),
)
"""Columns of the ledger, but for `entry_id` and `chain`: the fields of a `UsageEntry`, in their
order, and when it is booked."""

HOUR_SUMS = (
    *("requests", "prompt_tokens", "cache_read_tokens", "cache_write_tokens", "fresh_tokens"),
    *("output_tokens", "physical_cached_tokens", "recomputed_promised_tokens", "hits"),
    *("ttft_hits", "ttft_hit_ms", "ttft_misses", "ttft_miss_ms"),
    *("charge_micros", "charge_rest", "saved_micros", "saved_rest"),
)
"""Columns of `usage_hours` and `usage_days` that an entry adds to."""


class Page:
    """The entries that one transaction adds: their chain, and their hours' sums in few writes."""

    def __init__(self, db: Transaction, chain: bytes, sealed_hour_ms: int) -> None:
        """`chain`: of the last entry that there is. `sealed_hour_ms`: of the last seal. Both move
        on."""
        self._db = db
        self.chain = chain
        self.sealed_hour_ms = sealed_hour_ms
        self._rows: list[tuple[Value, ...]] = []
        self._last_booked_ms = 0
        self._last_ended_ms: dict[str, int] = {}
        self._sums: dict[tuple[int, int, int, str, str], list[Sequence[int]]] = {}

    def add(self, entry: UsageEntry, booked_ms: int) -> None:
        """One that is not there yet."""
        row = entry_row(entry, booked_ms)
        self.chain = chain = chained(self.chain, row)
        self._rows.append((*row, chain))
        if booked_ms > self._last_booked_ms:
            self._last_booked_ms = booked_ms
        epoch, ended_ms = entry.epoch, entry.ended_ms
        if ended_ms >= self._last_ended_ms.get(epoch, ended_ms):
            self._last_ended_ms[epoch] = ended_ms
        hour_ms = booked_ms - booked_ms % HOUR_MS
        which = (entry.tenant_id, hour_ms, entry.key_id, entry.model, epoch)
        sums = self._sums.get(which)
        if sums is None:
            self._sums[which] = [sums_of(entry)]
        else:
            sums.append(sums_of(entry))

    def finish(self) -> None:
        """Write them and their sums, and seal the chain once an hour."""
        if not self._rows:
            return
        self._db.execute_many(_SETTLE, self._rows)
        hours: list[tuple[Value, ...]] = []
        days: list[tuple[Value, ...]] = []
        epochs: list[tuple[Value, ...]] = []
        for (tenant_id, hour_ms, key_id, model, epoch), rows in self._sums.items():
            sums = rows[0] if len(rows) == 1 else list(map(sum, zip(*rows, strict=True)))
            hours.append((tenant_id, hour_ms, key_id, model, *sums))
            days.append((tenant_id, hour_ms // DAY_MS * DAY_MS, key_id, model, *sums))
            if epoch:
                counts = [sums[column] for column in _EPOCH_COLUMNS]
                epochs.append((epoch, *counts, self._last_ended_ms[epoch]))
        self._db.execute_many(_ADD_HOUR, hours)
        self._db.execute_many(_ADD_DAY, days)
        self._db.execute_many(_ADD_EPOCH, epochs)
        if (hour_ms := hour_of(self._last_booked_ms)) != self.sealed_hour_ms:
            self._db.execute_many(_SEAL, [(hour_ms, self.chain)])
            self.sealed_hour_ms = hour_ms


def sums_of(entry: UsageEntry) -> list[int]:
    """What an entry adds to its hour, in the order of `HOUR_SUMS`."""
    charge, saved, ttft_ms = entry.charge_pico, entry.saved_pico, entry.ttft_ms
    is_hit = entry.cache_read_tokens > 0
    if ttft_ms is None:
        times = _NO_TIMES
    elif is_hit:
        times = (1, ttft_ms, 0, 0)
    else:
        times = (0, 0, 1, ttft_ms)
    return [
        *(1, entry.prompt_tokens, entry.cache_read_tokens, entry.cache_write_tokens),
        *(entry.fresh_tokens, entry.output_tokens, entry.physical_cached_tokens),
        *(entry.recomputed_promised_tokens, int(is_hit), *times),
        *(charge // PICO_PER_MICRO, charge % PICO_PER_MICRO),
        *(saved // PICO_PER_MICRO, saved % PICO_PER_MICRO),
    ]


def entry_row(entry: UsageEntry, booked_ms: int) -> tuple[Value, ...]:
    """Its columns, in the order of `ENTRY_FIELDS`."""
    facts = structs.astuple(entry)
    reads = _counts(entry.read) if entry.read else _NO_COUNTS
    writes = _counts(entry.write) if entry.write else _NO_COUNTS
    return (*facts[:_READS], reads, writes, *facts[_READS + 2 :], booked_ms)


def entry_of(row: Sequence[Any]) -> UsageEntry:
    """The entry of a row of `ENTRY_FIELDS`."""
    facts = dict(zip(ENTRY_FIELDS, row, strict=True))
    del facts["booked_ms"]
    for column, name in (("reads", "read"), ("writes", "write")):
        facts[name] = msgspec.json.decode(str(facts.pop(column)), type=dict[str, int])
    return msgspec.convert(facts, UsageEntry)


def chained(before: bytes, row: Sequence[object]) -> bytes:
    """The chain of a row behind another."""
    return hashlib.sha256(before + _PACKED(row)).digest()


def open_from_ms(db: Transaction) -> int:
    """The first instant of a day that is not closed."""
    return number(db, "select coalesce(max(day) + 1, 0) from closes") * DAY_MS


def number(db: Transaction, sql: str) -> int:
    """The only value of the only row."""
    return int(db.rows(sql)[0][0])


def _counts(detail: Mapping[str, int]) -> str:
    return _SORTED(detail).decode()


def hour_of(at_ms: int) -> int:
    """When its hour began."""
    return at_ms // HOUR_MS * HOUR_MS


def larger(table: str, name: str) -> str:
    """Of the row's value and the one that would have been inserted."""
    mine, new = f"{table}.{name}", f"excluded.{name}"
    return f"case when {mine} >= {new} then {mine} else {new} end"


_EPOCH_SUMS = ("prompt_tokens", "physical_cached_tokens", "output_tokens")
_READS = ENTRY_FIELDS.index("reads")
_EPOCH_COLUMNS = [HOUR_SUMS.index(name) for name in ("requests", *_EPOCH_SUMS)]
_SETTLE = (
    f"insert into ledger ({', '.join(ENTRY_FIELDS)}, chain) values {marks(len(ENTRY_FIELDS) + 1)}"
)
_ADD_HOUR, _ADD_DAY = (
    f"insert into {table} (tenant_id, {since}, key_id, model, {', '.join(HOUR_SUMS)})"
    f" values {marks(4 + len(HOUR_SUMS))}"
    f" on conflict (tenant_id, {since}, key_id, model) do update set "
    + ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in HOUR_SUMS)
    for table, since in (("usage_hours", "hour_ms"), ("usage_days", "day_ms"))
)
_ADD_EPOCH = (
    "insert into epoch_sums values (?, ?, ?, ?, ?, ?) on conflict (epoch) do update set "
    + ", ".join(
        f"{name} = epoch_sums.{name} + excluded.{name}" for name in ("entries", *_EPOCH_SUMS)
    )
    + f", last_ended_ms = {larger('epoch_sums', 'last_ended_ms')}"
)
_SEAL = "insert into seals (hour_ms, entry_id, chain) select ?, max(entry_id), ? from ledger"
