"""Maintenance: expiry and recounts of an idle engine, and beside its work."""

from __future__ import annotations

from collections.abc import Iterator

from engine.api import (
    CacheGrant,
    LeaseRequest,
    Retention,
)
from tests.checkers import World
from tests.unit.engine.tiny_engines import ask, make_world, run


def test_idle_steps_expire_and_check() -> None:
    """A limit ends on time in an idle engine, and the idle engine recounts the cache."""
    world = make_world(1)
    lease = LeaseRequest(8, Retention("brief", limit_s=10.0))
    run(world, ask(grant=CacheGrant(b"n", leases=(lease,))))
    cached = world.core.stats().cached_blocks
    world.clock.advance(11.0)
    world.core.step()

    assert cached > 0
    assert world.core.stats().cached_blocks == 0


def test_the_cache_is_recounted_once_per_idle_period() -> None:
    """The recount starts after a second without work and is not repeated: a large pool takes a
    while.
    """
    world = make_world(1)
    run(world, ask())
    recounts: list[int] = []

    def recount() -> Iterator[None]:
        for _ in range(2):
            yield
        recounts.append(1)

    world.cache.recount = recount  # type: ignore[method-assign]
    for _ in range(9):
        world.clock.advance(0.5)
        world.core.step()

    assert len(recounts) == 1


def recounting(world: World) -> Iterator[int]:
    """Return a cache that records the pieces of its recounts."""
    pieces: list[int] = []

    def recount() -> Iterator[None]:
        while True:
            pieces.append(1)
            yield

    world.cache.recount = recount  # type: ignore[method-assign]
    world.cache.check = lambda: None  # type: ignore[method-assign]
    while True:
        world.step()
        yield len(pieces)


def test_a_recount_pauses_for_work_and_continues() -> None:
    """A new request waits for one piece of the recount."""
    world = make_world(1)
    run(world, ask("a"))
    pieces = recounting(world)
    next(pieces)
    world.clock.advance(1.0)

    assert [next(pieces), next(pieces)] == [1, 2]
    goes_on = [world.core.is_recounting]
    world.submit(ask("b"))
    assert [next(pieces), next(pieces)] == [2, 2]
    goes_on.append(world.core.is_recounting)
    assert goes_on == [True, False]
    world.settle()
    next(pieces)
    world.clock.advance(1.0)
    assert [next(pieces), next(pieces)] == [3, 4]


def test_a_busy_engine_is_recounted_after_the_check_interval() -> None:
    """One piece runs in each step."""
    world = make_world(1)
    world.submit(ask("a"))
    pieces = recounting(world)
    assert next(pieces) == 0
    world.clock.advance(world.config.check_interval_s)

    assert [next(pieces), next(pieces)] == [1, 2]
