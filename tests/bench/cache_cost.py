"""What the cache's calls cost, in microseconds: python -m tests.bench.cache_cost"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable
from time import perf_counter

from engine.cache import PrefixCache

BLOCK = 16


def microseconds(act: Callable[[], object], repeats: int = 200) -> tuple[float, float]:
    """Median and worst of `repeats` calls."""
    times = []
    for _ in range(repeats):
        start = perf_counter()
        act()
        times.append((perf_counter() - start) * 1e6)
    return statistics.median(times), max(times)


def main() -> None:
    """Print one line per call."""
    seed = random.Random(1)
    cache = PrefixCache(blocks=60_000, block_size=BLOCK)
    prompt = [seed.randrange(50_000) for _ in range(8_192)]
    table = cache.begin(b"a", prompt, 0.0)
    cache.grow(table, len(prompt), 0.0)
    cache.commit(table, prompt, len(prompt), 0.0)

    def match() -> None:
        cache.release(cache.begin(b"a", prompt, 1.0), prompt, 1.0, keep=False)

    def fork() -> None:
        cache.release(cache.fork(table), prompt, 1.0, keep=False)

    def decode() -> None:
        cache.grow(table, len(prompt), 1.0)
        cache.commit(table, prompt, len(prompt), 1.0)

    def fill() -> None:
        prompt.extend(seed.randrange(50_000) for _ in range(BLOCK))
        cache.grow(table, len(prompt), 1.0)
        cache.commit(table, prompt, len(prompt), 1.0)

    lines = {
        "begin + release, 8,192 tokens cached": match,
        "fork + release, 8,192 tokens": fork,
        "peek, 8,192 tokens cached": lambda: cache.peek(b"a", prompt, 1.0),
        "grow + commit, nothing filled": decode,
        "grow + commit, one block filled": fill,
        "check, 60,000 blocks": cache.check,
    }
    for name, act in lines.items():
        median, worst = microseconds(act, 5 if name.startswith("check") else 200)
        sys.stdout.write(f"{name:40} {median:10.1f} us   worst {worst:10.1f}\n")


if __name__ == "__main__":
    main()
