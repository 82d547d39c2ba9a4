"""A ledger moved from a file to a server is the same ledger."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from tenancy.accounting.audit import check_books
from tenancy.accounting.closing import close_days
from tenancy.accounting.move_to_postgres import COUNTED, TABLES, Stage, move
from tenancy.accounting.usage import usage
from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.accounts.cached_contents import (
    CachedContentQuota,
    CachedContentRecord,
    create_cached_content,
)
from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.erasure_receipts import ErasureReceipt, note_erased_until, write_receipt
from tenancy.accounts.keys import create_admin_key, create_key, rotate_key
from tenancy.accounts.shared_scopes import ScopeTerms, set_scope
from tenancy.accounts.tenants import create_tenant, write_floor_blocks_max
from tenancy.errors import StoreError
from tenancy.history.request_records import RequestRecord, write_records
from tenancy.history.samples import Sample, SampleDetails, write_samples
from tenancy.ledger.adjustments import Adjustment, adjust
from tenancy.ledger.engine_counts import EngineTotals
from tenancy.ledger.epochs import begin_ledger_epoch, ledger_epoch
from tenancy.ledger.idempotency import Claim, ReplayedResponse, ReplayRecord
from tenancy.ledger.ledger import Hold, Ledger
from tenancy.ledger.transactions import NamedEntry, StorageReading, StorageReadings
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.responses.conversations import (
    ConversationRecord,
    ItemRecord,
    create_conversation,
)
from tenancy.responses.stored_responses import StoredResponse, store_responses
from tenancy.responses.stored_sums import StorageQuota
from tenancy.storage.postgres import PostgresStore
from tenancy.storage.sqlite import SqliteStore
from tenancy.types import DAY_MS, CachePolicy, TokenCounts
from tests.actors import TESTER
from tests.unit.tenancy.conftest import Wall, used

PATIENCE_S = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "test.db"


@pytest.fixture
def file(path: Path, wall: Wall) -> Iterator[SqliteStore]:
    """A ledger with every kind of row: two days, the first one closed, two epochs, a request that
    ran when its server died, and deleted tenants with and without ledger rows."""
    with closing(SqliteStore(path)) as store:
        for name in ("ada", "bob", "gone", "left"):
            create_tenant(store, wall, name)
        delete_tenant(store, wall, "left")
        create_key(store, wall, 1, label="ünïcode 'quoted' \\n")
        rotate_key(store, wall, "1", 60_000, by=TESTER)
        add_card(store, wall, RateCard("std", input=1_000_000, cache_read=7, cache_write={"1h": 9}))
        set_budget(store, Budget(1, "day", hard_micros=10**9))
        set_scope(store, wall, ScopeTerms(name="ours", owner="ada", members=("bob",)), by=TESTER)
        create_cached_content(
            store,
            CachedContentRecord("c", 1, "lab", "m", "n", 10, 1, 1, 10**15),
            b"\0\xff",
            CachedContentQuota(),
        )
        turn = StoredResponse("r1", 1, "lab", 1, 10**15, b"[]", b"{}")
        talk = ConversationRecord("c1", 1, "lab", 1, 10**15, b"{}")
        create_conversation(store, talk, [ItemRecord("i1", b"{}")], StorageQuota(), 10**6)
        store_responses(store, [turn], StorageQuota(), 10**6)
        write_floor_blocks_max(store, 99)
        write_receipt(store, ErasureReceipt("receipt", 1, 1, 1, "all", 2, "digest", 3))
        note_erased_until(store, ["e0"], 1)
        ledger = Ledger(store, wall)
        for number in range(5):
            ledger.settle(used(f"1-{number}", wall())).result(PATIENCE_S)
        adjust(store, wall, Adjustment("x", "1-3", -9, "an outage"), by=TESTER)
        ledger.settle(replace(used("3-1", wall()), tenant_id=3)).result(PATIENCE_S)
        wall.ms += 2 * DAY_MS
        close_days(store, wall, "1970-01-02", by=TESTER)
        with store.change() as db:
            begin_ledger_epoch(db, wall(), "marked")
        ledger.hold(Hold("n", 1, 1, "m", 1, claim=Claim("n", bytes(32), 9))).result(PATIENCE_S)
        kept = ReplayRecord(10**15, 10**6, ReplayedResponse("head", b"\0body"))
        ledger.settle(NamedEntry(used("n", wall()), kept, {"e": (0, 0, -1)})).result(PATIENCE_S)
        readings = StorageReadings("e1", wall(), (StorageReading(1, "5m", 7),))
        ledger.write(readings).result(PATIENCE_S)
        totals = EngineTotals("e1", wall(), 10, 0, 1, 10, 0, 1, is_ended=True)
        ledger.write(totals).result(PATIENCE_S)
        ledger.hold(Hold("open", 1, 1, "m", wall(), 9, 9)).result(PATIENCE_S)
        ledger.note_progress({"open": TokenCounts(fresh_tokens=4, output_tokens=3)})
        ledger.settle(used("last", wall())).result(PATIENCE_S)
        ledger.close()
        delete_tenant(store, wall, "gone")
        with store.change() as db:
            db.execute("insert into request_users values ('1-0', 1, 'alice')")
            db.execute(
                "insert into webhook_deliveries (event_id, endpoint, event_type, tenant_id, body,"
                " created_ms, next_ms) values ('evt_1', 'ops', 'key.expires', 1, x'7b7d', 1, 2)"
            )
            db.execute(
                "insert into audit_log values (7, 1, 'command', 'root', '', 'tenant.create', 1,"
                " 'tenant:1', null, '{}')"
            )
            db.execute(
                "insert into written_prefixes values ('', x'01', x'02', '1h', 1, 9, '{}', null,"
                " 5, 'e1', 1, 'm', 't', x'')"
            )
            db.execute("insert into findings values (1, 0, 'm', 'c', 'p', 1, 2, 3, 4, '[]', '{}')")
            db.execute("insert into prompt_origins values ('', 1, 'm', 't', 1, '', '', '', '')")
            db.execute("insert into request_causes values ('q', 1, 'm', 'c', 'p', 1, '{}')")
        write_samples(store, [Sample(1, 60_000, SampleDetails({"overloaded": 1}, {9: 1}))])
        write_records(
            store,
            [RequestRecord("q", 1, 1, "/r", "openai", "m", False, 503, "refused", "overloaded", 1)],
        )
        yield store


def tables_of(store: SqliteStore | PostgresStore) -> dict[str, set[str]]:
    """Return the columns of each table."""
    if isinstance(store, SqliteStore):
        names = store.query("select name from sqlite_schema where type = 'table'")
        return {
            name: {row[0] for row in store.query("select name from pragma_table_info(?)", (name,))}
            for (name,) in names
            if not name.startswith("sqlite_")
        }
    found: dict[str, set[str]] = {}
    sql = "select table_name, column_name from information_schema.columns"
    for table, column in store.query(f"{sql} where table_schema = 'public'"):
        found.setdefault(str(table), set()).add(str(column))
    return found


def test_every_table_is_moved_or_counted(file: SqliteStore, postgres: PostgresStore) -> None:
    """A new table must not be forgotten; both databases have the same columns."""
    here, there = tables_of(file), tables_of(postgres)

    assert set(here) | set(there) == {*TABLES, *COUNTED}
    assert {name: here[name] for name in TABLES} == {name: there[name] for name in TABLES}
    untried = {name for name in TABLES if not file.query(f"select 1 from {name} limit 1")}
    assert untried == {"recent_sums"}, "a server that ends has moved them"


def test_moved_ledger_is_equal_and_continues(
    file: SqliteStore, postgres: PostgresStore, wall: Wall
) -> None:
    """Keys authenticate, sums and chains are right, no id is reused, and the request that ran is
    closed by its progress."""
    key = create_key(file, wall, 2)
    before = usage(file)
    done = move(file, postgres)

    assert done.rows["ledger"] == 8
    assert done.charge_pico == file.query("select sum(charge_pico) from ledger")[0][0] > 0
    assert usage(postgres) == before
    assert ledger_epoch(postgres) == ledger_epoch(file)
    assert KeyAuthenticator(postgres, wall, lambda: 0.0).authenticate(key).tenant.name == "bob"
    ledger = Ledger(postgres, wall)
    ledger.settle(used("next", wall())).result(PATIENCE_S)
    ledger.close()
    new = postgres.query("select request_id from ledger where entry_id > 8")
    assert sorted(row[0] for row in new) == ["next", "open"]
    assert create_tenant(postgres, wall, "eve").tenant_id == 5
    assert create_admin_key(postgres, wall)
    assert (
        set_scope(
            postgres, wall, ScopeTerms(name="more", owner="ada", members=("eve",)), by=TESTER
        ).scope_id
        == 2
    )
    assert adjust(postgres, wall, Adjustment("y", "next", -1, "again"), by=TESTER)
    assert check_books(postgres) == []


SIGNS = "".join(map(chr, range(1, 128))) + "ü→𝄞"
WEIGHTS = (1e-9, 1e-5, 0.0001, 1 / 3, 0.1, 1.0, 2.5, 7.0, 123_456.789, 1e6)


def test_moves_every_kind_of_value(file: SqliteStore, postgres: PostgresStore, wall: Wall) -> None:
    """Characters that end a line or a field, every form of number, and more than one page."""
    create_key(file, wall, 1, label="\\N")
    for number, weight in enumerate(WEIGHTS):
        create_tenant(file, wall, f"t{number}", CachePolicy(weight=weight))
    for number in range(3):
        content, owner = bytes(range(256)) * number, f"c{number}"
        given = CachedContentRecord(owner, 2, SIGNS, "m", "n", 10, 1, 1, 10**15)
        create_cached_content(file, given, content, CachedContentQuota())
    with file.change() as db:
        rows = [(1, hour * 3_600_000, 9, "m") for hour in range(4_001)]
        db.execute_many(
            "insert into usage_hours (tenant_id, hour_ms, key_id, model) values (?, ?, ?, ?)", rows
        )
        days = [(1, day * DAY_MS, 9, "m") for day in range(4_001 // 24 + 1)]
        db.execute_many(
            "insert into usage_days (tenant_id, day_ms, key_id, model) values (?, ?, ?, ?)", days
        )
    told: list[tuple[Stage, int, int]] = []
    done = move(file, postgres, lambda *facts: told.append(facts))

    assert done.rows["usage_hours"] > 4_001
    for table in TABLES:
        names = ", ".join(f'"{name}"' for name in sorted(tables_of(file)[table]))
        mine, theirs = (store.query(f"select {names} from {table}") for store in (file, postgres))
        assert sorted(mine, key=repr) == sorted(theirs, key=repr)
    parts = {stage: (done, total) for stage, done, total in told}
    all_rows = (sum(done.rows.values()),) * 2
    assert parts == {"checked": (8, 8), "written": all_rows, "read back": all_rows}


def test_killed_move_can_run_again(file: SqliteStore, postgres: PostgresStore) -> None:
    """Before its commit it never happened; after it there is nothing to do."""

    def killed(stage: Stage, done: int, total: int) -> None:
        if stage == "read back":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        move(file, postgres, killed)
    left = [name for name in TABLES if postgres.query(f"select 1 from {name} limit 1")]
    first, second = move(file, postgres), move(file, postgres)

    assert left == ["ledger_epochs"]
    assert (first.was_there, second.was_there) == (False, True)
    assert first.rows == second.rows
    assert (first.charge_pico, first.chain) == (second.charge_pico, second.chain)


def test_compares_outside_a_write_transaction(
    file: SqliteStore, postgres: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading millions of rows from the file would time out an idle write transaction."""

    def refuse() -> None:
        raise AssertionError("nothing is written")

    move(file, postgres)
    monkeypatch.setattr(postgres, "change", refuse)

    assert move(file, postgres).was_there


