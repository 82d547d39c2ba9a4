"""`LedgerWriter` on its caller's thread; `test_ledger` covers the thread around it."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from threading import Thread

import pytest
from msgspec import structs

from tenancy.accounting.audit import check_books
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import LedgerUnavailable, StoreError, TryAgain
from tenancy.ledger.holds import ProgressNote
from tenancy.ledger.transactions import Hold, Item
from tenancy.ledger.writer import (
    ATTEMPTS,
    GONE_MS,
    KEEP_POINT_MS,
    LOOK_MS,
    LedgerWriter,
    is_written,
)
from tenancy.storage.interface import Store, Transaction
from tenancy.storage.postgres import WRITE_LOCK, PostgresStore
from tenancy.storage.postgres_connection import ConnectionLost, StatementFailed
from tenancy.types import TokenCounts
from tests.unit.tenancy.conftest import Wall, used
from tests.unit.tenancy.ledger.written import endings
from tests.unit.tenancy.storage.new_sqlite import new_sqlite


def hold(request_id: str) -> Hold:
    return Hold(request_id, 1, 1, "m", 10)


@pytest.fixture
def store(store: Store, wall: Wall) -> Store:
    """A store with a tenant."""
    create_tenant(store, wall, "ada")
    return store


def write(writer: LedgerWriter, *items: Item) -> None:
    """Write items and check that none is refused."""
    assert writer.write(items) == [None] * len(items)


def holds(store: Store) -> set[str]:
    return {row[0] for row in store.query("select request_id from holds")}


def dies(store: Store) -> None:
    """Simulate the death of the store's writer process, with its in-memory state."""
    if isinstance(store, PostgresStore):
        assert store._writer is not None
        store._writer.close()
        store._writer, store._writer_id = None, 0
    else:
        store.release_claim()


def test_answers_are_in_item_order(store: Store, wall: Wall) -> None:
    """Callers match answers to items by position."""
    writer = LedgerWriter(store, wall)
    wrong = structs.replace(used("wrong", 10), fresh_tokens=1)
    answers = writer.write([hold("a"), wrong, hold("a"), used("a", 10), used("b", 10)])
    answers += writer.write([wrong, used("c", 10)])
    writer.close()

    codes = [answer and answer.code for answer in answers]
    assert codes[:5] == [None, "impossible_entry", "duplicate_request", None, None]
    assert codes[5:] == ["impossible_entry", None]
    assert all(map(is_written, answers)), "the database took them"
    assert set(endings(store)) == {"a", "b", "c"}


