"""Entries of a transaction: chain, sums and seal."""

from __future__ import annotations

import hashlib

import msgspec
from msgspec.structs import replace

from tenancy.ledger.entries import (
    ENTRY_FIELDS,
    ROW_FIELDS,
    entry_of,
    entry_row,
    next_chain,
)
from tenancy.ledger.ledger import Ledger
from tenancy.ledger.transactions import LedgerTransactions
from tenancy.storage.hourly_usage import HOURLY_USAGE
from tenancy.storage.interface import Store
from tenancy.types import HOUR_MS, LEVEL_COLUMNS
from tests.unit.tenancy.conftest import Wall, used


def test_each_entry_is_chained_to_the_one_before(store: Store, ledger: Ledger, wall: Wall) -> None:
    """A changed, removed or inserted row breaks every later chain."""
    for name in "abc":
        ledger.settle(used(name, wall())).result(60)
    rows = store.query(f"select {', '.join(ENTRY_FIELDS)}, chain from ledger order by entry_id")
    before = b""
    for *row, chain in rows:
        before = hashlib.sha256(before + msgspec.msgpack.encode(row)).digest()
        assert chain == before
        assert row[ENTRY_FIELDS.index("reads")] == '{"1h":4,"5m":1}'

    changed = [*rows[0][:-1]]
    changed[ENTRY_FIELDS.index("charge_pico")] = 7
    assert next_chain(b"", changed) != rows[0][-1]
    assert list(rows[0][:-1]) == entry_row(used("a", wall()), wall())


def test_the_chain_does_not_cover_levels(store: Store, ledger: Ledger, wall: Wall) -> None:
    """They are no money; a row without them is read with nothing from below."""
    entry = used("a", wall())
    ledger.settle(entry).result(60)
    (row,) = store.query(f"select {', '.join(ROW_FIELDS)} from ledger")
    older = replace(entry, **dict.fromkeys(LEVEL_COLUMNS, 0))

    assert entry_row(entry, wall()) == entry_row(older, wall())
    assert entry_of(row) == entry
    assert entry_of(row[: len(ENTRY_FIELDS)]) == older


def test_settling_again_keeps_chain_and_sums(store: Store, ledger: Ledger, wall: Wall) -> None:
    """In one batch or in two."""
    sent = [ledger.settle(used(name, wall())) for name in "aabab"]
    for future in sent:
        future.result(60)

    assert store.query("select request_id from ledger order by entry_id") == [("a",), ("b",)]
    assert store.query(f"select requests, prompt_tokens from {HOURLY_USAGE}") == [(2, 20)]


def test_chain_is_sealed_once_an_hour(store: Store, ledger: Ledger, wall: Wall) -> None:
    """In booking order, even if the clock is set back; a batch for its latest hour."""
    for number, hours in enumerate((0, 0, 0, 500, 0, -500)):
        wall.ms += hours * HOUR_MS
        ledger.settle(used(str(number), wall())).result(60)
    with store.change() as db:
        batch = [used("later", wall() + HOUR_MS), used("earlier", wall())]
        LedgerTransactions().apply(db, batch)
    seals = store.query("select entry_id, hour_ms, chain from seals order by number")

    assert [row[0] for row in seals] == [1, 4, 6, 8]
    assert seals[-1][1] == HOUR_MS
    assert seals[-1][2] == store.query("select chain from ledger where entry_id = 8")[0][0]
