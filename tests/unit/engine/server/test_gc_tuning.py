"""What the garbage collector looks at in the engine's process, and what it need not.

Whatever belongs to a request or to a block goes by itself: a thousand requests, and nothing of them
is left for a collector to find.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator

import pytest

from engine.api import CacheGrant, Erase, Grammar, LeaseRequest, Quota, Request, Retention, Sampling
from engine.config import EngineConfig
from engine.server.gc_tuning import GROWTH, YOUNG_OBJECTS_MAX, FrozenHeap, peak_bytes
from tests.checkers import World


class Knot:
    """Refers to itself, so that a collector alone finds out that nobody needs it."""

    def __init__(self) -> None:
        self.me = self


class Memory:
    """What the process is said to use."""

    def __init__(self) -> None:
        self.bytes_in_use = 1000

    def __call__(self) -> int:
        return self.bytes_in_use


@pytest.fixture
def memory() -> Iterator[Memory]:
    """Of a heap that has been settled, until the test is over."""
    memory = Memory()
    heap = FrozenHeap(memory)
    heap.settle()
    yield memory
    heap.leave()


def looks() -> list[object]:
    """Enough new objects for two looks at them, and that they are there."""
    return [[] for _ in range(5 * YOUNG_OBJECTS_MAX)]


def test_what_was_looked_at_twice_is_looked_at_no_more(memory: Memory) -> None:
    """A million blocks stopped every step for a second whenever a quarter of them was new."""
    before = gc.get_freeze_count()
    blocks = looks()

    assert gc.get_freeze_count() > before + len(blocks) // 2
    assert len(gc.get_objects()) < len(blocks)


def test_garbage_that_is_young_is_found(memory: Memory) -> None:
    """An exception that holds its own frame, say."""
    knot = weakref.ref(Knot())

    kept = looks()

    assert knot() is None
    del kept


def test_a_process_that_has_grown_looks_at_everything_once(memory: Memory) -> None:
    """Knots that were in use at their second look are lost, until they are many."""
    tied = [Knot() for _ in range(10)]
    lost = [weakref.ref(knot) for knot in tied]
    kept = [looks()]
    del tied
    kept.append(looks())
    missed = [knot() is not None for knot in lost]
    full = [one["collections"] for one in gc.get_stats()][2]

    memory.bytes_in_use = GROWTH * 1000 + 1
    kept += [looks(), looks()]

    assert missed == [True] * 10
    assert [knot() for knot in lost] == [None] * 10
    assert [one["collections"] for one in gc.get_stats()][2] == full + 1
    assert len(gc.get_objects()) < len(kept[0])


def test_leaving_it_leaves_nothing() -> None:
    """Tests share a process; an engine's own ends with it."""
    before = (gc.get_threshold(), list(gc.callbacks), gc.get_freeze_count())
    heap = FrozenHeap()

    heap.settle()
    settled = gc.get_freeze_count()
    heap.leave()

    assert settled > 0
    assert (gc.get_threshold(), list(gc.callbacks), gc.get_freeze_count()) == before


def test_memory_is_counted_in_bytes() -> None:
    """Systems tell it in units of their own. An interpreter takes ten million of them."""
    assert 10**7 < peak_bytes() < 10**12


def test_no_request_and_no_block_leaves_anything_to_collect() -> None:
    """A collector that looks at no old object finds none of these later either.

    Answered, refused, cancelled, late, failed, forked, preempted, held to a grammar, under leases
    that lapse, in namespaces and of payers that are forgotten, in a cache that evicts.
    """
    config = EngineConfig(step_tokens_max=64, prefill_chunk_tokens_max=32, sequences_max=8)
    world = World(config, blocks=64, block_size=4, depth=2, context_tokens=128)
    chance = random.Random(0)
    for number in range(20):
        live(world, number, chance)
    gc.collect()
    gc.disable()
    try:
        for number in range(20, 1020):
            live(world, number, chance)
        while world.core.has_work():
            world.core.step()
        found = gc.collect()
    finally:
        gc.enable()

    stats = world.core.stats()
    assert found == 0
    assert min(stats.preemptions_total, stats.evicted_blocks_total, stats.expired_blocks_total) > 9
    assert world.core.engine_stats.failed_steps > 9


def live(world: World, number: int, chance: random.Random) -> None:
    """One request of some kind, and now and then some steps, an erasure, a step that breaks."""
    kind = number % 8
    namespace = f"own {number}" if number % 3 else f"shared {chance.randrange(20)}"
    leases = (LeaseRequest(8, Retention("short", 0.3, 0.6), f"lease {number}"),)
    world.core.submit(
        Request(
            request_id=str(number),
            tokens=tuple(chance.randrange(2) for _ in range(chance.randrange(1, 60) * (kind < 7))),
            max_tokens=chance.randrange(12),
            grant=CacheGrant(
                namespace.encode(),
                Quota(payer=b"%d" % (number % 50) if number % 2 else b""),
                leases=leases if number % 4 == 0 else (),
            ),
            sampling=Sampling(temperature=0),
            samples=3 if kind == 2 else 1,
            priority=chance.randrange(2),
            deadline_s=0.5 if kind == 3 else None,
            grammar=Grammar("regex", f"a{{{number % 5}}}b*") if kind == 6 else None,
        )
    )
    if kind == 4:
        world.core.cancel(str(number))
    if number % 5 == 0:
        world.clock.advance(0.2)
        for _ in range(6):
            world.core.step()
    if number % 50 == 0:
        world.core.erase(Erase(1, namespace.encode()))
        world.runner.nan_steps.add(world.core.engine_stats.step + 3)
        world.runner.fail_launch.add(world.core.engine_stats.step + 5)
