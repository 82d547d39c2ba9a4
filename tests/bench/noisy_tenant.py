"""Effect of a noisy tenant on a quiet one: python -m tests.bench.noisy_tenant [PROMPTS]

Counts, not times. A quiet tenant returns to the same conversations over a pool through which a
noisy one streams unique prompts (a million by default). Prints its hit ratio alone, with a floor,
without one, and with both in one namespace, which is plain LRU. And the fairness of scheduling:
eight tenants, one of which sends eight times as many requests as the others, by Jain's index over
what each was served while all were waiting.
"""

from __future__ import annotations

import argparse
import random

from engine.api import CacheGrant, Finished, Quota, Request, Sampling, Started, Tokens
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.core.core import Core
from tests.fakes import FakeClock, FakeRunner

BLOCK = 16
BLOCKS = 4_096
FLOOR = 1_024
QUIET, NOISY = b"quiet", b"noisy"
CONVERSATIONS, TURN_BLOCKS, TURNS = 48, 2, 8
NOISE_BLOCKS = 4
NOISE_PER_TURN = 250


class Pool:
    """A cache over which requests run one after another."""

    def __init__(self, floor: int) -> None:
        self.cache = PrefixCache(blocks=BLOCKS, block_size=BLOCK)
        self.quota = Quota(floor_blocks=floor)
        self.now_s = 0.0

    def run(self, namespace: bytes, tokens: list[int], quota: Quota) -> int:
        """Run one request; return its cached tokens."""
        self.now_s += 0.001
        table = self.cache.begin(namespace, tokens, self.now_s, quota=quota)
        cached = table.kv_tokens
        if self.cache.grow(table, len(tokens), self.now_s):
            self.cache.take_copies()
            self.cache.commit(table, tokens, len(tokens), self.now_s)
        self.cache.release(table, tokens, self.now_s)
        return cached


def hit_ratio(
    turns: int, floor: int, noise_per_turn: int, *, by: bytes = NOISY, seed: int = 1
) -> float:
    """Return the quiet tenant's hit ratio once all its conversations have begun. `by`: who is
    noisy."""
    quiet, noisy = random.Random(seed), random.Random(seed + 1)
    pool = Pool(floor)
    said: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    asked = found = 0
    for turn in range(turns):
        one = said[turn % CONVERSATIONS]
        if len(one) >= TURNS * TURN_BLOCKS * BLOCK:
            one.clear()
        one.extend(quiet.randrange(2**31) for _ in range(TURN_BLOCKS * BLOCK))
        cached = pool.run(QUIET, one, pool.quota)
        if turn >= CONVERSATIONS:
            asked, found = asked + len(one), found + cached
        for _ in range(noise_per_turn):
            words = [noisy.randrange(2**31) for _ in range(NOISE_BLOCKS * BLOCK)]
            pool.run(by, words, pool.quota if by == QUIET else Quota())
    return found / asked if asked else 0.0


def jain(served: list[float]) -> float:
    """Return Jain's index: 1 if all are served alike, 1/n if one gets everything (Jain, Chiu,
    Hawe, 1984)."""
    squares = sum(one * one for one in served)
    return sum(served) ** 2 / (len(served) * squares) if squares else 1.0


def served(tenants: int = 8, greed: int = 8, weights: tuple[float, ...] = ()) -> list[float]:
    """Return output and prompt tokens served to each tenant while all were waiting, per unit of
    weight.

    The first tenant sends `greed` times as many requests.
    """
    config = EngineConfig(step_tokens_max=256, prefill_chunk_tokens_max=64, sequences_max=16)
    clock = FakeClock()
    core = Core(
        PrefixCache(blocks=512, block_size=BLOCK),
        FakeRunner(512, BLOCK, vocab_size=97),
        config,
        clock,
        vocab_size=97,
        context_tokens=1_024,
    )
    weights = weights or (1.0,) * tenants
    chance = random.Random(3)
    left = {}
    for tenant in range(tenants):
        left[tenant] = (greed if tenant == 0 else 1) * 24
        for number in range(left[tenant]):
            tokens = tuple(chance.randrange(97) for _ in range(64))
            grant = CacheGrant(bytes([tenant]))
            core.submit(
                Request(
                    f"{tenant}-{number}", tokens, 32, grant, Sampling(0), weight=weights[tenant]
                )
            )
    done = [0.0] * tenants
    while all(left.values()):
        clock.advance(0.01)
        for event in core.step():
            tenant = int(event.request_id.partition("-")[0])
            if isinstance(event, Tokens):
                done[tenant] += 1
            elif isinstance(event, Started):
                done[tenant] += 64
            elif isinstance(event, Finished):
                left[tenant] -= 1
    return [tokens / weight for tokens, weight in zip(done, weights, strict=True)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="?", type=int, default=1_000_000)
    prompts = parser.parse_args().prompts
    turns = prompts // NOISE_PER_TURN
    alone = hit_ratio(turns, FLOOR, 0)
    floor = hit_ratio(turns, FLOOR, NOISE_PER_TURN)
    bare = hit_ratio(turns, 0, NOISE_PER_TURN)
    shared = hit_ratio(turns, 0, NOISE_PER_TURN, by=QUIET)
    need = CONVERSATIONS * TURNS * TURN_BLOCKS
    even, weighed = jain(served()), jain(served(weights=(1.0,) * 4 + (3.0,) * 4))
    print(
        f"pool {BLOCKS} blocks, quiet tenant needs up to {need}, noise {prompts:,} prompts\n"
        f"quiet hit ratio  alone {alone:.2%}   floor of {FLOOR} {floor:.2%}   none {bare:.2%}"
        f"   plain LRU {shared:.2%}\n"
        f"fairness index   one asks 8x {even:.4f}   and weights 1:3 {weighed:.4f}"
    )


if __name__ == "__main__":
    main()
