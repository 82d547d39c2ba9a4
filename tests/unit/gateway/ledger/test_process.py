"""The ledger process: it writes what it was sent; no signal ends it but SIGKILL."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gateway.ledger.protocol import NotOpened, Open, Opened, error_of
from tenancy.accounts.tenants import create_tenant
from tenancy.ledger.holds import ProgressNote
from tenancy.ledger.transactions import Hold, Item
from tenancy.ledger.writer import BATCH_MAX
from tenancy.storage.backends import open_store
from tenancy.storage.interface import Store
from tenancy.types import TokenCounts
from tests.unit.gateway.ledger.ledger_process import Process, ledger_process
from tests.unit.tenancy.conftest import Wall, used
from tests.unit.tenancy.ledger.written import endings, holds
from tests.unit.tenancy.storage.postgres_server import Server


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with a tenant."""
    if request.param == "postgres":
        server: Server = request.getfixturevalue("postgres_server")
        database = server.url(server.database())
    else:
        database = str(tmp_path / "test.db")
    with closing(open_store(database, Path(), {})) as store:
        create_tenant(store, Wall(), "ada")
    return database


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    """The same database, to check what was written."""
    with closing(open_store(database, Path(), {})) as store:
        yield store


def hold(request_id: str) -> Hold:
    return Hold(request_id, 1, 1, "m", 10)


def open_ledger(
    process: Process, database: str, living: tuple[str, ...] = (), before: int = 0
) -> Opened:
    process.send(Open(database, "", [*living], before))
    word = process.receive()
    assert isinstance(word, Opened), word
    return word


def test_writes_and_confirms_items(database: str, store: Store) -> None:
    """A hold, its entry; repeated items are refused or change nothing."""
    with ledger_process() as process:
        word = open_ledger(process, database)
        codes = process.write(hold("a"), used("a", 10), hold("a"), used("a", 10))
        status = process.end()
        said = process.process.communicate()

    assert (word.interrupted, word.found_epoch, status) == (0, None, 0)
    assert codes == ["", "", "duplicate_request", ""]
    assert endings(store) == {"a": ("done", 4)}
    assert said == (b"", b"")


def test_answers_a_large_frame_in_batches(database: str, store: Store) -> None:
    """A busy turn hands in hundreds of items; other writers wait for one transaction only."""
    count = 2 * BATCH_MAX + 7
    items: list[Item] = [used(str(number), 10) for number in range(count)]
    with ledger_process() as process:
        open_ledger(process, database)
        codes = process.write(*items)

    assert codes == [""] * count
    assert len(endings(store)) == count


def test_writes_items_of_a_dead_gateway(database: str, store: Store) -> None:
    """And closes the remaining holds with their progress; half a message is ignored."""
    with ledger_process() as process:
        open_ledger(process, database)
        process.write(hold("open"), hold("sent"))
        process.send([ProgressNote({"open": TokenCounts(output_tokens=3)})])
        for _ in range(20):  # each is a commit: most of them wait in the socket
            process.send([used("sent", 10)])
        process.wire.sendall(b"\x80\0\0\0half")
        status = process.end()

    assert status == 0
    assert endings(store) == {"sent": ("done", 4), "open": ("interrupted", 3)}
    assert holds(store) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ignores_signals_to_its_gateways_group(tmp_path: Path, number: int) -> None:
    """A service manager signals all processes; running requests are still to be settled."""
    database = str(tmp_path / "test.db")
    with closing(open_store(database, Path(), {})) as store:
        create_tenant(store, Wall(), "ada")
        with ledger_process() as process:
            open_ledger(process, database)
            process.process.send_signal(number)
            codes = process.write(hold("a"), used("a", 10))
            status = process.end()

    assert (codes, status) == (["", ""], 0)


def test_successor_takes_over_holds_of_a_killed_writer(database: str, store: Store) -> None:
    """Holds of running requests stay open; the others are closed."""
    with ledger_process() as process:
        before = open_ledger(process, database)
        process.write(hold("lives"), hold("dead"))
        process.process.kill()
        with ledger_process() as successor:
            word = open_ledger(successor, database, ("lives",), before.writer_id)
            left = holds(store)
            codes = successor.write(used("lives", 10))
            successor.end()

    assert (word.interrupted, word.writer_id, left) == (1, before.writer_id, 1)
    assert codes == [""]
    assert endings(store) == {"dead": ("interrupted", 0), "lives": ("done", 4)}


def test_next_gateway_waits_for_the_former_writer(tmp_path: Path) -> None:
    """It may start while earlier items are being written."""
    database = str(tmp_path / "test.db")
    with closing(open_store(database, Path(), {})) as store:
        create_tenant(store, Wall(), "ada")
        with ledger_process() as process, ledger_process() as successor:
            open_ledger(process, database)
            for number in range(200):
                process.send([hold(str(number))])
            successor.send(Open(database, ""))
            status = process.end()
            word = successor.receive()
            left = holds(store)
            successor.end()

    assert (status, left) == (0, 0)
    assert isinstance(word, Opened)


def test_reports_why_a_database_cannot_be_opened(tmp_path: Path) -> None:
    """As if the gateway had opened it itself."""
    (tmp_path / "test.db").write_bytes(b"no database" * 100)
    with ledger_process() as process:
        process.send(Open("test.db", str(tmp_path)))
        word = process.receive()
        status = process.end()

    assert isinstance(word, NotOpened)
    assert "test.db cannot be used" in error_of(word.failure).message
    assert status == 1


def test_exits_without_a_first_message(tmp_path: Path) -> None:
    """Its gateway died before it sent one."""
    with ledger_process() as process:
        status = process.end()

    assert status == 0


def test_logs_a_bug_without_quoting_values(tmp_path: Path) -> None:
    """The line goes to the gateway's log; the gateway starts another process."""
    database = str(tmp_path / "test.db")
    with ledger_process() as process:
        open_ledger(process, database)
        process.wire.sendall(b"\x0e\0\0\0\x91secret-secret")
        process.process.wait(60)
        out, err = process.process.communicate()

    assert process.process.returncode == 1
    assert (out, b"secret" in err, err.count(b"\n")) == (b"", False, 1)
    assert b"ledger_failed" in err
