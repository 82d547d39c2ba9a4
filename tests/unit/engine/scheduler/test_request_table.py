"""The request table: live requests, and the waiting tokens among them."""

from __future__ import annotations

import pytest

from engine.api import CacheGrant, Request
from engine.errors import InvariantViolation
from engine.scheduler.request_table import RequestTable


def request(name: str, tokens: int) -> Request:
    return Request(name, (1,) * tokens, 1, CacheGrant(b"n"))


def test_tokens_count_as_waiting_from_arrival_to_start() -> None:
    """A request that ends before it starts frees its room in the queue as well."""
    table = RequestTable()
    first, second = table.add(request("a", 3), 0.0), table.add(request("b", 5), 0.0)
    counts = [table.waiting_tokens]

    table.mark_started(first, 1.0)
    counts.append(table.waiting_tokens)
    table.remove(second)
    counts.append(table.waiting_tokens)
    table.remove(first)
    counts.append(table.waiting_tokens)

    assert counts == [8, 5, 0, 0]
    table.check()


def test_an_id_names_a_live_request_only() -> None:
    """After the end the id is free again, and its sequences have no id."""
    table = RequestTable()
    work = table.add(request("a", 1), 0.0)
    sequence = table.add_sequence(work)
    found = (table.get("a"), table.sequence(sequence.sequence_id), "a" in table, list(table))

    table.remove(work)

    assert found == (work, sequence, True, [work])
    assert table.get("a") is None
    assert table.sequence(sequence.sequence_id) is None
    assert "a" not in table
    assert len(table) == 0


def test_sequence_ids_are_not_reused() -> None:
    """The runner may still have to be told about a sequence of a finished request."""
    table = RequestTable()
    first = table.add(request("a", 1), 0.0)
    number = table.add_sequence(first).sequence_id
    table.remove(first)

    second = table.add(request("a", 1), 0.0)

    assert table.add_sequence(second).sequence_id > number
    assert second.arrival > first.arrival


def test_the_check_finds_a_wrong_count() -> None:
    table = RequestTable()
    work = table.add(request("a", 4), 0.0)

    work.started_at_s = 1.0

    with pytest.raises(InvariantViolation, match=r"waiting requests .* recounted"):
        table.check()
