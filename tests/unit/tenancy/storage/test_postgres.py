"""A store on a server: what it demands, what is as in a file, and what happens when wires break."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

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
from tenancy.ledger.idempotency import Claim, ReplayRecord, StoredResponse
from tenancy.ledger.ledger import Hold, Ledger
from tenancy.ledger.transactions import Item, LedgerTransactions, NamedEntry
from tenancy.pricing.budgets import Budget, budget_states, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage import postgres as postgres_store
from tenancy.storage.postgres import WRITE_LOCK, PostgresStore, migrations
from tenancy.storage.postgres_connection import PostgresConnection
from tenancy.storage.sqlite import SqliteStore
from tests.crash.ledger_child import entry, furnish, hold
from tests.crash.wire_cut import Where, Wire
from tests.unit.tenancy.conftest import Wall, used
from tests.unit.tenancy.storage.postgres_server import Server

PATIENCE_S = 60.0


@pytest.fixture
def connection(postgres: PostgresStore, postgres_server: Server) -> Iterator[PostgresConnection]:
    """Somebody else, on the same database."""
    ((name,),) = postgres.query("select current_database()")
    connection = PostgresConnection(postgres_server.address(name), {}, 20.0)
    yield connection
    connection.close()


@pytest.fixture
def wire(postgres: PostgresStore, postgres_server: Server) -> Iterator[tuple[Wire, PostgresStore]]:
    """A store by a way that can be cut."""
    ((name,),) = postgres.query("select current_database()")
    wire = Wire(postgres_server.folder)
    store = PostgresStore(wire.address(name))
    yield wire, store
    store.close()
    wire.close()


def until(connection: PostgresConnection, question: str) -> None:
    """The server reads its settings when it comes to it."""
    pause = threading.Event()
    while connection.rows(question) != [(True,)]:
        pause.wait(0.01)


# --- opening -------------------------------------------------------------------------------------


def test_both_kinds_have_the_same_tables(postgres: PostgresStore, tmp_path: Path) -> None:
    """Statements are written once for both; only the server's own books are its own."""
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
    own = {"trunkline_schema", "writers"}

    assert {row for row in rows if row[0] not in own} == mine


@pytest.mark.parametrize(
    "table", ["ledger", "rate_cards", "adjustments", "closes", "seals", "ledger_epochs"]
)
@pytest.mark.parametrize("verb", ["delete from", "truncate", "update"])
def test_what_stays_is_guarded_by_the_database_itself(
    postgres: PostgresStore, wall: Wall, table: str, verb: str
) -> None:
    """Whatever program asks, emptying a table at once too."""
    guards = postgres.query(
        "select count(*) from information_schema.triggers where event_object_table = ?"
        " and event_manipulation in ('DELETE', 'UPDATE')",
        (table,),
    )
    if verb == "truncate":
        with pytest.raises(ConstraintBroken, match=r"stay|never"), postgres.change() as db:
            db.execute(f"truncate {table} cascade")

    assert guards == [(2,)]


def test_a_second_start_finds_what_the_first_left(postgres_server: Server) -> None:
    """Migrations run once."""
    address = postgres_server.address(postgres_server.database(is_empty=True))
    first = PostgresStore(address)
    create_tenant(first, Wall(), "ada")
    first.close()
    second = PostgresStore(address)
    names = second.query("select name from tenants")
    version = second.query("select version from trunkline_schema")
    second.close()

    assert (names, version) == ([("ada",)], [(len(migrations()),)])


