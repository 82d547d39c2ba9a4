"""Conformance of every store, whichever database it uses."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from tenancy.accounts.tenants import create_tenant
from tenancy.errors import BadName, ConstraintBroken, StoreError
from tenancy.ledger.transactions import Hold, LedgerTransactions
from tenancy.storage.interface import Store
from tests.unit.tenancy.conftest import Wall

INSERT = (
    "insert into ledger (request_id, tenant_id, key_id, model, ending, started_ms, ended_ms,"
    " prompt_tokens, cache_read_tokens, cache_write_tokens, fresh_tokens, output_tokens,"
    " physical_cached_tokens) values (?, 1, 1, 'm', 'done', 0, 0, 1, 0, 0, ?, 1, 0)"
)


def test_failed_transaction_leaves_nothing(store: Store) -> None:

    def change_half() -> None:
        with store.change() as db:
            db.execute("insert into tenants (name, status, created_ms) values ('ada', 'active', 0)")
            raise BadName("any", "any")

    with pytest.raises(BadName):
        change_half()
    assert store.query("select * from tenants") == []


ERASURE = (
    "insert into erasures (receipt_id, tenant_id, key_id, at_ms, what, namespaces,"
    " namespace_digest, blocks) values (?, ?, ?, ?, ?, ?, ?, ?)"
)


def test_many_rows_round_trip(store: Store) -> None:
    """For texts of any characters, and for many rows."""
    create_tenant(store, Wall(), "ada")
    texts = ["", "plain", "ä 語 😀", "a\tb\n\\ ' \" {} , ?1", "\\x00", "null"]
    rows = [
        (f"{text}{number}", 1, -number, 2**63 - 1, text, 0, "d", number)
        for number in range(40)
        for text in texts
    ]
    with store.change() as db:
        db.execute_many(ERASURE, rows[:1])
        db.execute_many(ERASURE, rows[1:])
        db.execute_many(ERASURE, [])
    found = [row[:8] for row in store.query("select * from erasures")]

    assert sorted(found) == sorted(rows)


def test_bytes_and_nulls_round_trip(store: Store) -> None:
    """Columns with nulls only, and with some."""
    create_tenant(store, Wall(), "ada")
    names = ("resource_id", "tenant_id", "workspace", "model", "display_name", "content")
    sql = (
        f"insert into cached_contents ({', '.join(names)}, tokens, created_ms, updated_ms,"
        " expires_ms, ended_ms) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    )
    kept = [(f"a{n:03}", 1, "w", "m", "n", bytes(range(n)), 1, 2, 3, 4, None) for n in (0, 9, 256)]
    ended = [(f"b{n}", 1, "w", "m", "n", None, 1, 2, 3, 4, 5) for n in range(3)]
    with store.change() as db:
        db.execute_many(sql, kept)
        db.execute_many(sql, ended)
    found = store.query(f"select {', '.join(names)} from cached_contents order by 1")

    assert found == [row[:6] for row in (*kept, *ended)]


def test_next_statement_sees_many_rows(store: Store) -> None:
    """In order, also between statements that conflict."""
    add = "insert into named_sums values (?, ?, ?) on conflict (tenant_id) do update set bytes = ?"
    create_tenant(store, Wall(), "ada")
    with store.change() as db:
        db.execute_many(add, [(1, 1, number, number) for number in range(5)])
        seen = db.rows("select bytes from named_sums")
        db.execute_many(add, [(1, 1, 9, 9)])
        changed = db.execute("update named_sums set names = 7")
        db.execute_many("update named_sums set bytes = bytes + ?", [(1,), (2,)])

    assert (seen, changed) == ([(4,)], 1)
    assert store.query("select names, bytes from named_sums") == [(7, 12)]


def test_execute_many_updates_in_order(store: Store) -> None:
    """The last of two updates of one row wins; an update of no row changes nothing."""
    create_tenant(store, Wall(), "ada")
    with store.change() as db:
        LedgerTransactions().apply(db, [Hold(name, 1, 1, "m", 1) for name in "abcd"])
        notes = [(b"1", "a"), (b"2", "b"), (b"\0\xff", "a"), (b"4", "other"), (None, "c")]
        db.execute_many("update holds set progress = ? where request_id = ?", notes)
        db.execute_many("delete from holds where request_id = ?", [("b",), ("c",), ("b",)])
    rows = store.query("select request_id, progress from holds order by 1")

    assert rows == [("a", b"\0\xff"), ("d", None)]


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_one_impossible_row_rolls_back_all(store: Store, wrong: int) -> None:
    """Also if the error comes with the commit only."""
    create_tenant(store, Wall(), "ada")
    rows = [(f"{number}", 1, 1, 1, "", 0, "", 0) for number in range(3)]
    rows[wrong] = ("x", 99, 1, 1, "", 0, "", 0)

    def change() -> None:
        with store.change() as db:
            db.execute("update tenants set name = 'bob'")
            db.execute_many(ERASURE, rows)

    with pytest.raises(ConstraintBroken, match="not changed"):
        change()
    create_tenant(store, Wall(), "eve")
    assert store.query("select name from tenants order by 1") == [("ada",), ("eve",)]


def test_reader_does_not_wait_for_writer(store: Store) -> None:
    """Authentication runs on the event loop; a commit waits for the disk."""
    create_tenant(store, Wall(), "ada")
    found: list[object] = []
    with store.change() as db:
        db.execute("update tenants set name = 'bob'")
        thread = threading.Thread(
            target=lambda: found.extend(store.query("select name from tenants"))
        )
        thread.start()
        thread.join(timeout=60)

    assert found == [("ada",)]


def test_database_refuses_to_change_or_delete_entries(store: Store) -> None:
    """Whichever program tries."""
    create_tenant(store, Wall(), "ada")
    with store.change() as db:
        db.execute(INSERT, ("a", 1))

    for sql in ("delete from ledger", "update ledger set output_tokens = 0"):
        with pytest.raises(ConstraintBroken, match="never"), store.change() as db:
            db.execute(sql)
    assert store.query("select output_tokens from ledger") == [(1,)]


def test_database_refuses_entries_whose_counts_do_not_add_up(store: Store) -> None:
    """prompt = read + write + fresh."""
    create_tenant(store, Wall(), "ada")

    with pytest.raises(ConstraintBroken, match="not changed"), store.change() as db:
        db.execute(INSERT, ("a", 2))


@pytest.mark.parametrize("table", ["tenants", "keys", "shared_scopes"])
def test_does_not_reuse_ids_of_deleted_rows(store: Store, table: str) -> None:
    """A deleted tenant's id may still be in a cache, a receipt or a log."""
    insert = {
        "tenants": "insert into tenants (name, status, created_ms) values ('bob', 'active', 0)",
        "keys": "insert into keys (tenant_id, workspace, label, digest, shown, created_ms)"
        f" values (1, 'w', 'l', {DIGEST[store.is_local]}, 's', 0)",
        "shared_scopes": "insert into shared_scopes (name, owner_id, created_ms)"
        " values ('s', 1, 0)",
    }[table]
    column = {"tenants": "tenant_id", "keys": "key_id", "shared_scopes": "scope_id"}[table]
    create_tenant(store, Wall(), "ada")
    with store.change() as db:
        ((first,),) = db.rows(f"{insert} returning {column}")
        db.execute(f"delete from {table} where {column} = ?", (first,))
        ((second,),) = db.rows(f"{insert} returning {column}")

    assert second == first + 1


