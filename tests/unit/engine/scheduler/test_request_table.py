"""Who is here, and how much of it waits."""

from __future__ import annotations

import pytest

from engine.api import CacheGrant, Request
from engine.errors import InvariantViolation
from engine.scheduler.request_table import RequestTable


def request(name: str, tokens: int) -> Request:
    return Request(name, (1,) * tokens, 1, CacheGrant(b"n"))


def test_what_waits_is_counted_from_coming_to_starting() -> None:
    """A queue has room for so many tokens; whoever ends unstarted makes room as well."""
    roster = RequestTable()
    first, second = roster.add(request("a", 3), 0.0), roster.add(request("b", 5), 0.0)
    counts = [roster.waiting_tokens]

    roster.mark_started(first, 1.0)
    counts.append(roster.waiting_tokens)
    roster.remove(second)
    counts.append(roster.waiting_tokens)
    roster.remove(first)
    counts.append(roster.waiting_tokens)

    assert counts == [8, 5, 0, 0]
    roster.check()


def test_an_id_names_those_who_are_here() -> None:
    """After the end it is free again, and its sequences answer to no number."""
    roster = RequestTable()
    work = roster.add(request("a", 1), 0.0)
    sequence = roster.add_sequence(work)
    found = (roster.get("a"), roster.sequence(sequence.sequence_id), "a" in roster, list(roster))

    roster.remove(work)

    assert found == (work, sequence, True, [work])
    assert roster.get("a") is None
    assert roster.sequence(sequence.sequence_id) is None
    assert "a" not in roster
    assert len(roster) == 0


def test_numbers_are_not_given_twice() -> None:
    """A runner may still be told of a sequence whose request has ended."""
    roster = RequestTable()
    first = roster.add(request("a", 1), 0.0)
    number = roster.add_sequence(first).sequence_id
    roster.remove(first)

    second = roster.add(request("a", 1), 0.0)

    assert roster.add_sequence(second).sequence_id > number
    assert second.arrival > first.arrival


def test_a_count_that_is_wrong_is_found() -> None:
    """A request that started unseen."""
    roster = RequestTable()
    work = roster.add(request("a", 4), 0.0)

    work.started_at_s = 1.0

    with pytest.raises(InvariantViolation, match="4 waiting tokens, recounted: 0"):
        roster.check()
