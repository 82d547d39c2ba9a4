"""Paths that wait to be stored: payers take turns, and the longest queue gives up its oldest."""

from __future__ import annotations

from engine.levels.disk.waiting_paths import WaitingPaths
from engine.levels.stored_prefixes import Copy


def ends(payer: bytes, count: int) -> list[Copy]:
    return [Copy(b"n", payer, (number,), None, number) for number in range(count)]


def taken(queue: WaitingPaths) -> list[Copy]:
    return [queue.take() for _ in range(len(queue))]


def test_a_payer_with_one_path_does_not_wait_for_all_of_another() -> None:
    """In one line, thousands of paths of one tenant were written before it."""
    queue = WaitingPaths(100)
    noisy, quiet = ends(b"noisy", 50), ends(b"quiet", 1)
    for end in [*noisy, *quiet]:
        queue.add(end)
    order = taken(queue)

    assert order.index(quiet[0]) <= 1
    assert [end for end in order if end.payer == b"noisy"] == noisy


def test_a_full_queue_gives_up_the_oldest_of_the_payer_with_most() -> None:
    """One tenant's paths do not push out another's."""
    queue = WaitingPaths(4)
    noisy, quiet = ends(b"noisy", 6), ends(b"quiet", 1)
    for end in [*quiet, *noisy]:
        queue.add(end)

    assert len(queue) == 4
    assert {end.serial for end in taken(queue) if end.payer == b"noisy"} == {3, 4, 5}


def test_a_path_that_goes_on_is_the_next_of_its_payer() -> None:
    """Its first runs are stored: the rest hangs on them."""
    queue = WaitingPaths(10)
    first, second, third = ends(b"a", 3)
    queue.add(first)
    queue.add(second)
    queue.add(third, is_next=True)

    assert [end.serial for end in taken(queue)] == [2, 0, 1]
