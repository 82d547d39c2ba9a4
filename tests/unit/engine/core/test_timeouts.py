"""Timeouts: which requests end by a deadline, a drain or a stall, and how."""

from __future__ import annotations

from typing import Any

from engine.core.timeouts import STALLS_MAX, Timeouts
from engine.scheduler.sequence import ActiveRequest
from tests.unit.engine.tiny_engines import ask


def none_inside(active: ActiveRequest) -> bool:
    """No payer is inside its floor."""
    return False


def active_request(arrival: int = 0, **wanted: Any) -> ActiveRequest:
    """Return a request received at time 0."""
    return ActiveRequest(ask(f"r{arrival}", **wanted), arrival, 0.0)


def test_the_end_of_a_drain_ends_every_request_once() -> None:
    """A request that is also overdue ends as a timeout."""
    late, running = active_request(0, deadline_s=5.0), active_request(1)
    timeouts = Timeouts()
    timeouts.drain(7.0)

    before = list(timeouts.overdue([running], 6.9))
    ended = [(one.active, one.ending) for one in timeouts.overdue([late, running], 7.0)]

    assert timeouts.is_draining
    assert before == []
    assert ended == [(late, "timeout"), (running, "shutdown")]


def test_a_stall_fails_the_first_request() -> None:
    """By priority, then by arrival. A request that waits for its grammar does not count."""
    first, urgent = active_request(0), active_request(1, priority=1)
    timeouts = Timeouts()

    ends = [timeouts.find_stalled([first, urgent], none_inside) for _ in range(STALLS_MAX)]

    assert ends[:-1] == [None] * (STALLS_MAX - 1)
    assert ends[-1] is not None
    assert (ends[-1].active, ends[-1].code) == (urgent, "kv_promised")
    assert timeouts.find_stalled([first], none_inside) is None, "it is counted anew"


def test_a_payer_inside_its_floor_is_given_up_last() -> None:
    """What it lacks is its own; another one holds it."""
    ours, urgent, theirs = active_request(0), active_request(1, priority=1), active_request(2)
    timeouts = Timeouts()
    ends = [
        timeouts.find_stalled([ours, urgent, theirs], lambda one: one is not theirs)
        for _ in range(STALLS_MAX)
    ]

    assert ends[-1] is not None
    assert ends[-1].active is theirs


def test_progress_resets_the_stall_count() -> None:
    """Steps without requests do not count."""
    one, timeouts = active_request(), Timeouts()

    for _ in range(2):
        assert timeouts.find_stalled([one], none_inside) is None
        timeouts.record_progress()
        assert timeouts.find_stalled([one], none_inside) is None
        assert timeouts.find_stalled([], none_inside) is None
