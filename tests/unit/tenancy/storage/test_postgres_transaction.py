"""A batch on a server: how often it goes there and back, and what cannot be in a text."""

from __future__ import annotations

import pytest

from tenancy.accounts.tenants import create_tenant
from tenancy.ledger.idempotency import Claim, Keeping, KeptAnswer
from tenancy.ledger.transactions import Hold, Item, LedgerTransactions, NamedEntry
from tenancy.storage.interface import Row
from tenancy.storage.postgres import PostgresStore
from tenancy.storage.postgres_connection import Link, Statement
from tests.unit.tenancy.conftest import Wall, used

KEEPING = Keeping(2_000_000, 10_000, KeptAnswer("head", b"body"))


def test_a_batch_is_few_round_trips_however_large(
    postgres: PostgresStore, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs as much as the way is long; what is only written waits for the commit."""
    create_tenant(postgres, wall, "ada")
    trips: list[int] = []
    send = Link.run_all

    def count(link: Link, statements: list[Statement], *, ending: str = "") -> list[Row]:
        trips[-1] += 1
        return send(link, statements, ending=ending)

    monkeypatch.setattr(Link, "run_all", count)
    books = LedgerTransactions()
    for size in (1, 1, 100):
        trips.append(0)
        ids = [f"{len(trips)}-{number}" for number in range(size)]
        with postgres.change() as db:
            books.apply(db, [Hold(name, 1, 1, "m", wall()) for name in ids])
        with postgres.change() as db:
            books.apply(db, [used(name, wall()) for name in ids])

    named: list[int] = []
    for size in (1, 50):
        trips.append(0)
        ids = [f"n{size}-{number}" for number in range(size)]
        items: list[Item] = [
            *(Hold(name, 1, 1, "m", wall(), claim=Claim(name, bytes(32), 999)) for name in ids),
            *(NamedEntry(used(name, wall()), KEEPING) for name in ids),
        ]
        with postgres.change() as db:
            books.apply(db, items)
        named.append(trips[-1])

    assert trips[1] == trips[2] == 6
    assert named == [6, 6]
    assert postgres.query("select count(*) from ledger") == [(153,)]


def test_many_rows_that_are_named_are_changed_as_if_each_were(
    postgres: PostgresStore, wall: Wall
) -> None:
    """In one statement: the last of two for one row holds, and one for no row changes nothing."""
    create_tenant(postgres, wall, "ada")
    with postgres.change() as db:
        LedgerTransactions().apply(db, [Hold(name, 1, 1, "m", wall()) for name in "abcd"])
    with postgres.change() as db:
        notes = [(b"1", "a"), (b"2", "b"), (b"\0\xff", "a"), (b"4", "nobody's"), (None, "c")]
        db.execute_many("update holds set progress = ? where request_id = ?", notes)
        db.execute_many("delete from holds where request_id = ?", [("b",), ("c",), ("b",)])
    rows = postgres.query("select request_id, progress from holds order by 1")

    assert rows == [("a", b"\0\xff"), ("d", None)]


def test_a_nul_is_shown_as_what_cannot_be_shown(postgres: PostgresStore, wall: Wall) -> None:
    """One row or many: no text on a server has one, and nobody's request fails for it."""
    create_tenant(postgres, wall, "ada")
    for ids in (["a\0"], ["b\0", "c\0"]):
        with postgres.change() as db:
            LedgerTransactions().apply(db, [Hold(name, 1, 1, "m", wall()) for name in ids])
    rows = postgres.query("select request_id from holds order by 1")

    assert rows == [("a\ufffd",), ("b\ufffd",), ("c\ufffd",)]
