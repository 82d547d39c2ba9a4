"""Conversations in the database: owner, order, expiry, quota and erasure."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.erasure_receipts import ErasureReceipt, write_receipt
from tenancy.accounts.tenants import create_tenant
from tenancy.responses.conversations import (
    ITEM_OVERHEAD_BYTES,
    ConversationRecord,
    ItemRecord,
    ItemsChange,
    Owner,
    append_items,
    create_conversation,
    delete_conversation,
    delete_items,
    erase_conversations,
    find_conversation,
    find_items,
    load_items,
    measure_conversation,
    measure_items,
    page_items,
    set_metadata,
    sweep_conversations,
)
from tenancy.responses.stored_responses import (
    StoredResponse,
    find_response,
    store_responses,
)
from tenancy.responses.stored_sums import NO_QUOTA, Obstacle, StorageQuota
from tenancy.storage import sqlite
from tenancy.storage.interface import Row, Store
from tenancy.storage.pieces import SWEPT_AT_ONCE
from tenancy.storage.schema import migrations
from tenancy.storage.sqlite import SqliteStore
from tests.unit.tenancy.conftest import Wall

ONE = ConversationRecord("c1", 1, "default", 1_000, 61_000, b"{}")
MINE = 1, "default"
OTHERS = ((2, "default"), (1, "other"))
HI, YES = ItemRecord("i1", b"hi"), ItemRecord("i2", b"yes")
ITEM_BYTES = 2 + ITEM_OVERHEAD_BYTES
SUMS = "select tenant_id, responses, bytes from stored_sums order by 1"
ANSWER = StoredResponse("r1", 1, "default", 2_000, 62_000, b"in", b"out")


def make(
    store: Store,
    *items: ItemRecord,
    record: ConversationRecord = ONE,
    quota: StorageQuota = NO_QUOTA,
) -> Obstacle:
    """Create a conversation; return the obstacle."""
    return create_conversation(store, record, items, quota, 10_000)


def change_of(*items: ItemRecord, now_ms: int = 2_000) -> ItemsChange:
    return ItemsChange(MINE, "c1", items, now_ms, now_ms, now_ms + 60_000)


def append(store: Store, *items: ItemRecord, now_ms: int = 2_000) -> Obstacle:
    return append_items(store, change_of(*items, now_ms=now_ms), NO_QUOTA, 10_000)


def test_conversation_is_private_and_expires(owned: Store) -> None:
    """By tenant and workspace, for every function."""
    assert make(owned, HI) == ""

    assert find_conversation(owned, MINE, "c1", 60_999) == ONE
    assert find_conversation(owned, MINE, "c1", 61_000) is None
    assert load_items(owned, MINE, "c1", 2_000, 9) == [b"hi"]
    assert find_items(owned, MINE, ["i1", "i9", "i1"], 2_000) == {"i1": b"hi"}
    assert find_items(owned, MINE, ["i1"], 61_000) == {}
    assert measure_conversation(owned, MINE, "c1", 2_000) == HI.size + len(ONE.metadata)
    assert measure_items(owned, MINE, ["i1", "i9"], 2_000) == {"i1": HI.size}
    for other in OTHERS:
        assert find_conversation(owned, other, "c1", 2_000) is None
        assert load_items(owned, other, "c1", 2_000, 9) is None
        assert find_items(owned, other, ["i1"], 2_000) == {}
        assert measure_conversation(owned, other, "c1", 2_000) is None
        assert measure_items(owned, other, ["i1"], 2_000) == {}
        assert delete_items(owned, other, "c1", ["i1"], 2_000) == 0
        assert not delete_conversation(owned, other, "c1", 2_000)
        foreign = replace(ONE, tenant_id=other[0], workspace=other[1])
        assert not set_metadata(owned, foreign, 2_000)
        change = replace(change_of(YES), owner=other)
        assert append_items(owned, change, NO_QUOTA, 10_000) == "conversation_missing"
    assert owned.query(SUMS) == [(1, 1, 2 + ITEM_BYTES)]


class Noted:
    """A store's queries, and what they asked."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.asked: list[tuple[str, Row]] = []

    def query(self, sql: str, values: Row = ()) -> list[Row]:
        """See `Store`."""
        self.asked.append((sql, values))
        return self._store.query(sql, values)


