"""The entry as the ledger has it: a row, chained to the one before it, and added to its sums.

    chain of an entry = SHA-256(chain of the entry before ‖ MessagePack of the row without it)

It knows no prices, no budgets and no holds: entries come priced. `bookkeeping` writes them, on a
`EntryAppender` for each transaction; `audit` computes the same again, and questions read rows back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import structs

from tenancy.ledger.aggregates import HOUR_MS, HourlySums
from tenancy.storage.interface import Transaction, Value, marks
from tenancy.types import DAY_MS, UsageEntry

NO_CHAIN = b""
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
"""Columns of the ledger, but for `entry_id` and `chain`: the fields of a `UsageEntry`, in their
order, and when it is booked."""


class EntryAppender:
    """The entries that one transaction adds: their chain, and their hours' sums in few writes."""

    def __init__(self, db: Transaction, chain: bytes, sealed_hour_ms: int) -> None:
        """`chain`: of the last entry that there is. `sealed_hour_ms`: of the last seal. Both move
        on."""
        self._db = db
        self.chain = chain
        self.sealed_hour_ms = sealed_hour_ms
        self._rows: list[list[Value]] = []
        self._last_booked_ms = 0
        self._sums = HourlySums()

    def add(self, entry: UsageEntry, booked_ms: int) -> None:
        """One that is not there yet."""
        row = entry_row(entry, booked_ms)
        self.chain = next_chain(self.chain, row)
        row.append(self.chain)
        self._rows.append(row)
        if booked_ms > self._last_booked_ms:
            self._last_booked_ms = booked_ms
        self._sums.add(entry, booked_ms)

    def finish(self) -> None:
        """Write them and their sums, and seal the chain once an hour."""
        if not self._rows:
            return
        self._db.execute_many(_INSERT_ENTRIES, self._rows)
        self._sums.write(self._db)
        if (hour_ms := hour_of(self._last_booked_ms)) != self.sealed_hour_ms:
            self._db.execute_many(_INSERT_SEAL, [(hour_ms, self.chain)])
            self.sealed_hour_ms = hour_ms


def entry_row(entry: UsageEntry, booked_ms: int) -> list[Value]:
    """Its columns, in the order of `ENTRY_FIELDS`."""
    row: list[Value] = list(structs.astuple(entry))
    row[_READS] = _counts(entry.read) if entry.read else _NO_COUNTS
    row[_WRITES] = _counts(entry.write) if entry.write else _NO_COUNTS
    row.append(booked_ms)
    return row


def entry_of(row: Sequence[Any]) -> UsageEntry:
    """The entry of a row of `ENTRY_FIELDS`."""
    fields = list(row[:-1])
    for column in (_READS, _WRITES):
        fields[column] = _COUNTS(fields[column])
    return UsageEntry(*fields)


def next_chain(before: bytes, row: Sequence[object]) -> bytes:
    """The chain of a row behind another."""
    return hashlib.sha256(before + _PACKED(row)).digest()


def read_open_from_ms(db: Transaction) -> int:
    """The first instant of a day that is not closed."""
    return read_number(db, "select coalesce(max(day) + 1, 0) from closes") * DAY_MS


def read_number(db: Transaction, sql: str) -> int:
    """The only value of the only row."""
    return int(db.rows(sql)[0][0])


def _counts(detail: Mapping[str, int]) -> str:
    return _SORTED(detail).decode()


def hour_of(at_ms: int) -> int:
    """When its hour began."""
    return at_ms // HOUR_MS * HOUR_MS


_READS, _WRITES = ENTRY_FIELDS.index("reads"), ENTRY_FIELDS.index("writes")
_INSERT_ENTRIES = (
    f"insert into ledger ({', '.join(ENTRY_FIELDS)}, chain) values {marks(len(ENTRY_FIELDS) + 1)}"
)
_INSERT_SEAL = "insert into seals (hour_ms, entry_id, chain) select ?, max(entry_id), ? from ledger"
