"""Garbage collection in the engine process.

Objects of a request or of a block form no cycles: after a thousand requests a collector finds
nothing.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator

import pytest

from engine.api import CacheGrant, Erase, Grammar, LeaseRequest, Quota, Request, Retention, Sampling
from engine.config import EngineConfig
from engine.server.gc_tuning import GROWTH_FACTOR, YOUNG_OBJECTS_MAX, FrozenHeap, peak_bytes
from tests.checkers import World


class Cycle:
    """An object that refers to itself, so that only a collector frees it."""

    def __init__(self) -> None:
        self.me = self


class FakeMemory:
    """The memory that the process is said to use."""

    def __init__(self) -> None:
        self.bytes_in_use = 1000

    def __call__(self) -> int:
        return self.bytes_in_use


@pytest.fixture
def memory() -> Iterator[FakeMemory]:
    """The memory of a settled heap, for the length of the test."""
    memory = FakeMemory()
    heap = FrozenHeap(memory)
    heap.settle()
    yield memory
    heap.restore()


def collect_twice() -> list[object]:
    """Make enough objects for two young collections, and return them."""
    return [[] for _ in range(5 * YOUNG_OBJECTS_MAX)]


def test_freezes_objects_that_survive_two_collections(memory: FakeMemory) -> None:
    """Scanning a million blocks stopped every step for a second whenever a quarter of them was
    new."""
    before = gc.get_freeze_count()
    blocks = collect_twice()

    assert gc.get_freeze_count() > before + len(blocks) // 2
    assert len(gc.get_objects()) < len(blocks)


def test_collects_young_garbage(memory: FakeMemory) -> None:
    """Such as an exception that holds its own frame."""
    knot = weakref.ref(Cycle())

    kept = collect_twice()

    assert knot() is None
    del kept


@pytest.mark.slow
def test_grown_process_scans_everything_once(memory: FakeMemory) -> None:
    """Cycles in use at their second scan leak until there are many."""
    tied = [Cycle() for _ in range(10)]
    lost = [weakref.ref(knot) for knot in tied]
    kept = [collect_twice()]
    del tied
    kept.append(collect_twice())
    missed = [knot() is not None for knot in lost]
    full = [one["collections"] for one in gc.get_stats()][2]

    memory.bytes_in_use = GROWTH_FACTOR * 1000 + 1
    kept += [collect_twice(), collect_twice()]

    assert missed == [True] * 10
    assert [knot() for knot in lost] == [None] * 10
    assert [one["collections"] for one in gc.get_stats()][2] == full + 1
    assert len(gc.get_objects()) < len(kept[0])


def test_restore_resets_the_collector() -> None:
    """Tests share a process."""
    gc.unfreeze()  # conftest freezes modules and tests, and `restore` releases everything
    before = (gc.get_threshold(), list(gc.callbacks), gc.get_freeze_count())
    heap = FrozenHeap()

    heap.settle()
    settled = gc.get_freeze_count()
    heap.restore()

    assert settled > 0
    assert (gc.get_threshold(), list(gc.callbacks), gc.get_freeze_count()) == before


def test_memory_is_counted_in_bytes() -> None:
    """Operating systems report it in different units. An interpreter takes at least ten million
    bytes."""
    assert 10**7 < peak_bytes() < 10**12


@pytest.mark.slow
def test_requests_and_blocks_leave_no_garbage() -> None:
    """A collector that skips old objects would never find it. Requests end, are refused, cancelled,
    late, failed, forked, preempted, constrained by a grammar, under leases that lapse, in
    namespaces and of payers that are forgotten, in a cache that evicts."""
    config = EngineConfig(step_tokens_max=64, prefill_chunk_tokens_max=32, sequences_max=8)
    world = World(config, blocks=64, block_size=4, depth=2, context_tokens=128)
    chance, failed = random.Random(0), list[int]()
    world.core.on_step_failed = lambda number, error: failed.append(number)
    for number in range(20):
        live(world, number, chance)
    gc.collect()
    gc.freeze()  # what other tests have left is not looked at
    gc.disable()
    try:
        for number in range(20, 1020):
            live(world, number, chance)
        while world.core.has_work():
            world.core.step()
        found = gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()

    stats = world.core.stats()
    assert found == 0
    assert min(stats.preemptions_total, stats.evicted_blocks_total, stats.expired_blocks_total) > 9
    assert len(failed) > 9


def live(world: World, number: int, chance: random.Random) -> None:
    """Run one request of some kind, and sometimes steps, an erasure, or a step that fails."""
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