def test_an_item_of_another_owner_costs_what_a_missing_one_costs(tmp_path: Path) -> None:
    """The owner was compared in a join behind the row that was found: over hundreds of requests,
    the time told whether a leaked id exists.
    """

    def steps(item_id: str, owner: Owner) -> int:
        """Return the instructions of the database's machine that a look-up takes."""
        noted, count = Noted(store), 0

        def instruction() -> int:
            nonlocal count
            count += 1
            return 0

        find_items(cast("Store", noted), owner, [item_id], 2_000)
        with closing(sqlite3.connect(tmp_path / "t.db")) as reader:
            reader.set_progress_handler(instruction, 1)
            for sql, values in noted.asked:
                reader.execute(sql, values).fetchall()
        return count

    with closing(SqliteStore(tmp_path / "t.db")) as store:
        for name in ("ada", "bob"):
            create_tenant(store, Wall(), name)
        assert make(store, *(ItemRecord(f"i{number}", b"hi") for number in range(20))) == ""

        assert steps("i7", MINE) > steps("none", MINE)
        for other in OTHERS:
            assert steps("i7", other) == steps("none", other)


def test_a_database_from_before_items_had_owners_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The migration names the owner of each item that is there."""
    known = migrations("sqlite")
    before = next(n for n, sql in enumerate(known) if "owned_id" in sql)
    monkeypatch.setattr(sqlite, "migrations", lambda _: known[:before])
    old = SqliteStore(tmp_path / "t.db")
    create_tenant(old, Wall(), "ada")
    with closing(old), old.change() as db:
        db.execute(
            "insert into conversations (conversation_id, tenant_id, workspace, created_ms,"
            " expires_ms, positions, bytes, metadata) values ('c1', 1, 'default', 1, 9, 1, 2, x'')"
        )
        db.execute(
            "insert into conversation_items (conversation_id, position, item_id, bytes, item)"
            " values ('c1', 0, 'i1', 2, ?)",
            (b"hi",),
        )
    monkeypatch.undo()
    with closing(SqliteStore(tmp_path / "t.db")) as store:
        assert find_items(store, MINE, ["i1"], 2) == {"i1": b"hi"}
        assert find_items(store, OTHERS[1], ["i1"], 2) == {}


def test_items_are_listed_in_pages(owned: Store) -> None:
    """In either order, also after an item of the middle was deleted."""
    items = [ItemRecord(f"i{number}", b"%d" % number) for number in range(4)]
    make(owned, *items[:2])
    append(owned, *items[2:])
    assert delete_items(owned, MINE, "c1", ["i1"], 2_000) == 1
    assert append(owned, ItemRecord("i4", b"4")) == ""

    assert load_items(owned, MINE, "c1", 2_000, 9) == [b"0", b"2", b"3", b"4"]
    assert load_items(owned, MINE, "c1", 2_000, 2) == [b"0", b"2"]
    assert page_items(owned, "c1", "", 2, is_descending=True) == [b"4", b"3"]
    assert page_items(owned, "c1", "i3", 2, is_descending=True) == [b"2", b"0"]
    assert page_items(owned, "c1", "i0", 2, is_descending=False) == [b"2", b"3"]
    assert page_items(owned, "c1", "i1", 2, is_descending=False) is None


def test_change_extends_the_life(owned: Store) -> None:
    """Of the conversation, to the lifetime after the change, and never shortens it."""
    make(owned)
    append(owned, HI, now_ms=31_000)
    append(owned, YES, now_ms=2_000)

    assert find_conversation(owned, MINE, "c1", 90_999) is not None
    assert append(owned, HI, now_ms=91_000) == "conversation_missing"
    changed = replace(ONE, metadata=b'{"a":"b"}', expires_ms=99_000)
    assert set_metadata(owned, changed, 90_000)
    assert find_conversation(owned, MINE, "c1", 98_000) == changed


def test_sums_follow_every_change(owned: Store) -> None:
    make(owned, HI)
    append(owned, YES)
    set_metadata(owned, replace(ONE, metadata=b"{...}"), 2_000)
    assert owned.query(SUMS) == [(1, 1, 5 + 2 * ITEM_BYTES + 1)]

    delete_items(owned, MINE, "c1", ["i1", "i9"], 2_000)
    assert owned.query(SUMS) == [(1, 1, 5 + ITEM_BYTES + 1)]
    assert delete_conversation(owned, MINE, "c1", 2_000)
    assert owned.query(SUMS) == [(1, 0, 0)]
    assert owned.query("select 1 from conversation_items") == []


def test_quota_bounds_conversations_and_their_bytes(owned: Store) -> None:
    """The bytes of all, those of one, and the number, which responses share."""
    small = StorageQuota(9, 2 * ITEM_BYTES)
    assert make(owned, HI, quota=small) == ""
    assert append_items(owned, change_of(YES), small, 10_000) == "quota"
    assert append_items(owned, change_of(YES), NO_QUOTA, 2 * ITEM_BYTES) == "quota"
    second = replace(ONE, conversation_id="c2")
    assert make(owned, record=second, quota=StorageQuota(1, 1_000)) == "quota"
    assert store_responses(owned, [ANSWER], StorageQuota(1, 1_000), 1_000) == ["quota"]
    assert create_conversation(owned, second, [HI], NO_QUOTA, ITEM_BYTES) == "quota"

    assert owned.query(SUMS) == [(1, 1, 2 + ITEM_BYTES)]


def test_response_and_its_turn_are_stored_together(owned: Store) -> None:
    make(owned)
    turn = change_of(HI, YES)
    missing = replace(turn, conversation_id="c9")
    records = [
        replace(ANSWER, turn=turn),
        replace(ANSWER, response_id="r2", turn=missing),
        replace(ANSWER, response_id="r3", turn=change_of(ItemRecord("i3", b"3")), is_kept=False),
    ]

    found = store_responses(owned, records, NO_QUOTA, 10_000)

    assert found == ["", "conversation_missing", ""]
    assert load_items(owned, MINE, "c1", 2_000, 9) == [b"hi", b"yes", b"3"]
    kept = [find_response(owned, *MINE, name, 3_000) for name in ("r1", "r2", "r3")]
    assert kept == [b"out", None, None]
    assert owned.query(SUMS) == [(1, 2, 2 + 3 * ITEM_BYTES + 5)]


def test_response_without_room_appends_nothing(owned: Store) -> None:
    """The quota must hold for both together."""
    make(owned)
    quota = StorageQuota(9, 2 + ITEM_BYTES + 4)

    assert store_responses(owned, [replace(ANSWER, turn=change_of(HI))], quota, 999) == ["quota"]
    assert load_items(owned, MINE, "c1", 2_000, 9) == []


def test_sweep_deletes_what_has_expired(owned: Store) -> None:
    """Few rows at a time."""
    items = [ItemRecord(f"i{number}", b"x") for number in range(SWEPT_AT_ONCE + 1)]
    create_conversation(owned, ONE, items, NO_QUOTA, 10**6)
    make(owned, record=replace(ONE, conversation_id="c2", expires_ms=99_000))
    rounds = 1
    while sweep_conversations(owned, 61_000):
        rounds += 1

    assert rounds == 3
    assert owned.query("select conversation_id from conversations") == [("c2",)]
    assert owned.query(SUMS) == [(1, 1, 2)]


def test_erasure_deletes_conversations(owned: Store) -> None:
    """Of one workspace or of all, and forbids what running requests would append."""
    make(owned, HI)
    make(owned, record=replace(ONE, conversation_id="c2", workspace="other"))
    make(owned, record=replace(ONE, conversation_id="c3", created_ms=5_000))
    make(owned, record=replace(ONE, conversation_id="c4", tenant_id=2))
    erase_conversations(owned, 1, "default", 4_000)
    assert owned.query("select conversation_id from conversations order by 1") == [
        ("c2",),
        ("c3",),
        ("c4",),
    ]
    write_receipt(owned, ErasureReceipt("e", 1, 0, 6_000, "all", 0, "", 0))
    late = replace(change_of(YES, now_ms=5_500), conversation_id="c3")

    assert append_items(owned, late, NO_QUOTA, 10_000) == "erased"
    assert make(owned, record=replace(ONE, conversation_id="c5")) == "erased"


def test_deleted_tenant_leaves_none(owned: Store) -> None:
    make(owned, HI)
    delete_tenant(owned, Wall(), "ada")

    assert owned.query("select 1 from conversations") == []
    assert make(owned, record=replace(ONE, conversation_id="c2")) == "tenant_deleted"
