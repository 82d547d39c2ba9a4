"""What loads and offloads cost the engine's thread: python -m tests.bench.load_cost [--repeats 5]

A real core, scheduler, cache and levels, over a runner and a transfer engine that do nothing. A
prompt of 8,192 tokens (512 blocks) has copies in host memory and comes back to a full pool, so that
as many blocks are evicted for it, and the next 256 are copied. `load`: microseconds a block of each
phase; `first copy`: all of them until the first moves are submitted. `offload`: the same for the
512 blocks of a prompt under a lease, and others, that are copied to host memory. Processor time of
this thread, medians and the spread over repeats; `unit` is the time of a fixed piece of Python in
the same run, to compare machines and runs by.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from engine.api import CacheGrant, Finished, LeaseRequest, Quota, Request, Retention, Sampling
from engine.cache import PrefixCache
from engine.config import EngineConfig, LevelsConfig
from engine.core.core import Core
from engine.levels.levels import Levels
from tests.fakes import FakeClock
from tests.paced_engine import AT_ONCE, PacedRunner, PacedTransfer

BLOCK, BLOCKS = 16, 512
POOL = 4 * BLOCKS
HOUR = Retention("hour", promise_s=3600.0, limit_s=7200.0)
PAYER = Quota(payer=b"one")


class Phases:
    """Processor seconds by phase; a phase inside another one is not counted in that."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.first_copy_s = 0.0
        self._open: list[str] = []
        self._since_s = 0.0

    def wrap(self, owner: Any, names: dict[str, str]) -> None:
        """Count calls of methods of an object, by the phases that their names have here."""
        for name, phase in names.items():
            setattr(owner, name, self._timed(getattr(owner, name), phase))

    def start(self, phase: str) -> None:
        """Begin to count, with all that no inner phase takes in `phase`."""
        self.seconds.clear()
        self.first_copy_s = 0.0
        self._open = [phase]
        self._since_s = time.thread_time()

    def _timed(self, call: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def timed(*args: Any, **settings: Any) -> Any:
            self._switch()
            if phase == "submit" and not self.first_copy_s:
                self.first_copy_s = sum(self.seconds.values())
            self._open.append(phase)
            try:
                return call(*args, **settings)
            finally:
                self._switch()
                self._open.pop()

        return timed

    def _switch(self) -> None:
        now_s = time.thread_time()
        if self._open:
            phase = self._open[-1]
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now_s - self._since_s
        self._since_s = now_s


class LeveledEngine:
    """An engine with host memory below its pool, and its phases."""

    def __init__(self) -> None:
        clock = FakeClock()
        self.cache = PrefixCache(blocks=POOL, block_size=BLOCK)
        self.transfer = PacedTransfer(clock, AT_ONCE, 16 * POOL)
        config = LevelsConfig(host_mib=1, host_keeps_promises=True)
        self.levels = Levels(self.cache, config, self.transfer)
        self.clock = clock
        self.core = Core(
            self.cache,
            PacedRunner(clock, AT_ONCE),
            EngineConfig(step_tokens_max=8192, prefill_chunk_tokens_max=8192, levels=config),
            clock,
            vocab_size=50_000,
            context_tokens=16_384,
            levels=self.levels,
        )
        self.phases = Phases()
        self._names = 0
        levels, cache = self.levels, self.cache
        self.phases.wrap(cache, {"find": "match", "begin": "match", "commit": "commit",
                                 "grow": "evict and allocate"})  # fmt: skip
        self.phases.wrap(levels, {"plan": "plan", "begin": "begin", "take_parts": "parts",
                                  "take_ended": "ended", "committed_load": "link",
                                  "used": "match"})  # fmt: skip
        self.phases.wrap(self.transfer, {"submit": "submit", "poll": "poll"})
        self.phases.wrap(levels.loads, {"next_moves": "moves", "take": "outcomes"})
        self.phases.wrap(levels.offloading, {"next_moves": "offloads", "take": "offloaded"})

    def submit(self, tokens: tuple[int, ...], grant: CacheGrant) -> None:
        """Take a request for one token."""
        self._names += 1
        name = f"r{self._names}"
        self.core.submit(Request(name, tokens, 1, grant, Sampling(temperature=0)))

    def run(self) -> int:
        """Step until the requests have ended and nothing moves; return the tokens cached."""
        cached = 0
        while self.core.has_work() or self.levels.is_busy:
            self.clock.advance(0.0001)
            for event in self.core.step():
                if isinstance(event, Finished):
                    assert event.ending == "done", event
                    cached += event.usage.cached_tokens
        return cached

    def push_out(self, seed: int) -> None:
        """Fill the pool with prompts that nothing shares."""
        for number in range(POOL // BLOCKS + 1):
            self.submit(prompt(1000 * seed + number), CacheGrant(b"push", PAYER))
            self.run()


def prompt(seed: int) -> tuple[int, ...]:
    """Return random tokens of so many whole blocks, and one more."""
    chance = random.Random(seed)
    return tuple(chance.choices(range(50_000), k=BLOCK * BLOCKS + 1))


def unit_s() -> float:
    """Return the processor seconds of a fixed piece of Python: dicts, tuples and calls."""
    began_s = time.thread_time()
    found: dict[tuple[int, int], int] = {}
    for number in range(100_000):
        key = (number & 1023, number % 7)
        found[key] = found.get(key, 0) + max(1, number & 3)
    return time.thread_time() - began_s


def measure_load(repeats: int) -> list[dict[str, float]]:
    """Return the seconds of each phase of loads of a prompt into a full pool."""
    engine, found, tokens = LeveledEngine(), [], prompt(1)
    engine.submit(tokens, CacheGrant(b"kept", PAYER))
    engine.run()
    for repeat in range(repeats):
        engine.push_out(repeat + 1)
        engine.submit(tokens, CacheGrant(b"kept", PAYER))
        before = engine.levels.loads.loaded_blocks["host"]
        gc.collect()
        engine.phases.start("rest")
        cached = engine.run()
        engine.phases.seconds["all"] = sum(engine.phases.seconds.values())
        engine.phases.seconds["first copy"] = engine.phases.first_copy_s
        assert cached == BLOCK * BLOCKS
        assert engine.levels.loads.loaded_blocks["host"] == before + BLOCKS
        found.append(engine.phases.seconds.copy())
    return found


def measure_offload(repeats: int) -> list[dict[str, float]]:
    """Return the seconds of each phase of offloads of a prompt under a lease."""
    engine, found = LeveledEngine(), []
    for repeat in range(repeats):
        engine.push_out(repeat + 1)
        lease = LeaseRequest(BLOCK * BLOCKS, HOUR, f"lease {repeat}")
        engine.submit(prompt(-repeat - 1), CacheGrant(b"kept", PAYER, leases=(lease,)))
        while engine.core.has_work() and not engine.levels.offloading.has_promised:
            engine.core.step()
        before = engine.levels.offloading.offloaded
        gc.collect()
        engine.phases.start("rest")
        engine.run()
        engine.phases.seconds["all"] = sum(engine.phases.seconds.values())
        copied = engine.levels.offloading.offloaded - before
        assert copied >= BLOCKS
        for phase in engine.phases.seconds:
            engine.phases.seconds[phase] *= BLOCKS / copied
        found.append(engine.phases.seconds.copy())
    return found


def print_table(name: str, found: list[dict[str, float]]) -> None:
    """Print a table: microseconds a block."""
    print(f"{name:20} {'median':>8} {'least':>8} {'most':>8}   us a block")
    for phase in sorted(found[0], key=lambda one: -found[0][one]):
        times = sorted(one.get(phase, 0.0) / BLOCKS * 1e6 for one in found)
        middle = statistics.median(times)
        print(f"  {phase:18} {middle:8.2f} {times[0]:8.2f} {times[-1]:8.2f}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    gc.disable()
    units = [unit_s() for _ in range(5)]
    print_table("load", measure_load(options.repeats))
    print_table("offload", measure_offload(options.repeats))
    units += [unit_s() for _ in range(5)]
    print(f"unit: {statistics.median(units) * 1e3:.1f} ms ({min(units) * 1e3:.1f})")


if __name__ == "__main__":
    main()
