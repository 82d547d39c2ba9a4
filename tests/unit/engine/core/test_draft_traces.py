"""What an engine decides beside tokens is the same with drafts: hits, leases, facts of the cache,
copies on levels. Two engines live the same seeded life, one of them with an oracle's drafts.

Requests come one after the other: a step that ends sooner may let a request that waits find less,
with drafts or without.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from msgspec import structs

from engine.api import CacheGrant, LeaseRequest, Quota, Request, Retention, Sampling
from engine.cache import Fact
from engine.cache.events import Committed
from tests.checkers import World
from tests.fake_levels import whole_of
from tests.grammars import END
from tests.unit.engine.core.test_drafts import RIGHT, told
from tests.unit.engine.levels.leveled_worlds import LeveledWorld, ask
from tests.unit.engine.tiny_engines import make_world, run

SEEDS = 2
REQUESTS = 24
LIFE_REQUESTS = 6
"""Of each of the engines that live one after another over the same levels."""
CLASSES = (
    Retention("five", promise_s=5, limit_s=10),
    Retention("hour", promise_s=30, limit_s=60, clock="request_start"),
    Retention("fixed", limit_s=20, clock="absolute", renewed_on_read=False, pinned=True),
)
QUOTAS = {
    b"north": Quota(floor_blocks=4, payer=b"north"),
    b"south": Quota(ceiling_blocks=40, payer=b"south"),
}
COUNTS = (
    "free_blocks",
    "cached_blocks",
    "evicted_blocks_total",
    "expired_blocks_total",
    "copied_blocks_total",
    "prompt_tokens_total",
    "cached_tokens_total",
    "computed_tokens_total",
    "output_tokens_total",
)
groups = pytest.mark.parametrize("windows", [(), (5,)], ids=["full", "windows"])
rights = pytest.mark.parametrize("right", RIGHT)


def life(seed: int, samples: int) -> Iterator[tuple[Request, float]]:
    """Yield requests of at most so many samples, often going on from an earlier prompt, each with
    the seconds before it.
    """
    chance, said = random.Random(seed), list[tuple[int, ...]]([(0,)])
    for number in range(REQUESTS):
        begun = chance.choice(said[-6:])[: chance.randrange(28)]
        tokens = (*begun, *(chance.randrange(2) for _ in range(chance.randint(1, 9))))
        said.append(tokens)
        namespace = chance.choice(sorted(QUOTAS))
        leases = tuple(
            LeaseRequest(chance.randint(0, len(tokens)), chance.choice(CLASSES), lease_id)
            for lease_id in chance.choice(["", "", "a", "ab"])
        )
        request = ask(
            f"r{number}",
            tokens,
            max_tokens=chance.choice([1, 5, 11]),
            grant=CacheGrant(namespace, QUOTAS[namespace], leases, write=chance.random() < 0.9),
            sampling=Sampling(temperature=chance.choice([0.0, 1.0]), seed=chance.randrange(3)),
            samples=chance.choice([1, 1, samples]),
            stop_token_ids=(END,) if chance.random() < 0.3 else (),
        )
        yield request, chance.choice([0.0, 0.5, 4.0, 25.0])


def counts(facts: list[Fact]) -> list[object]:
    """Return a request's facts; what it made findable is summed: drafts commit several at once."""
    sums: Counter[tuple[bytes, str]] = Counter()
    others: list[object] = []
    for fact in facts:
        if isinstance(fact, Committed):
            for name in ("blocks", "tokens", "new_blocks"):
                sums[fact.namespace, name] += getattr(fact, name)
        else:
            others.append(fact)
    facts.clear()
    return [*others, sorted(sums.items())]


def decided(world: World, request: Request, facts: list[Fact]) -> list[object]:
    """Return what an engine has decided for a request that has ended."""
    stats = structs.asdict(world.core.stats())
    return [
        told(world, request),
        *counts(facts),
        *(world.cache.use(namespace) for namespace in QUOTAS),
        *(stats[name] for name in COUNTS),
    ]


@cache
def device_life(seed: int, right: float | None, windows: tuple[int, ...]) -> list[list[object]]:
    """Return what an engine decides for each request, in a pool that evicts.

    Of one sample each: of two, one ends in time for the other to take its blocks, or does not.
    """
    blocks = 20 * (1 + len(windows))
    world = make_world(1, blocks=blocks, windows=windows, draft_right=right)
    facts: list[Fact] = []
    world.cache.facts = facts.append
    trace: list[list[object]] = []
    for request, seconds in life(seed, samples=1):
        world.clock.advance(seconds)
        run(world, request)
        trace.append(decided(world, request, facts))
    assert world.core.stats().evicted_blocks_total > 20
    return trace


@cache
def leveled_life(seed: int, right: float | None, windows: tuple[int, ...]) -> list[list[object]]:
    """Return what engines decide that live one after another over the same levels.

    The device has room for each life, so that no copy waits for a step that comes too late.
    """
    more: dict[str, Any] = {"formats": whole_of(1 + len(windows))} if windows else {}
    world = LeveledWorld(
        blocks=300, slots=600, is_kept=True, windows=windows, draft_right=right, **more
    )
    facts: list[Fact] = []
    trace: list[list[object]] = []
    for number, (request, seconds) in enumerate(life(seed, samples=2)):
        if number % LIFE_REQUESTS == 0:
            world.restart()
            world.cache.facts = facts.append
        world.pass_s(seconds)
        world.run(request)
        world.pass_s(0.0)  # a promise moves below in a step after the last
        copies = sorted(record.namespace for record in world.records.values())
        trace.append([*decided(world, request, facts), copies])
    assert any(world.loaded(request.request_id) for request, _ in life(seed, samples=2))
    return trace


@groups
@rights
@pytest.mark.parametrize("live", [device_life, leveled_life])
def test_hits_leases_facts_and_copies_are_those_without_drafts(
    live: Any, right: float, windows: tuple[int, ...]
) -> None:
    """With promises, quotas and forks, and where blocks are evicted or come from levels."""
    for seed in range(SEEDS):
        plain, drafted = live(seed, None, windows), live(seed, right, windows)

        for number, (wanted, found) in enumerate(zip(plain, drafted, strict=True)):
            assert found == wanted, (seed, number)
