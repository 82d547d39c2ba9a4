"""One connection: values there and back, refusals, and the end of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tenancy.storage.postgres_connection import (
    AT_ONCE,
    STATEMENTS_MAX,
    Link,
    LinkLost,
    StatementFailed,
)
from tests.unit.tenancy.storage.postgres_server import Server


@pytest.fixture
def link(postgres_server: Server) -> Iterator[Link]:
    link = Link(postgres_server.address("postgres"), {}, 20.0)
    yield link
    link.close()
    link.close()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
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
    ],
)
def test_a_value_comes_back_as_it_went(link: Link, kind: str, value: object) -> None:
    """The driver sends text; nothing may be lost on the way."""
    rows, _ = link.run(f"select ?::{kind}", (value,))  # type: ignore[arg-type]

    assert rows == [(value,)]


def test_sums_of_whole_numbers_are_whole(link: Link) -> None:
    """PostgreSQL sums 64 bits into decimals; money is whole numbers everywhere."""
    (row,), _ = link.run("select sum(x), 0.5 from (values (?), (?)) as v (x)", (2**62, 2**62))

    assert row == (2**63, 0.5)
    assert isinstance(row[0], int)


def test_a_number_names_a_value_twice(link: Link) -> None:
    """As in SQLite."""
    rows, _ = link.run("select ?2, ?1, ?2", (1, "b"))

    assert rows == [("b", 1, "b")]


def test_no_text_has_a_nul(link: Link) -> None:
    """SQLite takes it, PostgreSQL does not: it becomes the sign for what cannot be shown."""
    rows, _ = link.run("select ?", ("a\0b",))

    assert rows == [("a�b",)]


def test_what_is_refused_leaves_the_connection_good(link: Link) -> None:
    """A broken rule is the statement's affair; half a sign never reaches the wire."""
    with pytest.raises(StatementFailed) as caught:
        link.run("select 1 / ?", (0,))
    with pytest.raises(UnicodeEncodeError):
        link.run("select ?", ("\ud800",))

    assert caught.value.state == "22012"
    assert link.run("select 1")[0] == [(1,)]


def test_statements_go_together_and_the_last_one_answers(link: Link) -> None:
    """However many, in their order; each may have values of other kinds."""
    link.script("create temporary table seen (number bigint, what text)")
    count = 2 * AT_ONCE + 1
    written = [
        ("insert into seen values (?, ?)", (number, None if number % 2 else "even"))
        for number in range(count)
    ]
    rows = link.run_all([*written, ("select count(*), count(what) from seen", ())])
    nothing = link.run_all([])

    assert (rows, nothing) == ([(count, AT_ONCE + 1)], [])


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_behind_a_statement_that_fails_none_is_run(link: Link, wrong: int) -> None:
    """The commit least of all: it would keep the half."""
    link.script("create temporary table seen (number bigint check (number > 0))")
    link.script("begin")
    numbers = [1, 2, 3]
    numbers[wrong] = -1
    with pytest.raises(StatementFailed) as caught:
        link.run_all(
            [("insert into seen values (?)", (number,)) for number in numbers], ending="commit"
        )
    link.script("rollback")

    assert caught.value.state == "23514"
    assert link.run("select count(*) from seen")[0] == [(0,)]


def test_a_commit_ends_what_was_sent_with_it(link: Link) -> None:
    """And alone, where there was nothing."""
    link.script("create temporary table seen (number bigint)")
    link.script("begin")
    link.run_all([("insert into seen values (?)", (1,))], ending="commit")
    link.script("rollback")
    link.script("begin")
    link.run_all([], ending="commit")

    assert link.run("select count(*) from seen")[0] == [(1,)]


def test_many_statements_do_not_gather_on_the_server(link: Link) -> None:
    """Those used last are kept."""
    for number in range(STATEMENTS_MAX + 50):
        link.run(f"select {number}")

    ((kept,),), _ = link.run("select count(*) from pg_prepared_statements")
    assert kept <= STATEMENTS_MAX


def test_a_connection_that_is_gone_stays_gone(link: Link, postgres_server: Server) -> None:
    """Nobody knows what became of what was under way."""
    (pid,) = link.run("select pg_backend_pid()")[0][0]
    other = Link(postgres_server.address("postgres"), {}, 20.0)
    other.run("select pg_terminate_backend(?::int)", (pid,))
    other.close()

    for _ in range(2):
        with pytest.raises(LinkLost):
            link.run("select 1")
    assert link.is_lost


def test_a_password_that_is_asked_for_and_not_there_is_an_error(postgres_server: Server) -> None:
    """Of ours, not of the driver's; and a database that is not there is another."""
    with pytest.raises(StatementFailed) as caught:
        Link(postgres_server.address("nowhere"), {}, 20.0)

    assert caught.value.state == "3D000"
