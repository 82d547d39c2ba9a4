"""A store on a server: what it requires, how it differs from a file, and lost connections."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tenancy.accounting.audit import check_books
from tenancy.accounts.tenants import create_tenant, list_tenants
from tenancy.errors import (
    BudgetExceeded,
    ConstraintBroken,
    LedgerUnavailable,
    StoreBusy,
    StoreError,
    TryAgain,
)
from tenancy.ledger.idempotency import Claim, ReplayedResponse, ReplayRecord
from tenancy.ledger.ledger import Hold, Ledger
from tenancy.ledger.transactions import Item, LedgerTransactions, NamedEntry
from tenancy.pricing.budgets import Budget, budget_states, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage import postgres as postgres_store
from tenancy.storage.postgres import WRITE_LOCK, PostgresStore
from tenancy.storage.postgres_connection import PostgresConnection
from tenancy.storage.schema import migrations
from tenancy.storage.sqlite import SqliteStore
from tests.crash.ledger_child import entry, furnish, hold
from tests.crash.wire_cut import Where, Wire
from tests.unit.tenancy.conftest import Wall, used
from tests.unit.tenancy.ledger.written import holds
from tests.unit.tenancy.storage.postgres_server import Server

PATIENCE_S = 60.0


@pytest.fixture
def connection(postgres: PostgresStore, postgres_server: Server) -> Iterator[PostgresConnection]:
    """Another client of the same database."""
    ((name,),) = postgres.query("select current_database()")
    connection = PostgresConnection(postgres_server.address(name), {}, 20.0)
    yield connection
    connection.close()


@pytest.fixture
def cuttable(
    postgres: PostgresStore, postgres_server: Server
) -> Iterator[tuple[Wire, PostgresStore]]:
    """A store over a connection that a test can cut."""
    ((name,),) = postgres.query("select current_database()")
    cuttable = Wire(postgres_server.folder)
    store = PostgresStore(cuttable.address(name))
    yield cuttable, store
    store.close()
    cuttable.close()


def until(connection: PostgresConnection, question: str) -> None:
    """Wait until the server has read its settings."""
    pause = threading.Event()
    while connection.rows(question) != [(True,)]:
        pause.wait(0.01)


# --- opening -------------------------------------------------------------------------------------


def test_both_databases_have_the_same_tables(postgres: PostgresStore, tmp_path: Path) -> None:
    """Statements are written once for both; only the server's own bookkeeping differs."""
    SqliteStore(tmp_path / "t.db").close()
    with closing(sqlite3.connect(tmp_path / "t.db")) as file:
        tables = file.execute("select name from sqlite_master where type = 'table'").fetchall()
        mine = {
            (table, column[1], bool(column[3]) or bool(column[5]))
            for (table,) in tables
            if not table.startswith("sqlite_")
            for column in file.execute(f"pragma table_info({table})")
        }
    rows = postgres.query(
        "select table_name, column_name, is_nullable = 'NO' from information_schema.columns"
        " where table_schema = 'public'"
    )
    own = {"trunkline_version", "writers"}

    assert {row for row in rows if row[0] not in own} == mine


@pytest.mark.parametrize(
    "table", ["ledger", "rate_cards", "adjustments", "closes", "seals", "ledger_epochs"]
)
def test_database_guards_permanent_tables(postgres: PostgresStore, table: str) -> None:
    """Whichever program tries, also against truncation."""
    guards = postgres.query(
        "select count(*) from information_schema.triggers where event_object_table = ?"
        " and event_manipulation in ('DELETE', 'UPDATE')",
        (table,),
    )

    assert guards == [(2,)]
    with pytest.raises(ConstraintBroken, match=r"stay|never"), postgres.change() as db:
        db.execute(f"truncate {table} cascade")