def test_a_database_of_an_older_version_is_brought_up_to_date(
    postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later migration runs once, and keeps the data."""
    address = postgres_server.address(postgres_server.database())
    first = PostgresStore(address)
    create_tenant(first, Wall(), "ada")
    first.close()
    later = [*migrations(), "alter table tenants add column motto text not null default 'none'"]
    monkeypatch.setattr(postgres_store, "migrations", lambda: later)
    PostgresStore(address).close()
    second = PostgresStore(address)
    found = second.query("select name, motto from tenants")
    version = second.query("select version from trunkline_schema")
    second.close()

    assert (found, version) == ([("ada", "none")], [(2,)])


def test_two_starts_at_once_make_one_schema(postgres_server: Server) -> None:
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


def test_another_programs_database_is_left_alone(postgres_server: Server) -> None:
    """A name typed wrong must not put our tables into somebody's database."""
    address = postgres_server.address(postgres_server.database(is_empty=True))
    with closing(PostgresConnection(address, {}, 20.0)) as connection:
        connection.execute("create table songs (name text)")

    with pytest.raises(StoreError) as caught:
        PostgresStore(address)
    assert caught.value.code == "not_ours"


def test_a_database_of_a_newer_version_is_refused(
    postgres: PostgresStore, connection: PostgresConnection
) -> None:
    """Writing to a schema one does not know would damage it."""
    connection.execute("update trunkline_schema set version = 999")

    with pytest.raises(StoreError) as caught:
        postgres.reopen()
    assert caught.value.code == "newer_schema"


def test_a_server_that_is_not_there_is_named_at_once(tmp_path: Path) -> None:
    """With the place, and no password; a start does not wait for it."""
    wire = Wire(tmp_path)
    address = structs.replace(wire.address("books"), password="secret")
    wire.close()

    with pytest.raises(StoreError, match=r"books at .* cannot be reached") as caught:
        PostgresStore(address)
    assert "secret" not in caught.value.message


def test_a_pooler_in_between_is_refused(wire: tuple[Wire, PostgresStore]) -> None:
    """One that lends a session to many would lend the locks that writers are known by. It gives its
    own numbers to sessions; most do not know our settings, and say so."""
    way, store = wire
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


def test_a_server_that_may_lose_what_it_confirmed_is_refused(
    postgres: PostgresStore, connection: PostgresConnection
) -> None:
    """`fsync` off is fine for a test's data, not for a ledger; what a database says of
    `synchronous_commit` is overruled."""
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
    other = postgres.another()
    with other.change() as db:
        commit = db.rows("show synchronous_commit")
    other.close()

    assert caught.value.code == "not_durable"
    assert commit == [("on",)]


def test_what_is_asked_by_key_is_looked_up_however_tables_grow(postgres: PostgresStore) -> None:
    """A plan is kept from when the ledger was small: one that scans would take ever longer, and
    nobody would see it before there are thousands of entries."""
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
def test_what_the_servers_disk_failed_once_may_be_asked_again(
    postgres: PostgresStore, connection: PostgresConnection, state: str
) -> None:
    """It has to say it of each statement: a session is none the worse for it, as is ours."""
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


def test_a_batch_is_few_round_trips_however_large(
    postgres: PostgresStore, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs as much as the way is long, and other gateways wait meanwhile: one for each kind
    of row that is read or written, and one more where many rows of a kind are inserted."""
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
        kept = ReplayRecord(2_000_000, 10_000, StoredResponse("head", b"body"))
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
    """The same, with its round trips noted; rows that COPY takes come by `execute_many` too."""

    def noting(*args: object) -> object:
        trips.append(cost)
        return call(*args)

    return noting


# --- several servers -----------------------------------------------------------------------------


def test_a_start_leaves_the_holds_of_those_who_live(postgres: PostgresStore, wall: Wall) -> None:
    """Another gateway's requests run; a dead one's are closed, and cost nothing."""
    create_tenant(postgres, wall, "ada")
    dead, beside, third = (postgres.another() for _ in range(3))
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


def test_who_took_leave_is_gone_although_its_session_lingers(
    postgres: PostgresStore, connection: PostgresConnection
) -> None:
    """A server ends a session some time after its client has closed it: the next start must not
    take the holds for another's."""
    left = postgres.another()
    writer_id = left.claim()
    left.disclaim()
    connection.execute(f"select pg_advisory_lock({postgres_store.WRITERS}, {writer_id})")

    assert postgres.is_over(writer_id)
    left.close()


def test_a_budget_is_a_wall_for_two_servers(postgres: PostgresStore, wall: Wall) -> None:
    """Both reach for the last dollar; what fits is admitted, and no more."""
    tenant = create_tenant(postgres, wall, "ada")
    add_card(postgres, wall, RateCard("std", output=10**6))
    set_budget(postgres, Budget(tenant.tenant_id, "day", hard_micros=500))
    beside = postgres.another()
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


def test_two_servers_write_one_chain(postgres: PostgresStore, wall: Wall) -> None:
    """At once, entry by entry; then every sum is right."""
    furnish(postgres)
    beside = postgres.another()
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


def test_behind_another_writer_it_is_busy(
    postgres: PostgresStore, connection: PostgresConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After five seconds, or what stands for them here."""
    monkeypatch.setattr(postgres_store, "LOCK_WAIT", "50ms")
    connection.execute(f"begin; select pg_advisory_xact_lock({WRITE_LOCK})")
    with pytest.raises(StoreBusy, match="not changed"):
        create_tenant(postgres, Wall(), "ada")
    connection.execute("rollback")
    create_tenant(postgres, Wall(), "ada")

    assert len(list_tenants(postgres)) == 1


# --- what breaks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["before", "after", "hung"])
def test_a_commit_without_an_answer_is_found_out(
    wire: tuple[Wire, PostgresStore], wall: Wall, where: Where
) -> None:
    """It was made or it was not, and whoever asked is told what is true."""
    way, store = wire
    furnish(store)
    ledger = Ledger(store, wall)
    for number in range(6):
        way.cuts.append(where)
        ledger.hold(hold(f"0-{number}")).result(PATIENCE_S)
        way.cuts.append(where)
        ledger.settle(entry(f"0-{number}")).result(PATIENCE_S)
    held = ledger.open_holds()
    ledger.close()

    assert (held, way.cuts) == (0, [])
    assert store.query("select count(*), count(distinct request_id) from ledger") == [(6, 6)]
    assert check_books(store) == []


@pytest.mark.parametrize(("where", "error"), [("before", TryAgain), ("after", None)])
def test_a_change_that_lost_its_answer_is_told_as_it_is(
    wire: tuple[Wire, PostgresStore], where: Where, error: type[StoreError] | None
) -> None:
    """A tenant is made once: nothing says no that means yes."""
    way, store = wire
    create_tenant(store, Wall(), "ada")
    way.cuts.append(where)
    if error is None:
        create_tenant(store, Wall(), "bob")
    else:
        with pytest.raises(error, match="not changed"):
            create_tenant(store, Wall(), "bob")

    assert len(list_tenants(store)) == (2 if error is None else 1)


@pytest.mark.parametrize("where", ["before", "after"])
def test_while_nobody_knows_nothing_is_promised_and_later_it_is_put_right(
    wire: tuple[Wire, PostgresStore], wall: Wall, monkeypatch: pytest.MonkeyPatch, where: Where
) -> None:
    """The server stays away: the client is refused; a hold that was written all the same is closed
    when it is back, and reserves nothing."""
    monkeypatch.setattr(postgres_store, "PATIENCE_S", 0.1)
    way, store = wire
    furnish(store)
    ledger = Ledger(store, wall)
    ledger.hold(hold("0-1")).result(PATIENCE_S)
    way.cuts.append(where)
    way.is_away = True
    with pytest.raises(LedgerUnavailable) as caught:
        ledger.hold(hold("0-2")).result(PATIENCE_S)
    way.is_away = False
    ledger.settle(entry("0-1")).result(PATIENCE_S)
    held = ledger.open_holds()
    ledger.close()
    endings: dict[str, str] = dict(store.query("select request_id, ending from ledger"))

    assert (caught.value.code, held) == ("not_durable", 0)
    assert endings == {"0-1": "done", **({"0-2": "interrupted"} if where == "after" else {})}
    assert check_books(store) == []


def test_a_connection_that_ended_while_nobody_used_it_costs_nobody_anything(
    postgres: PostgresStore, connection: PostgresConnection
) -> None:
    """A server restarts, a firewall forgets: the next question and the next change go on."""
    create_tenant(postgres, Wall(), "ada")
    list_tenants(postgres)
    connection.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where pid <> pg_backend_pid() and datname = current_database()"
    )

    assert len(list_tenants(postgres)) == 1
    create_tenant(postgres, Wall(), "bob")
    assert len(list_tenants(postgres)) == 2


def test_a_database_that_was_put_in_anothers_place_is_noticed(
    postgres: PostgresStore, connection: PostgresConnection
) -> None:
    """A backup restored under a running server is not what its holds are in."""
    create_tenant(postgres, Wall(), "ada")
    connection.execute("delete from writers")

    with pytest.raises(StoreError) as caught:
        create_tenant(postgres, Wall(), "bob")
    assert caught.value.code == "replaced"
