"""Benchmark of the cache's calls, in microseconds: python -m tests.bench.cache_cost"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from time import perf_counter

from engine.api import LeaseRequest, Retention
from engine.cache import PrefixCache
from tests.bench.timing import seconds_of

BLOCK, REPEATS = 16, 200
HOUR = Retention("hour", promise_s=3600, limit_s=7200)
LONG = 8_192
WINDOWS = (512,) * 5
LEASES = (LeaseRequest(LONG, HOUR, "l"),)


def show(name: str, seconds: list[float]) -> None:
    """Print one line."""
    median, worst = 1e6 * statistics.median(seconds), 1e6 * max(seconds)
    print(f"{name:66} {median:10.1f} us   worst {worst:10.1f}")


def write(cache: PrefixCache, name: bytes, tokens: list[int], *, is_leased: bool) -> None:
    """Compute and release a prompt."""
    table = cache.begin(name, tokens, 0.0, leases=LEASES if is_leased else ())
    cache.grow(table, len(tokens), 0.0)
    cache.commit(table, tokens, len(tokens), 0.0)
    cache.release(table, tokens, 0.0)


def recounting(chance: random.Random) -> tuple[float, list[float]]:
    """Time a recount of 55,000 leased blocks in 110 namespaces, in all and by piece."""
    cache = PrefixCache(blocks=64_000, block_size=BLOCK)
    for number in range(110):
        tokens = [chance.randrange(50_000) for _ in range(500 * BLOCK)]
        write(cache, b"%d" % number, tokens, is_leased=True)
    recount, pieces = cache.recount(), []
    while True:
        start = perf_counter()
        is_over = next(recount, True)
        pieces.append(perf_counter() - start)
        if is_over:
            return sum(pieces), pieces


def main() -> None:
    """Print one line per call."""
    show_calls("", ())
    show_calls("five windows of 512: ", WINDOWS)
    whole, pieces = recounting(random.Random(1))
    show("recount, 55,000 blocks under leases, in all", [whole])
    show("the same, one piece of it", pieces)


def show_calls(label: str, windows: tuple[int, ...]) -> None:
    """Time the calls of a cache with a KV group for each window beside the first."""
    chance = random.Random(1)
    cache = PrefixCache(blocks=60_000, block_size=BLOCK, windows=windows)
    prompt = [chance.randrange(50_000) for _ in range(LONG)]
    fresh = list(prompt)
    write(cache, b"plain", prompt, is_leased=False)
    write(cache, b"leased", prompt, is_leased=True)
    table = cache.begin(b"a", fresh, 0.0)
    cache.grow(table, LONG, 0.0)
    cache.commit(table, fresh, LONG, 0.0)

    def admit(name: bytes, leases: tuple[LeaseRequest, ...] = ()) -> None:
        """Begin and release a prompt as the scheduler does."""
        found = cache.find(name, prompt, 1.0)
        cache.count_unpinned(found)
        begun = cache.begin(name, prompt, 1.0, found=found, leases=leases)
        cache.release(begun, prompt, 1.0, keep=False)

    def fork() -> None:
        cache.release(cache.fork(table), fresh, 1.0, keep=False)

    def decode() -> None:
        cache.grow(table, len(fresh), 1.0)
        cache.commit(table, fresh, len(fresh), 1.0)

    def fill() -> None:
        fresh.extend(chance.randrange(50_000) for _ in range(BLOCK))
        decode()

    calls: dict[str, Callable[[], object]] = {
        "find + begin + release, 8,192 tokens cached": lambda: admit(b"plain"),
        "the same under a lease, and asking for it": lambda: admit(b"leased", LEASES),
        "find, 8,192 tokens cached": lambda: cache.find(b"plain", prompt, 1.0),
        "peek, 8,192 tokens cached": lambda: cache.peek(b"plain", prompt, 1.0),
        "fork + release, 8,192 tokens": fork,
        "grow + commit, nothing filled": decode,
        "grow + commit, one block filled": fill,
    }
    for name, act in calls.items():
        show(label + name, seconds_of(act, REPEATS))


if __name__ == "__main__":
    main()