def test_migrates_database_of_an_older_version(
    postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later migration runs once, and keeps the data."""
    address = postgres_server.address(postgres_server.database())
    first = PostgresStore(address)
    create_tenant(first, Wall(), "ada")
    first.close()
    motto = "alter table tenants add column motto text not null default 'none'"
    later = [*migrations("postgres"), motto]
    monkeypatch.setattr(postgres_store, "migrations", lambda _: later)
    PostgresStore(address).close()
    second = PostgresStore(address)
    found = second.query("select name, motto from tenants")
    version = second.query("select version from trunkline_version")
    second.close()

    assert (found, version) == ([("ada", "none")], [(len(later),)])


def test_a_migration_may_take_longer_than_other_changes(
    postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may build an index over the entries of years: cut short, it would never end."""
    monkeypatch.setattr(postgres_store, "STATEMENT_S", 0.01)
    later = [*migrations("postgres"), "select pg_sleep(0.1)"]
    monkeypatch.setattr(postgres_store, "migrations", lambda _: later)
    with closing(PostgresStore(postgres_server.address(postgres_server.database()))) as store:
        version = store.query("select version from trunkline_version")

    assert version == [(len(later),)]


def test_concurrent_starts_make_one_schema(postgres_server: Server) -> None:
    """Several gateways are started together."""
    address = postgres_server.address(postgres_server.database(is_empty=True))
    stores: list[PostgresStore] = []
    threads = [
        threading.Thread(target=lambda: stores.append(PostgresStore(address))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for store in stores:
        store.close()

    assert len(stores) == 4


@pytest.mark.parametrize(
    ("made", "code"),
    [
        ("create table songs (name text)", "not_ours"),
        ("create table trunkline_schema as select 18 as version", "unreleased_schema"),
    ],
    ids=["of another program", "from before the first release"],
)
def test_refuses_tables_of_others(postgres_server: Server, made: str, code: str) -> None:
    """A mistyped name must not create tables in it, and the schemas before the first release had
    other numbers; no check of a database calls it empty."""
    address = postgres_server.address(postgres_server.database(is_empty=True))
    with closing(PostgresConnection(address, {}, 20.0)) as connection:
        connection.execute(made)

    with pytest.raises(StoreError) as caught:
        PostgresStore(address)
    with (
        closing(PostgresStore(address, is_ready=True)) as store,
        pytest.raises(StoreError) as checked,
    ):
        store.is_empty()
    assert caught.value.code == checked.value.code == code


def test_refuses_database_of_a_newer_version(
    postgres: PostgresStore, connection: PostgresConnection
) -> None:
    """Writing to an unknown schema would damage it."""
    connection.execute("update trunkline_version set version = 999")

    with pytest.raises(StoreError) as caught:
        postgres.reopen()
    assert caught.value.code == "newer_schema"


def test_unreachable_server_is_reported_at_once(tmp_path: Path) -> None:
    """With its address and without a password; a start does not retry."""
    cuttable = Wire(tmp_path)
    address = structs.replace(cuttable.address("books"), password="secret")
    cuttable.close()

    with pytest.raises(StoreError, match=r"books at .* cannot be reached") as caught:
        PostgresStore(address)
    assert "secret" not in caught.value.message


def test_refuses_a_pooler(cuttable: tuple[Wire, PostgresStore]) -> None:
    """A pooler that shares a session among clients would share the locks that identify writers. Its
    session numbers differ from the server's, and most poolers refuse the session's settings."""
    way, store = cuttable
    way.is_pooler = True
    with pytest.raises(StoreError, match="connect to the server itself") as lent:
        store.reopen()
    fields = b"SFATAL\0C08P01\0Munsupported startup parameter: jit\0\0"
    way.refusal = b"E" + (len(fields) + 4).to_bytes(4, "big") + fields
    with pytest.raises(StoreError, match=r"parameter: jit.* connect to the") as said:
        store.reopen()
    way.is_pooler, way.refusal = False, b""
    store.reopen()

    assert (lent.value.code, said.value.code) == ("pooled", "unusable")


def test_refuses_a_server_that_may_lose_commits(
    postgres: PostgresStore, connection: PostgresConnection
) -> None:
    """`fsync` off is fine for a test's data, and not for a ledger; a database's own
    `synchronous_commit` is overridden."""
    connection.execute("alter system set fsync = off")
    connection.execute("select pg_reload_conf()")
    try:
        until(connection, "select current_setting('fsync') = 'off'")
        with pytest.raises(StoreError) as caught:
            postgres.reopen()
    finally:
        connection.execute("alter system reset fsync")
        connection.execute("select pg_reload_conf()")
        until(connection, "select current_setting('fsync') = 'on'")
    ((name,),) = postgres.query("select current_database()")
    connection.execute(f"alter database {name} set synchronous_commit = off")
    other = postgres.open_another()
    with other.change() as db:
        commit = db.rows("show synchronous_commit")
    other.close()

    assert caught.value.code == "not_durable"
    assert commit == [("on",)]


def test_queries_by_key_use_an_index(postgres: PostgresStore) -> None:
    """A plan is kept from when the ledger was small; a plan that scans would take ever longer,
    unnoticed until the ledger has thousands of entries."""
    with postgres.change() as db:
        looked_up, joined = (
            "".join(line for (line,) in db.rows(f"explain (costs off) {statement}"))
            for statement in (
                "select 1 from holds where request_id = 'a'",
                "delete from holds using (values ('a'), ('b')) as given (request_id)"
                " where holds.request_id = given.request_id",
            )
        )
        jit = db.rows("show jit")

    assert "Index" in looked_up
    assert "Index Scan using holds_pkey" in joined
    assert jit == [("off",)]


@pytest.mark.parametrize("state", ["58030", "53100", "XX001", "XX002"])
def test_connection_survives_a_servers_disk_error(
    postgres: PostgresStore, connection: PostgresConnection, state: str
) -> None:
    """The server reports it per statement; its session and this connection are still usable."""
    connection.execute(
        "create function read_wrong() returns bigint language plpgsql as $$ begin"
        f" raise exception 'could not read block' using errcode = '{state}'; end $$"
    )

    with pytest.raises(StoreError, match="could not read"):
        postgres.query("select read_wrong()")
    with pytest.raises(StoreError, match="could not read"), postgres.change() as db:
        db.execute("insert into tenants (name, created_ms) values ('eve', read_wrong())")
    create_tenant(postgres, Wall(), "ada")
    assert postgres.query("select name from tenants") == [("ada",)]


TRIPS = {"rows": 1, "execute": 1, "execute_many": 1, "copy_rows": 2, "commit": 1}


def test_batch_takes_few_round_trips(
    postgres: PostgresStore, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs the network's latency while other gateways wait: one per kind of row read or
    written, and one more to insert many rows of a kind."""
    create_tenant(postgres, wall, "ada")
    trips: list[int] = []
    for name, cost in TRIPS.items():
        monkeypatch.setattr(
            PostgresConnection, name, counted(getattr(PostgresConnection, name), trips, cost)
        )
    books = LedgerTransactions()
    found: list[int] = []
    for size in (1, 1, 100):
        ids = [f"{len(found)}-{number}" for number in range(size)]
        claims = [Claim(name, bytes(32), 999) for name in ids]
        kept = ReplayRecord(2_000_000, 10_000, ReplayedResponse("head", b"body"))
        batches: list[list[Item]] = [
            [Hold(name, 1, 1, "m", wall()) for name in ids],
            [used(name, wall()) for name in ids],
            [Hold(f"n{one.name}", 1, 1, "m", wall(), claim=one) for one in claims],
            [NamedEntry(used(f"n{name}", wall()), kept) for name in ids],
        ]
        for batch in batches:
            trips.clear()
            with postgres.change() as db:
                books.apply(db, batch)
            found.append(sum(trips))

    assert found[4:8] == [5, 7, 9, 11]
    assert found[8:] == [6, 8, 12, 12]
    assert postgres.query("select count(*) from ledger") == [(204,)]


def counted(call: Callable[..., object], trips: list[int], cost: int) -> Callable[..., object]:
    """Run and count round trips; COPY comes by `execute_many`, too."""

    def noting(*args: object) -> object:
        trips.append(cost)
        return call(*args)

    return noting


# --- several servers -----------------------------------------------------------------------------


def test_start_closes_only_holds_of_dead_writers(postgres: PostgresStore, wall: Wall) -> None:
    """Another gateway's requests still run; a dead gateway's holds are closed, and cost nothing."""
    create_tenant(postgres, wall, "ada")
    dead, beside, third = (postgres.open_another() for _ in range(3))
    living = Ledger(postgres, wall)
    living.hold(hold("0-1")).result(PATIENCE_S)
    gone = Ledger(dead, wall)
    gone.hold(hold("0-2")).result(PATIENCE_S)
    early = Ledger(beside, wall)
    dead.close()
    late = Ledger(third, wall)
    for ledger in (late, early, gone, living):
        ledger.close()
    for store in (third, beside):
        store.close()

    assert (early.interrupted, late.interrupted) == (0, 1)
    assert postgres.query("select request_id from holds") == [("0-1",)]
    assert postgres.query("select request_id, ending from ledger") == [("0-2", "interrupted")]


def test_released_writer_is_gone_while_its_session_ends(
    postgres: PostgresStore, connection: PostgresConnection
) -> None:
    """A server ends a session some time after its client has closed it: the next start must not
    take the holds for another writer's."""
    left = postgres.open_another()
    writer_id = left.claim()
    left.release_claim()
    connection.execute(f"select pg_advisory_lock({postgres_store.WRITERS}, {writer_id})")

    assert postgres.is_writer_gone(writer_id)
    left.close()


def test_gateways_share_a_budget(postgres: PostgresStore, wall: Wall) -> None:
    """Both reserve the last dollar; only what fits is admitted."""
    tenant = create_tenant(postgres, wall, "ada")
    add_card(postgres, wall, RateCard("std", output=10**6))
    set_budget(postgres, Budget(tenant.tenant_id, "day", hard_micros=500))
    beside = postgres.open_another()
    ledgers = [Ledger(postgres, wall), Ledger(beside, wall)]
    futures = [
        ledger.hold(Hold(f"{name}-{number}", tenant.tenant_id, 1, "m", wall(), 0, 10))
        for number in range(80)
        for name, ledger in enumerate(ledgers)
    ]
    outcomes = [future.exception(PATIENCE_S) for future in futures]
    for ledger in ledgers:
        ledger.close()
    beside.close()
    (state,) = budget_states(postgres, wall)

    assert outcomes.count(None) == 50
    assert sum(isinstance(one, BudgetExceeded) for one in outcomes) == 110
    assert state.reserved_pico == 500 * 10**6
    assert check_books(postgres) == []


def test_gateways_write_one_chain(postgres: PostgresStore, wall: Wall) -> None:
    """Concurrently, entry by entry; then every sum is right."""
    furnish(postgres)
    beside = postgres.open_another()
    ledgers = [Ledger(postgres, wall), Ledger(beside, wall)]
    futures = [
        ledger.settle(entry(f"{name}-{number}"))
        for number in range(150)
        for name, ledger in enumerate(ledgers)
    ]
    for future in futures:
        future.result(PATIENCE_S)
    for ledger in ledgers:
        ledger.close()
    beside.close()

    assert postgres.query("select count(*) from ledger") == [(300,)]
    assert check_books(postgres) == []


def test_busy_behind_another_writer(
    postgres: PostgresStore, connection: PostgresConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After five seconds, shortened here."""
    monkeypatch.setattr(postgres_store, "LOCK_WAIT", "50ms")
    connection.execute(f"begin; select pg_advisory_xact_lock({WRITE_LOCK})")
    with pytest.raises(StoreBusy, match="not changed"):
        create_tenant(postgres, Wall(), "ada")
    connection.execute("rollback")
    create_tenant(postgres, Wall(), "ada")

    assert len(list_tenants(postgres)) == 1


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["before", "after", "hung"])
def test_finds_outcome_of_unanswered_commit(
    cuttable: tuple[Wire, PostgresStore], wall: Wall, where: Where
) -> None:
    """The commit was made or not, and the caller learns which."""
    way, store = cuttable
    furnish(store)
    ledger = Ledger(store, wall)
    for number in range(6):
        way.cuts.append(where)
        ledger.hold(hold(f"0-{number}")).result(PATIENCE_S)
        way.cuts.append(where)
        ledger.settle(entry(f"0-{number}")).result(PATIENCE_S)
    held = holds(store)
    ledger.close()

    assert (held, way.cuts) == (0, [])
    assert store.query("select count(*), count(distinct request_id) from ledger") == [(6, 6)]
    assert check_books(store) == []


@pytest.mark.parametrize(("where", "error"), [("before", TryAgain), ("after", None)])
def test_change_with_a_lost_answer_reports_its_true_outcome(
    cuttable: tuple[Wire, PostgresStore], where: Where, error: type[StoreError] | None
) -> None:
    """A tenant is created once: no error may mean success."""
    way, store = cuttable
    create_tenant(store, Wall(), "ada")
    way.cuts.append(where)
    if error is None:
        create_tenant(store, Wall(), "bob")
    else:
        with pytest.raises(error, match="not changed"):
            create_tenant(store, Wall(), "bob")

    assert len(list_tenants(store)) == (2 if error is None else 1)


@pytest.mark.parametrize("where", ["before", "after"])
def test_unknown_outcome_is_refused_and_repaired_later(
    cuttable: tuple[Wire, PostgresStore], wall: Wall, monkeypatch: pytest.MonkeyPatch, where: Where
) -> None:
    """The server stays away: the request is refused. A hold that was written all the same is closed
    when the server is back, and reserves nothing."""
    monkeypatch.setattr(postgres_store, "RECONNECT_S", 0.1)
    way, store = cuttable
    furnish(store)
    ledger = Ledger(store, wall)
    ledger.hold(hold("0-1")).result(PATIENCE_S)
    way.cuts.append(where)
    way.is_away = True
    with pytest.raises(LedgerUnavailable) as caught:
        ledger.hold(hold("0-2")).result(PATIENCE_S)
    way.is_away = False
    ledger.settle(entry("0-1")).result(PATIENCE_S)
    held = holds(store)
    ledger.close()
    endings: dict[str, str] = dict(store.query("select request_id, ending from ledger"))

    assert (caught.value.code, held) == ("not_durable", 0)
    expected = {"0-1": entry("0-1").ending}
    assert endings == expected | ({"0-2": "interrupted"} if where == "after" else {})
    assert check_books(store) == []


def test_reconnects_after_an_idle_disconnect(
    postgres: PostgresStore, connection: PostgresConnection
) -> None:
    """A server restarts, a firewall drops the connection: the next query and the next change
    succeed."""
    create_tenant(postgres, Wall(), "ada")
    list_tenants(postgres)
    connection.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where pid <> pg_backend_pid() and datname = current_database()"
    )

    assert len(list_tenants(postgres)) == 1
    create_tenant(postgres, Wall(), "bob")
    assert len(list_tenants(postgres)) == 2


def test_closes_a_writer_that_was_lost_behind_an_answer(
    postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver saw the end of the session; the connection's loop and sockets are still open."""
    opened: list[RecordedConnection] = []

    class RecordedConnection(PostgresConnection):
        was_lost = is_closed = False

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            opened.append(self)

        @property
        def is_lost(self) -> bool:
            return self.was_lost or super().is_lost

        def close(self) -> None:
            self.is_closed = True
            super().close()

    monkeypatch.setattr(postgres_store, "PostgresConnection", RecordedConnection)
    address = postgres_server.address(postgres_server.database())
    with closing(PostgresStore(address)) as store:
        with store.change() as db:
            db.execute("select 1")
        (writer,) = (one for one in opened if not one.is_closed)
        writer.was_lost = True
        with store.change() as db:
            db.execute("select 1")

        assert writer.is_closed


def test_notices_a_replaced_database(
    postgres: PostgresStore, connection: PostgresConnection
) -> None:
    """A backup restored under a running gateway does not have its holds."""
    create_tenant(postgres, Wall(), "ada")
    connection.execute("delete from writers")

    with pytest.raises(StoreError) as caught:
        create_tenant(postgres, Wall(), "bob")
    assert caught.value.code == "replaced"
