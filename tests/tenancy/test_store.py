"""What every store does, whichever database is under it."""

from __future__ import annotations

import threading

import pytest

from tenancy.errors import BadName, ConstraintBroken
from tenancy.registry import create_tenant
from tenancy.store import Store
from tests.tenancy.conftest import Wall

INSERT = (
    "insert into ledger (request_id, tenant_id, key_id, model, ending, started_ms, ended_ms,"
    " prompt_tokens, cache_read_tokens, cache_write_tokens, fresh_tokens, output_tokens,"
    " physical_cached_tokens) values (?, 1, 1, 'm', 'done', 0, 0, 1, 0, 0, ?, 1, 0)"
)


def test_what_fails_inside_a_transaction_leaves_nothing(store: Store) -> None:
    """Half a change is worse than none."""

    def half() -> None:
        with store.change() as db:
            db.execute("insert into tenants (name, status, created_ms) values ('ada', 'active', 0)")
            raise BadName("any", "any")

    with pytest.raises(BadName):
        half()
    assert store.query("select * from tenants") == []


def test_a_reader_does_not_wait_for_a_writer(store: Store) -> None:
    """Authentication happens on the event loop; a commit waits for the disk."""
    create_tenant(store, Wall(), "ada")
    found: list[object] = []
    with store.change() as db:
        db.execute("update tenants set name = 'bob'")
        thread = threading.Thread(
            target=lambda: found.extend(store.query("select name from tenants"))
        )
        thread.start()
        thread.join(timeout=10)

    assert found == [("ada",)]


def test_entries_cannot_be_changed_or_deleted(store: Store) -> None:
    """The database itself says no, whatever program asks."""
    create_tenant(store, Wall(), "ada")
    with store.change() as db:
        db.execute(INSERT, ("a", 1))

    for sql in ("delete from ledger", "update ledger set output_tokens = 0"):
        with pytest.raises(ConstraintBroken, match="never"), store.change() as db:
            db.execute(sql)
    assert store.query("select output_tokens from ledger") == [(1,)]


def test_counts_that_do_not_add_up_are_no_entry(store: Store) -> None:
    """prompt = read + write + fresh, for ever and in the schema."""
    create_tenant(store, Wall(), "ada")

    with pytest.raises(ConstraintBroken, match="not changed"), store.change() as db:
        db.execute(INSERT, ("a", 2))


def test_a_store_opens_again_after_an_error(store: Store) -> None:
    """What the disk kept is there, and the file was checked."""
    create_tenant(store, Wall(), "ada")
    store.reopen()

    create_tenant(store, Wall(), "bob")
    assert store.query("select name from tenants") == [("ada",), ("bob",)]
