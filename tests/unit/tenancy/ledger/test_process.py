"""The ledger's process: what was sent is written, whoever dies; no signal ends it but SIGKILL."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tenancy.accounts.tenants import create_tenant
from tenancy.ledger.progress import Progress, ProgressNote
from tenancy.ledger.protocol import NotOpened, Open, Opened, error_of
from tenancy.ledger.transactions import Hold, Item
from tenancy.ledger.writer import BATCH_MAX
from tenancy.storage.backends import open_store
from tenancy.storage.interface import Store
from tests.unit.tenancy.conftest import Wall, used
from tests.unit.tenancy.ledger.ledger_process import Process, ledger_process
from tests.unit.tenancy.storage.postgres_server import Server


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with a tenant."""
    if request.param == "postgres":
        server: Server = request.getfixturevalue("postgres_server")
        place = server.url(server.database())
    else:
        place = str(tmp_path / "test.db")
    with closing(open_store(place, Path(), {})) as store:
        create_tenant(store, Wall(), "ada")
    return place


@pytest.fixture
def store(place: str) -> Iterator[Store]:
    """The same database, for a look."""
    with closing(open_store(place, Path(), {})) as store:
        yield store


def hold(request_id: str) -> Hold:
    return Hold(request_id, 1, 1, "m", 10)


def opened(process: Process, place: str, living: tuple[str, ...] = (), before: int = 0) -> Opened:
    process.say(Open(place, "", [*living], before))
    word = process.hear()
    assert isinstance(word, Opened), word
    return word


def endings(store: Store) -> dict[str, tuple[str, int]]:
    """(ending, output tokens) of each entry."""
    rows = store.query("select request_id, ending, output_tokens from ledger")
    return {request_id: (ending, tokens) for request_id, ending, tokens in rows}


def holds(store: Store) -> int:
    return int(store.query("select count(*) from holds")[0][0])


def test_it_writes_what_it_is_sent_and_says_so(place: str, store: Store) -> None:
    """A hold, its entry; the same again is refused or changes nothing."""
    with ledger_process() as process:
        word = opened(process, place)
        codes = process.write(hold("a"), used("a", 10), hold("a"), used("a", 10))
        status = process.end()
        said = process.process.communicate()

    assert (word.interrupted, word.found_epoch, status) == (0, None, 0)
    assert codes == ["", "", "duplicate_request", ""]
    assert endings(store) == {"a": ("done", 4)}
    assert said == (b"", b"")


def test_more_than_fits_a_transaction_is_answered_in_parts(place: str, store: Store) -> None:
    """One turn of a busy loop hands in hundreds; others who write wait for one transaction."""
    count = 2 * BATCH_MAX + 7
    items: list[Item] = [used(str(number), 10) for number in range(count)]
    with ledger_process() as process:
        opened(process, place)
        codes = process.write(*items)

    assert codes == [""] * count
    assert len(endings(store)) == count


def test_what_was_sent_before_its_gateway_died_is_written(place: str, store: Store) -> None:
    """And what nobody will settle any more is closed with what was noted of it; half a message is
    none."""
    with ledger_process() as process:
        opened(process, place)
        process.write(hold("open"), hold("sent"))
        process.say([ProgressNote({"open": Progress(output_tokens=3)})])
        for _ in range(20):  # each a commit: most of them wait in the socket
            process.say([used("sent", 10)])
        process.wire.sendall(b"\x80\0\0\0half")
        status = process.end()

    assert status == 0
    assert endings(store) == {"sent": ("done", 4), "open": ("interrupted", 3)}
    assert holds(store) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_its_gateways_group_do_not_end_it(tmp_path: Path, number: int) -> None:
    """A service manager sends them to all; what runs is still to be settled."""
    place = str(tmp_path / "test.db")
    with closing(open_store(place, Path(), {})) as store:
        create_tenant(store, Wall(), "ada")
        with ledger_process() as process:
            opened(process, place)
            process.process.send_signal(number)
            codes = process.write(hold("a"), used("a", 10))
            status = process.end()

    assert (codes, status) == (["", ""], 0)


def test_one_that_is_killed_is_succeeded(place: str, store: Store) -> None:
    """What lives goes on with the next; the rest is closed."""
    with ledger_process() as process:
        before = opened(process, place)
        process.write(hold("lives"), hold("dead"))
        process.process.kill()
        with ledger_process() as successor:
            word = opened(successor, place, ("lives",), before.writer_id)
            left = holds(store)
            codes = successor.write(used("lives", 10))
            successor.end()

    assert (word.interrupted, word.writer_id, left) == (1, before.writer_id, 1)
    assert codes == [""]
    assert endings(store) == {"dead": ("interrupted", 0), "lives": ("done", 4)}


def test_the_next_gateway_waits_for_the_end_of_the_one_before(tmp_path: Path) -> None:
    """It may start while what was sent before is being written."""
    place = str(tmp_path / "test.db")
    with closing(open_store(place, Path(), {})) as store:
        create_tenant(store, Wall(), "ada")
        with ledger_process() as process, ledger_process() as successor:
            opened(process, place)
            for number in range(200):
                process.say([hold(str(number))])
            successor.say(Open(place, ""))
            status = process.end()
            word = successor.hear()
            left = holds(store)
            successor.end()

    assert (status, left) == (0, 0)
    assert isinstance(word, Opened)


def test_a_database_that_cannot_be_opened_is_told_as_its_error(tmp_path: Path) -> None:
    """The gateway says it as if it had opened it itself."""
    (tmp_path / "test.db").write_bytes(b"no database" * 100)
    with ledger_process() as process:
        process.say(Open("test.db", str(tmp_path)))
        word = process.hear()
        status = process.end()

    assert isinstance(word, NotOpened)
    assert "test.db cannot be used" in error_of(word.failure).message
    assert status == 1


def test_who_is_never_told_a_database_goes(tmp_path: Path) -> None:
    """Its gateway died in between."""
    with ledger_process() as process:
        status = process.end()

    assert status == 0


def test_a_mistake_of_ours_says_where_and_quotes_nothing(tmp_path: Path) -> None:
    """The line goes to the gateway's log; the gateway sees an end and starts another."""
    place = str(tmp_path / "test.db")
    with ledger_process() as process:
        opened(process, place)
        process.wire.sendall(b"\x0e\0\0\0\x91secret-secret")
        process.process.wait(20)
        out, err = process.process.communicate()

    assert process.process.returncode == 1
    assert (out, b"secret" in err, err.count(b"\n")) == (b"", False, 1)
    assert b"ledger_failed" in err