def test_refuses_a_target_with_another_ledger(
    file: SqliteStore, postgres: PostgresStore, wall: Wall
) -> None:
    create_tenant(postgres, wall, "somebody")
    with pytest.raises(StoreError, match=r"differs from this ledger: .*: tenants") as caught:
        move(file, postgres)

    assert caught.value.code == "target_not_empty"
    assert postgres.query("select name from tenants") == [("somebody",)]


def test_refuses_to_move_beside_a_running_server(
    path: Path, file: SqliteStore, postgres: PostgresStore
) -> None:
    """Its later entries would be lost."""
    with closing(SqliteStore(path)) as server:
        server.claim()
        with pytest.raises(StoreError) as caught:
            move(file, postgres)

    assert caught.value.code == "in_use"
    assert postgres.query("select 1 from tenants") == []


def test_refuses_to_move_damaged_books(
    path: Path, file: SqliteStore, postgres: PostgresStore, wall: Wall
) -> None:
    """A broken chain would be broken there too."""
    with closing(sqlite3.connect(path)) as db:
        db.execute("update usage_hours set output_tokens = output_tokens + 1")
        db.commit()
    with pytest.raises(StoreError, match=r"Ledger is damaged: .*output_tokens") as caught:
        move(file, postgres)

    assert caught.value.code == "damaged"
    assert postgres.query("select 1 from tenants") == []


def test_detects_rows_that_the_server_changed(file: SqliteStore, postgres: PostgresStore) -> None:
    """By a rule in the database or a bug of ours: every row is read back."""
    with postgres.change() as db:
        db.execute(
            "create function spoil() returns trigger language plpgsql as"
            " $$ begin new.tokens = 1; return new; end $$"
        )
        when = "before insert on cached_contents for each row"
        db.execute(f"create trigger spoil {when} execute function spoil()")
    with pytest.raises(StoreError, match=r"after the move: .*: cached_contents"):
        move(file, postgres)

    assert postgres.query("select 1 from tenants") == []
