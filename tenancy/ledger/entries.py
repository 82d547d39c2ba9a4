"""Ledger entries as rows: each is chained to the one before and added to its hour's sums.

    chain of an entry = SHA-256(chain of the entry before ‖ MessagePack of the row without it)

The module knows no prices, no budgets and no holds: entries come priced. `transactions` writes them
with one `EntryAppender` per transaction; `accounting.audit` recomputes the chain, and queries read
rows back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import structs

from tenancy.ledger.aggregates import HourlySums
from tenancy.storage.interface import Transaction, Value, placeholders
from tenancy.types import DAY_MS, HOUR_MS, LEVEL_COLUMNS, UsageEntry

NO_CHAIN = b""
"""The chain before the first entry."""
_NO_COUNTS = "{}"
_PACKED = msgspec.msgpack.Encoder().encode
_SORTED = msgspec.json.Encoder(order="sorted").encode
_COUNTS = msgspec.json.Decoder(dict[str, int]).decode

ENTRY_FIELDS = (
    *("request_id", "tenant_id", "key_id", "model", "ending", "started_ms", "ended_ms"),
    *("prompt_tokens", "cache_read_tokens", "cache_write_tokens", "fresh_tokens"),
    *("output_tokens", "physical_cached_tokens", "reads", "writes", "workspace", "tier"),
    *("dialect", "recomputed_promised_tokens", "ttft_ms", "epoch", "rate_card_id"),
    *("charge_pico", "saved_pico", "booked_ms"),
)
"""The columns of the ledger that the chain covers.

They are the fields of `UsageEntry` in their order but for the last ones, and then `booked_ms`.
"""
ROW_FIELDS = (*ENTRY_FIELDS, *LEVEL_COLUMNS)
"""All columns of an entry but `entry_id` and `chain`. The chain does not cover those of levels,
which are the last fields of `UsageEntry`: where cached tokens came from is no money."""


class EntryAppender:
    """The entries that one transaction appends: their chain, and their sums in few writes."""

    def __init__(self, db: Transaction, chain: bytes, sealed_hour_ms: int) -> None:
        """Append after the entry with this `chain`.

        `sealed_hour_ms`: the hour of the last seal. Both attributes advance.
        """
        self._db = db
        self.chain = chain
        self.sealed_hour_ms = sealed_hour_ms
        self._rows: list[list[Value]] = []
        self._last_booked_ms = 0
        self._sums = HourlySums()

    def add(self, entry: UsageEntry, booked_ms: int) -> None:
        """Append an entry; its request id has none yet."""
        row = entry_row(entry, booked_ms)
        self.chain = next_chain(self.chain, row)
        row += (self.chain, entry.host_cached_tokens, entry.disk_cached_tokens)
        row.append(entry.remote_cached_tokens)
        self._rows.append(row)
        if booked_ms > self._last_booked_ms:
            self._last_booked_ms = booked_ms
        self._sums.add(entry, booked_ms)

    def finish(self) -> None:
        """Write the entries and their sums, and seal the chain once an hour."""
        if not self._rows:
            return
        self._db.execute_many(_INSERT_ENTRIES, self._rows)
        self._sums.write(self._db)
        if (hour_ms := hour_of(self._last_booked_ms)) != self.sealed_hour_ms:
            self._db.execute_many(_INSERT_SEAL, [(hour_ms, self.chain)])
            self.sealed_hour_ms = hour_ms


def entry_row(entry: UsageEntry, booked_ms: int) -> list[Value]:
    """Return an entry's columns in the order of `ENTRY_FIELDS`."""
    row: list[Value] = list(structs.astuple(entry)[: -len(LEVEL_COLUMNS)])
    row[_READS] = _counts(entry.read) if entry.read else _NO_COUNTS
    row[_WRITES] = _counts(entry.write) if entry.write else _NO_COUNTS
    row.append(booked_ms)
    return row


def entry_of(row: Sequence[Any]) -> UsageEntry:
    """Decode a row of `ROW_FIELDS`; or only of `ENTRY_FIELDS`, without the counts by level."""
    booked = len(ENTRY_FIELDS) - 1
    fields = [*row[:booked], *row[booked + 1 :]]
    for column in (_READS, _WRITES):
        fields[column] = _COUNTS(fields[column])
    return UsageEntry(*fields)


def next_chain(before: bytes, row: Sequence[object]) -> bytes:
    """Return the chain of a row that follows one with the chain `before`."""
    return hashlib.sha256(before + _PACKED(row)).digest()


def read_open_from_ms(db: Transaction) -> int:
    """Return the first instant of the first open day."""
    return read_number(db, "select coalesce(max(day) + 1, 0) from closes") * DAY_MS


def read_number(db: Transaction, sql: str) -> int:
    """Return the only value of the only row."""
    return int(db.rows(sql)[0][0])


def _counts(detail: Mapping[str, int]) -> str:
    return _SORTED(detail).decode()


def hour_of(at_ms: int) -> int:
    """Return the start of the hour of an instant, in milliseconds."""
    return at_ms // HOUR_MS * HOUR_MS


_READS, _WRITES = ENTRY_FIELDS.index("reads"), ENTRY_FIELDS.index("writes")
_INSERT_ENTRIES = (
    f"insert into ledger ({', '.join(ENTRY_FIELDS)}, chain, {', '.join(LEVEL_COLUMNS)})"
    f" values {placeholders(len(ROW_FIELDS) + 1)}"
)
_INSERT_SEAL = "insert into seals (hour_ms, entry_id, chain) select ?, max(entry_id), ? from ledger"
