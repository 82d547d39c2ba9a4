"""Cost of the cache's calls at scale: python -m tests.bench.cache_scale [payers] [blocks]

A full pool in namespaces of a few blocks each, with one payer per namespace or one payer for all; a
third of the prompts is under a lease. Prints processor time of each call under pressure, of a
heartbeat's stats, and of the recount.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
from collections.abc import Callable
from time import process_time

from engine.api import LeaseRequest, Quota, Retention
from engine.cache import PrefixCache
from tests.bench.timing import seconds_of

SIZE = 16
HOUR = Retention("hour", promise_s=3600, limit_s=7200)
REPEATS = 60


class FullCache:
    """A cache full of `namespaces` with equal numbers of blocks."""

    def __init__(self, namespaces: int, blocks: int, *, is_joint: bool) -> None:
        self.chance = random.Random(1)
        self.cache = PrefixCache(blocks=blocks, block_size=SIZE)
        self.is_joint = is_joint
        self.now_s = 0.0
        each = blocks // namespaces
        for number in range(namespaces):
            self.run_prompt(number, each, is_kept=number % 3 == 0)

    def quota(self, number: int) -> Quota:
        return Quota(payer=b"one" if self.is_joint else number.to_bytes(4, "big"))

    def run_prompt(self, number: int, blocks: int, *, is_kept: bool = False) -> None:
        """Compute and release a new prompt."""
        self.now_s += 0.001
        tokens = [self.chance.randrange(50_000) for _ in range(blocks * SIZE)]
        leases = (LeaseRequest(len(tokens), HOUR, f"l{number}"),) if is_kept else ()
        name, quota, now_s = number.to_bytes(4, "big"), self.quota(number), self.now_s
        table = self.cache.begin(name, tokens, now_s, quota=quota, leases=leases)
        assert self.cache.grow(table, len(tokens), now_s)
        self.cache.commit(table, tokens, len(tokens), now_s)
        self.cache.release(table, tokens, now_s)


def show(title: str, act: Callable[[], object]) -> None:
    """Print one line."""
    spent_s = seconds_of(act, REPEATS, process_time)
    median, worst = 1e6 * statistics.median(spent_s), 1e6 * max(spent_s)
    print(f"  {title:44} {median:10.1f} us   worst {worst:10.1f}")


def measure(namespaces: int, blocks: int, *, is_joint: bool) -> None:
    """Print one table."""
    began = process_time()
    crowd = FullCache(namespaces, blocks, is_joint=is_joint)
    took_s = process_time() - began
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    who = "one payer" if is_joint else "a payer each"
    print(
        f"{namespaces:,} namespaces, {who}, {blocks:,} blocks:"
        f" filled at {took_s / blocks * 1e6:.1f} us a block, {peak_mib} MiB at most until here"
    )
    cache, chance, now_s = crowd.cache, crowd.chance, crowd.now_s
    show("one block more, evicting", lambda: crowd.run_prompt(chance.randrange(namespaces), 1))
    show("32 blocks more, evicting", lambda: crowd.run_prompt(chance.randrange(namespaces), 32))
    show("the same under a lease", lambda: crowd.run_prompt(chance.randrange(9), 1, is_kept=True))
    fresh = iter(range(namespaces, namespaces + 10 * REPEATS))
    show("a payer that comes new", lambda: crowd.run_prompt(next(fresh), 1))
    quota = crowd.quota(1)
    show("available", lambda: cache.available_blocks(b"\0\0\0\1", quota))
    show("room", lambda: cache.max_sequence_tokens(b"\0\0\0\1", quota))
    show("expire, nothing due", lambda: cache.expire(now_s))
    show("stats", cache.stats)
    (check_s,) = seconds_of(cache.check, clock=process_time)
    print(f"  {'check':44} {check_s * 1e3:10.1f} ms")


def main() -> None:
    """Print three tables: few payers, many payers, one payer of many namespaces."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("payers", nargs="?", type=int, default=20_000)
    parser.add_argument("blocks", nargs="?", type=int, default=100_000)
    given = parser.parse_args()
    measure(20, given.blocks, is_joint=False)
    measure(given.payers, given.blocks, is_joint=False)
    measure(given.payers, given.blocks, is_joint=True)


if __name__ == "__main__":
    main()