def test_failed_commit_closes_only_refused_holds(
    store: Store, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hold may be stored although its commit failed. A refused request does not settle it; a
    running one does, and must not find it closed. The next failure does not concern them."""
    writer = LedgerWriter(store, wall)
    write(writer, hold("refused"), structs.replace(hold("runs"), is_running=True))

    def broken() -> None:
        raise StoreError("not_written", "test")

    def fail(*items: Item) -> list[bool]:
        with monkeypatch.context() as patch:
            patch.setattr(store, "change", broken)
            return list(map(is_written, writer.write(items)))

    failed = fail(hold("refused"), structs.replace(hold("runs"), is_running=True), hold("later"))
    write(writer, used("runs", 10), hold("later"))
    failed += fail(hold("next"))
    write(writer, used("later", 10))
    writer.close()

    assert failed == [False] * 4
    done = ("done", 4)
    assert endings(store) == {"refused": ("interrupted", 0), "runs": done, "later": done}


@pytest.mark.parametrize(("conflicts", "codes"), [(ATTEMPTS - 1, [None]), (9, ["not_durable"])])
def test_conflicting_transaction_is_tried_again(
    store: Store,
    wall: Wall,
    monkeypatch: pytest.MonkeyPatch,
    conflicts: int,
    codes: list[str | None],
) -> None:
    """A few times, and then the request is refused."""
    writer, change, tries = LedgerWriter(store, wall), store.change, itertools.count(1)

    def conflicting() -> AbstractContextManager[Transaction]:
        if next(tries) <= conflicts:
            raise TryAgain("busy", "test")
        return change()

    with monkeypatch.context() as patch:
        patch.setattr(store, "change", conflicting)
        answers = writer.write([hold("a")])
    writer.close()

    assert [answer and answer.code for answer in answers] == codes
    assert next(tries) == ATTEMPTS + 1


def test_failed_maintenance_is_tried_again(
    store: Store, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk does not end the writer."""
    writer = LedgerWriter(store, wall)
    write(writer, used("a", 10))

    def full(*_: object) -> None:
        raise StoreError("not_written", "test")

    with monkeypatch.context() as patch:
        for name in ("change", "query"):
            patch.setattr(store, name, full)
        wall.ms += KEEP_POINT_MS
        writer.run_maintenance()
    wall.ms += KEEP_POINT_MS
    writer.run_maintenance()
    left = store.query("select * from recent_sums")
    writer.close()

    assert left == []


def test_successor_closes_only_dead_holds(store: Store, wall: Wall) -> None:
    """Requests that the gateway still runs settle later; refused ones must not stay open."""
    writer = LedgerWriter(store, wall)
    write(writer, *map(hold, ("lives", "refused")))
    write(writer, ProgressNote({"refused": TokenCounts(output_tokens=7)}))
    dies(store)
    with closing(store.open_another()) as next_store:
        successor = LedgerWriter(next_store, wall, living={"lives"}, successor_of=writer.writer_id)
        left = holds(store)
        write(successor, used("lives", 10))
        successor.close()

    assert successor.writer_id == writer.writer_id
    assert (successor.interrupted, left) == (1, {"lives"})
    assert endings(store) == {"refused": ("interrupted", 7), "lives": ("done", 4)}


def test_holds_taken_over_are_not_closed_by_others(postgres: PostgresStore, wall: Wall) -> None:
    """Another gateway over the same server sees their writer."""
    create_tenant(postgres, wall, "ada")
    writer = LedgerWriter(postgres, wall)
    write(writer, hold("lives"))
    dies(postgres)
    with closing(postgres.open_another()) as own, closing(postgres.open_another()) as others:
        successor = LedgerWriter(own, wall, living={"lives"}, successor_of=writer.writer_id)
        other = LedgerWriter(others, wall)
        write(successor, used("lives", 10))
        for one in (successor, other):
            one.close()

    assert other.interrupted == 0
    assert endings(postgres) == {"lives": ("done", 4)}


def test_holds_of_a_host_that_died_are_closed_once_by_others(
    postgres: PostgresStore, wall: Wall
) -> None:
    """After a minute, by whichever of three gateways looks first; a writer that was only cut off
    for less is let be, and so is one that lives."""
    create_tenant(postgres, wall, "ada")
    with ExitStack() as opened:
        stores = [opened.enter_context(closing(postgres.open_another())) for _ in range(5)]
        dead, away = LedgerWriter(stores[0], wall), LedgerWriter(stores[1], wall)
        others = [LedgerWriter(one, wall) for one in stores[2:]]
        write(dead, hold("dead"), hold("settled"), used("settled", 10))
        write(dead, ProgressNote({"dead": TokenCounts(output_tokens=3)}))
        write(away, hold("away"))
        write(others[0], hold("lives"))
        dies(stores[0])
        away_connection = stores[1]._writer
        assert away_connection is not None
        away_connection.close()
        for later_ms in (LOOK_MS, GONE_MS // 2):
            wall.ms += later_ms
            for one in others:
                one.run_maintenance()
        early = holds(postgres)
        write(away, used("away", 10))
        wall.ms += GONE_MS // 2
        threads = [Thread(target=one.run_maintenance) for one in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        write(others[0], used("lives", 10))

    assert early == {"dead", "away", "lives"}
    assert holds(postgres) == set()
    assert endings(postgres) == {
        "dead": ("interrupted", 3),
        **dict.fromkeys(("settled", "away", "lives"), ("done", 4)),
    }
    assert check_books(postgres) == []


def test_successor_waits_for_the_dead_writers_transaction(
    postgres: PostgresStore, wall: Wall
) -> None:
    """A hold committed afterwards would stay open forever."""
    create_tenant(postgres, wall, "ada")
    writer = LedgerWriter(postgres, wall)
    connection = postgres._writer
    assert connection is not None
    connection.execute(
        f"begin; select pg_advisory_xact_lock({WRITE_LOCK}); insert into holds (request_id,"
        " tenant_id, key_id, model, started_ms, booked_ms, writer_id)"
        f" values ('late', 1, 1, 'm', 10, 10, {writer.writer_id})"
    )
    with closing(postgres.open_another()) as own:
        successor = LedgerWriter(own, wall, successor_of=writer.writer_id)
        with pytest.raises((ConnectionLost, StatementFailed)):
            connection.execute("commit")
        write(successor, hold("next"), used("next", 10))
        successor.close()

    assert holds(postgres) == set()
    assert set(endings(postgres)) == {"next"}


def test_successor_of_an_unknown_writer_starts_fresh(postgres: PostgresStore, wall: Wall) -> None:
    """The database may have been replaced."""
    create_tenant(postgres, wall, "ada")
    writer = LedgerWriter(postgres, wall, successor_of=12_345)
    write(writer, hold("a"), used("a", 10))
    writer.close()

    assert 0 < writer.writer_id != 12_345


def test_abandoned_holds_are_closed_at_once(store: Store, wall: Wall) -> None:
    """A server that starts meanwhile does not see them."""
    with closing(store.open_another()) as beside:
        other = LedgerWriter(beside, wall) if not store.is_local else None
        writer = LedgerWriter(store, wall)
        if other is not None:
            write(other, hold("others"))
        write(writer, hold("a"))
        write(writer, ProgressNote({"a": TokenCounts(output_tokens=3)}))
        writer.close_own_holds()
        writer.close()
        left = holds(store)
        if other is not None:
            other.close()

    assert endings(store) == {"a": ("interrupted", 3)}
    assert left == (set() if store.is_local else {"others"})


def test_patient_writer_waits_for_the_previous_one(
    tmp_path: Path, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed gateway's writer finishes first; the next gateway is not refused for it."""
    first, second = new_sqlite(tmp_path / "test.db"), new_sqlite(tmp_path / "test.db")
    writer = LedgerWriter(first, wall)
    with pytest.raises(StoreError, match="another server"):
        LedgerWriter(second, wall)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            writer.close()

    monkeypatch.setattr("time.sleep", pause)
    LedgerWriter(second, wall, patience_s=3_600).close()
    for store in (first, second):
        store.close()

    assert len(pauses) == 3


def test_refusal_message_contains_no_value(store: Store, wall: Wall) -> None:
    """It may reach a log."""
    writer = LedgerWriter(store, wall)
    (answer,) = writer.write([structs.replace(used("secret", 10), tenant_id=99)])
    writer.close()

    assert isinstance(answer, LedgerUnavailable)
    assert "secret" not in answer.message
    assert "ConstraintBroken" in answer.message
