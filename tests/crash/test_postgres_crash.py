"""Gateways and PostgreSQL servers killed at any instant lose no confirmed entry and duplicate none.

The checks are those of `ledger_checks`, with the same control: an entry confirmed too early.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tenancy.errors import TenancyError
from tenancy.ledger.ledger import Ledger
from tenancy.storage.backends import open_store
from tenancy.storage.postgres_connection import ConnectionLost, PostgresConnection, StatementFailed
from tests.crash.ledger_checks import check_ledger
from tests.crash.ledger_child import furnish, hold, named
from tests.unit.tenancy.storage.postgres_server import Server, own_server

ROOT = Path(__file__).parents[2]
CHILD = [sys.executable, "-m", "tests.crash.ledger_child"]
IS_LONG = os.environ.get("CRASH") == "long"  # make crash
DEATHS = 100 if IS_LONG else 6
BLOWS = 100 if IS_LONG else 5
LEAST = 5
"""Entries between two crashes."""

PATIENCE_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3_600 if IS_LONG else 240)]


frail = pytest.fixture(scope="module")(own_server)
"""A server that the tests may kill."""


def kill_backend(server: Server, database: str) -> None:
    """Kill one process of the server; the server ends all of them, recovers, and continues."""
    with suppress(ConnectionLost, StatementFailed):
        connection = PostgresConnection(server.address("postgres"), {}, PATIENCE_S)
        rows = connection.rows(
            "select pid from pg_stat_activity where datname = ? order by state_change desc",
            (database,),
        )
        connection.close()
        for (pid,) in rows[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def kill_server(server: Server, database: str) -> None:
    """Kill the server, and start it again."""
    server.kill()
    server.start()


def cut_off(server: Server, database: str) -> None:
    """Terminate every connection to the database."""
    with suppress(ConnectionLost, StatementFailed):
        connection = PostgresConnection(server.address("postgres"), {}, PATIENCE_S)
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = ?", (database,)
        )
        connection.close()


def live(
    url: str, is_over: threading.Event, done: threading.Semaphore
) -> tuple[set[str], set[str], int]:
    """Write a ledger until `is_over`. Returns the confirmed ids, the ids with refused holds, and
    the number of refusals."""
    rng = random.Random(1)
    store = open_store(url, Path(), {})
    furnish(store)
    ledger = Ledger(store, lambda: 2)
    confirmed, unheld, refused, number = set[str](), set[str](), 0, 0
    while not is_over.is_set():
        names = [f"1-{number + more}" for more in range(rng.randrange(1, 6))]
        number += len(names)
        held = [ledger.hold(hold(name)) for name in names]
        for name, future in zip(names, held, strict=True):
            if future.exception(PATIENCE_S) is not None:
                unheld.add(name)
        sent = {name: ledger.settle(named(name)) for name in names if rng.random() < 0.9}
        for name, future in sent.items():
            if future.exception(PATIENCE_S) is None:
                confirmed.add(name)
                done.release()
            else:
                refused += 1
    ledger.close()
    store.close()
    return confirmed, unheld, refused + len(unheld)


@pytest.mark.parametrize("blow", [kill_backend, kill_server, cut_off])
def test_server_crashes_lose_and_duplicate_nothing(
    frail: Server, blow: Callable[[Server, str], None]
) -> None:
    """Repeatedly, under load, with a gateway that keeps running."""
    database = frail.database()
    is_over, rng, done = threading.Event(), random.Random(1), threading.Semaphore(0)

    def strike() -> None:
        try:
            for _ in range(BLOWS):
                for _ in range(rng.randrange(LEAST, 30)):
                    done.acquire(timeout=PATIENCE_S)
                blow(frail, database)
        finally:
            is_over.set()

    striker = threading.Thread(target=strike)
    striker.start()
    try:
        confirmed, unheld, refused = live(frail.url(database), is_over, done)
    finally:
        striker.join(PATIENCE_S)
    frail.wait_ready()  # the server may still recover from the last crash
    entries = check_ledger(frail.url(database), confirmed, unheld)

    sys.stdout.write(f"{BLOWS} blows, {len(confirmed)} confirmed, {refused} refused\n")
    assert entries >= len(confirmed) >= LEAST * BLOWS


def test_gateway_kills_lose_and_duplicate_nothing(frail: Server) -> None:
    """Each after a random number of confirmed entries; the next gateway closes its holds."""
    url, rng, confirmed = frail.url(frail.database()), random.Random(1), set[str]()
    for _ in range(DEATHS):
        with subprocess.Popen([*CHILD, url, "100000"], stdout=subprocess.PIPE, cwd=ROOT) as child:
            assert child.stdout is not None
            for _ in range(rng.randrange(1, 40)):
                confirmed.add(child.stdout.readline().decode().strip())
            child.send_signal(signal.SIGKILL)
            confirmed.update(line.decode().strip() for line in child.stdout if line[-1:] == b"\n")

    assert check_ledger(url, confirmed) >= len(confirmed) > 0


def test_detects_an_entry_confirmed_too_early(frail: Server) -> None:
    """The control: confirming before durability fails the check above."""
    url = frail.url(frail.database())
    child = subprocess.run(
        [*CHILD, url, "100000", "8"], capture_output=True, timeout=60, check=False, cwd=ROOT
    )

    assert child.returncode == -signal.SIGKILL
    with pytest.raises(AssertionError):
        check_ledger(url, set(child.stdout.decode().split()))


def test_read_only_server_confirms_nothing(frail: Server) -> None:
    """The callers get an error, and writing continues when the server allows it."""
    database = frail.database()
    store = open_store(frail.url(database), Path(), {})
    furnish(store)
    ledger = Ledger(store, lambda: 2)
    ledger.hold(hold("0-1")).result(PATIENCE_S)
    ledger.settle(named("0-1")).result(PATIENCE_S)
    connection = PostgresConnection(frail.address("postgres"), {}, PATIENCE_S)
    connection.execute(f"alter database {database} set default_transaction_read_only = on")
    cut_off(frail, database)
    refused = ledger.settle(named("0-2")).exception(PATIENCE_S)
    connection.execute(f"alter database {database} reset default_transaction_read_only")
    cut_off(frail, database)
    connection.close()
    ledger.hold(hold("0-3")).result(PATIENCE_S)
    ledger.settle(named("0-3")).result(PATIENCE_S)
    ledger.close()
    store.close()

    assert isinstance(refused, TenancyError)
    assert check_ledger(frail.url(database), {"0-1", "0-3"}) == 2