DIGEST = {True: "zeroblob(32)", False: "decode(repeat('00', 32), 'hex')"}


def test_reopens_after_an_error(store: Store) -> None:
    """The committed data is there, and a file was checked."""
    create_tenant(store, Wall(), "ada")
    store.reopen()

    create_tenant(store, Wall(), "bob")
    assert store.query("select name from tenants") == [("ada",), ("bob",)]


def test_reopened_store_is_at_a_new_commit(store: Store) -> None:
    """The file may be another one by then, so a writer's memory must be read again."""
    seen: set[object] = set()
    for _ in range(9):
        with store.change() as db:
            seen.add(db.as_of)
        seen.add(db.as_of)
    store.reopen()
    with store.change() as db:
        pass

    assert store.is_local is (None not in seen)
    assert not store.is_local or db.as_of not in seen


def test_counts_its_own_commits(store: Store) -> None:
    """A cache checks the count before each use: it must not miss a commit. Commits of other stores
    do not count."""
    before = store.changes
    with store.change():
        pass
    with closing(store.open_another()) as beside, beside.change():
        pass
    with pytest.raises(StoreError), store.change() as db:
        db.execute("insert into nothing values (1)")

    assert store.changes == before + 1


def test_as_of_identifies_a_commit(store: Store) -> None:
    """It is equal if no commit came between, if it is known at all: a writer's memory is valid
    until then."""
    with closing(store.open_another()) as other:
        with store.change() as first:
            first.execute("delete from holds")
        with store.change() as second:
            seen = second.as_of
        create_tenant(other, Wall(), "ada")
        with store.change() as third:
            pass
        create_tenant(store, Wall(), "bob")
        with store.change() as fourth:
            numbers = first.as_of, second.as_of, third.as_of, fourth.as_of

    assert seen == numbers[0]
    if not store.is_local:
        assert set(numbers) == {None}
    else:
        assert len(set(numbers)) == 4
