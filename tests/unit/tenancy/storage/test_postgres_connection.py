"""`PostgresConnection`: values, refusals, and how a connection ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest

from tenancy.storage.interface import Value
from tenancy.storage.postgres_connection import (
    STATEMENTS_MAX,
    ConnectionLost,
    PostgresConnection,
    StatementFailed,
)
from tests.unit.tenancy.storage.postgres_server import Server

TIMEOUT_S = 60.0


@pytest.fixture
def connection(postgres_server: Server) -> Iterator[PostgresConnection]:
    connection = PostgresConnection(postgres_server.address("postgres"), {}, TIMEOUT_S)
    yield connection
    connection.close()
    connection.close()


VALUES: list[tuple[str, Value]] = [
    ("bigint", 2**63 - 1),
    ("bigint", -(2**63)),
    ("bigint", None),
    ("double precision", 0.1),
    ("double precision", 1e300),
    ("text", "plain"),
    ("text", "ä 語 \\ ' \" ? $1 😀"),
    ("text", ""),
    ("bytea", bytes(range(256))),
    ("bytea", b""),
]


@pytest.mark.parametrize(("kind", "value"), VALUES)
def test_values_round_trip(connection: PostgresConnection, kind: str, value: Value) -> None:
    """In each way of sending them."""
    connection.execute(f"create temporary table seen (number bigint, value {kind})")
    connection.execute("insert into seen values (?, ?)", (1, value))
    connection.execute_many("insert into seen values (?, ?)", [(2, None), (3, value)])
    connection.copy_rows("seen", ["number", "value"], [(4, value), (5, None)])

    assert connection.rows(f"select ?::{kind}", (value,)) == [(value,)]
    assert connection.rows("select value from seen order by number") == [
        (one,) for one in (value, None, value, value, None)
    ]


def test_sums_of_integers_are_integers(connection: PostgresConnection) -> None:
    """PostgreSQL sums 64-bit integers into decimals; money is an integer everywhere."""
    (row,) = connection.rows("select sum(x), 0.5 from (values (?), (?)) as v (x)", (2**62, 2**62))

    assert row == (2**63, 0.5)
    assert isinstance(row[0], int)


def test_numbered_placeholder_repeats_a_value(connection: PostgresConnection) -> None:
    """As in SQLite."""
    assert connection.rows("select ?2, ?1, ?2", (1, "b")) == [("b", 1, "b")]


def test_replaces_nul_in_text(connection: PostgresConnection) -> None:
    """SQLite stores NUL, PostgreSQL cannot: no request fails for it."""
    connection.execute("create temporary table seen (value text)")
    connection.execute("insert into seen values (?)", ("a\0b",))
    connection.execute_many("insert into seen values (?)", [("a\0b",)])
    connection.copy_rows("seen", ["value"], [("a\0b",)])

    assert (
        connection.rows("select value, value = ? from seen", ("a\0b",)) == [("a\ufffdb", True)] * 3
    )


def test_counts_changed_rows(connection: PostgresConnection) -> None:
    """Of the last statement of several."""
    connection.execute("create temporary table seen (number bigint)")
    inserted = connection.execute("insert into seen values (?), (?)", (1, 2))
    several = connection.execute("delete from seen; insert into seen values (1), (2), (3)")
    nothing = connection.execute("delete from seen where number = ?", (9,))

    assert (inserted, several, nothing) == (2, 3, 0)


def test_refused_statement_leaves_the_connection_usable(connection: PostgresConnection) -> None:
    """Refused by the server, or a value that cannot be sent."""
    with pytest.raises(StatementFailed) as refused:
        connection.rows("select 1 / ?", (0,))
    for value in ("\ud800", 2**63):
        with pytest.raises(StatementFailed) as impossible:
            connection.rows("select ?", (value,))

        assert impossible.value.state == "22000"
    assert refused.value.state == "22012"
    assert connection.rows("select 1") == [(1,)]


@pytest.mark.parametrize("wrong", [0, 1, 2])
@pytest.mark.parametrize("is_copied", [False, True])
def test_refuses_all_rows_for_an_impossible_one(
    connection: PostgresConnection, wrong: int, is_copied: bool
) -> None:
    """However they are sent."""
    connection.execute("create temporary table seen (number bigint, what text)")
    rows = [(number, "ok") for number in range(3)]
    rows[wrong] = (wrong, "\ud800")
    send = partial(connection.execute_many, "insert into seen values (?, ?)")
    if is_copied:
        send = partial(connection.copy_rows, "seen", ["number", "what"])
    connection.execute("begin")
    with pytest.raises(StatementFailed):
        send(rows)
    connection.execute("rollback")

    assert connection.rows("select count(*) from seen") == [(0,)]


def test_raises_if_commit_rolled_back(connection: PostgresConnection) -> None:
    """PostgreSQL answers ROLLBACK, without an error, after a failed statement."""
    connection.execute("begin")
    with pytest.raises(StatementFailed):
        connection.rows("select 1 / 0")
    with pytest.raises(StatementFailed) as caught:
        connection.commit()
    connection.execute("begin")
    connection.commit()

    assert caught.value.state == "25P02"


def test_bounds_prepared_statements(connection: PostgresConnection) -> None:
    """The most recently used are kept."""
    for number in range(STATEMENTS_MAX + 50):
        connection.rows(f"select {number}")

    ((kept,),) = connection.rows("select count(*) from pg_prepared_statements")
    assert kept <= STATEMENTS_MAX


async def test_works_in_a_thread_with_an_event_loop(connection: PostgresConnection) -> None:
    """The connection's own loop cannot run inside another."""
    assert asyncio.get_running_loop().is_running()
    assert connection.rows("select ?", (1,)) == [(1,)]


def test_lost_connection_stays_lost(
    connection: PostgresConnection, postgres_server: Server
) -> None:
    """The running statement may or may not have run."""
    ((pid,),) = connection.rows("select pg_backend_pid()")
    with closing(PostgresConnection(postgres_server.address("postgres"), {}, TIMEOUT_S)) as other:
        other.execute("select pg_terminate_backend(?::int)", (pid,))

    for _ in range(2):
        with pytest.raises(ConnectionLost):
            connection.rows("select 1")
    assert connection.is_lost


def test_statement_timeout_ends_the_connection(postgres_server: Server) -> None:
    """A late answer could be taken for that of another statement."""
    connection = PostgresConnection(postgres_server.address("postgres"), {}, 0.2)
    with pytest.raises(ConnectionLost, match="TimeoutError"):
        connection.rows("select pg_sleep(60)")

    assert connection.is_lost


def test_missing_database_is_refused(postgres_server: Server) -> None:
    """By the server, with its SQLSTATE."""
    with pytest.raises(StatementFailed) as caught:
        PostgresConnection(postgres_server.address("nowhere"), {}, TIMEOUT_S)

    assert caught.value.state == "3D000"
