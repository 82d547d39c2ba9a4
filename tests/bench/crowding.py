"""Computed tokens with a small pool and a common prompt: python -m tests.bench.crowding

Counts, not times, over the token oracle; the figures of decisions 0004, 0006 and 0029. The second
line of each pool is with a host level as large as four pools, whose moves take a turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from engine.api import CacheGrant, Request, Sampling
from engine.cache import PrefixCache
from engine.config import EngineConfig, LevelsConfig
from engine.core.core import Core
from engine.levels.levels import Levels
from tests.checkers import MakeLevels, World
from tests.fake_levels import FakeTransferEngine, Weather
from tests.fakes import FakeRunner

GREEDY = Sampling(temperature=0)


class WithoutSharing(Core):
    """A core whose requests do not wait for a prefix that another one computes."""

    def submit(self, request: Request) -> None:
        """Submit, then stop waiting."""
        super().submit(request)
        work = self.requests.get(request.request_id)
        if work is not None:
            work.sequences[0].may_wait = False


def host_of(blocks: int) -> MakeLevels:
    """Return what makes a host level of `blocks` slots."""

    def make(cache: PrefixCache, runner: Callable[[], FakeRunner]) -> Levels:
        memory = FakeTransferEngine(runner, blocks, random.Random(1), Weather())
        return Levels(cache, LevelsConfig(host_mib=1, host_tokens_min=4), memory)

    return make


def world(
    blocks: int,
    config: EngineConfig,
    make_core: type[Core] = Core,
    make_levels: MakeLevels | None = None,
) -> World:
    """Return an engine with blocks of four tokens over two-token prompts."""
    return World(
        config,
        blocks=blocks,
        block_size=4,
        context_tokens=4000,
        promises=False,
        make_core=make_core,
        make_levels=make_levels,
    )


def words(chance: random.Random, count: int) -> tuple[int, ...]:
    """Return a unique prompt."""
    return tuple(chance.randrange(2) for _ in range(count))


def preempt(blocks: int, make_levels: MakeLevels | None = None) -> str:
    """Run 64 requests of four namespaces, eight at once, over a pool of `blocks`."""
    chance = random.Random(1)
    config = EngineConfig(step_tokens_max=64, prefill_chunk_tokens_max=32, sequences_max=8)
    crowd = world(blocks, config, make_levels=make_levels)
    for index in range(64):
        tokens = words(chance, chance.randrange(20, 60))
        outputs, grant = chance.randrange(4, 60), CacheGrant(bytes([index % 4]))
        crowd.submit(Request(f"r{index}", tokens, outputs, grant, GREEDY))
    crowd.settle()
    used = [s.finished.usage for s in crowd.streams.values() if s.finished is not None]
    often = [usage.preemptions for usage in used]
    again = sum(usage.recomputed_tokens for usage in used)
    loaded = crowd.cache.block_size * sum(level.loaded_total for level in crowd.core.stats().levels)
    return (
        f"{blocks:6} {crowd.core.engine_stats.step:6} {sum(map(bool, often)):10} {max(often):5}"
        f" {again:6} of {crowd.runner.computed_tokens:6} {loaded:6}"
    )


def race(make_core: type[Core]) -> str:
    """Run 16 concurrent requests that share 1,024 tokens and have 64 of their own."""
    chance = random.Random(1)
    crowd = world(2000, EngineConfig(sequences_max=16), make_core)
    shared = words(chance, 1024)
    for index in range(16):
        own = words(chance, 64)
        crowd.submit(Request(f"r{index}", (*shared, *own), 1, CacheGrant(b"n"), GREEDY))
    crowd.settle()
    return (
        f"{make_core.__name__:10} {crowd.runner.computed_tokens:6} {crowd.core.engine_stats.step:6}"
    )


def main() -> None:
    """Print two tables."""
    print("blocks  steps  preempted  most  computed again  loaded")
    for blocks in (160, 80, 60, 40):
        print(preempt(blocks))
        print(preempt(blocks, host_of(4 * blocks)))
    print("\nracing   computed  steps")
    for make_core in (Core, WithoutSharing):
        print(race(make_core))


if __name__ == "__main__":
    main()
