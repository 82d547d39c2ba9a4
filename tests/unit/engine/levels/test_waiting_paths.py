"""Paths that wait to be stored: payers take turns, and the longest queue gives up its oldest."""

from __future__ import annotations

from engine.cache.tree.prefix_tree import Node
from engine.levels.disk.waiting_paths import WaitingPaths


def ends(count: int) -> list[Node]:
    return [Node((number,), None, number, None) for number in range(count)]


def taken(queue: WaitingPaths) -> list[Node]:
    return [queue.take() for _ in range(len(queue))]


def test_a_payer_with_one_path_does_not_wait_for_all_of_another() -> None:
    """In one line, thousands of paths of one tenant were written before it."""
    queue = WaitingPaths(100)
    noisy, (quiet,) = ends(50), ends(1)
    for end in noisy:
        queue.add(b"noisy", end)
    queue.add(b"quiet", quiet)
    order = taken(queue)

    assert order.index(quiet) <= 1
    assert [end for end in order if end is not quiet] == noisy


def test_a_full_queue_gives_up_the_oldest_of_the_payer_with_most() -> None:
    """One tenant's paths do not push out another's."""
    queue = WaitingPaths(4)
    noisy, (quiet,) = ends(6), ends(1)
    queue.add(b"quiet", quiet)
    for end in noisy:
        queue.add(b"noisy", end)
    left = taken(queue)

    assert len(left) == 4
    assert set(left) == {quiet, *noisy[3:]}


def test_a_path_that_goes_on_is_the_next_of_its_payer() -> None:
    """Its first runs are stored: the rest hangs on them."""
    queue = WaitingPaths(10)
    first, second, third = ends(3)
    queue.add(b"a", first)
    queue.add(b"a", second)
    queue.add(b"a", third, is_next=True)

    assert taken(queue) == [third, first, second]
