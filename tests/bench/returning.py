"""Conversations that come back through a pool too small for them: python -m tests.bench.returning

The engine as on a GPU, with a device and a bus that take the time measured on an H200, by a clock
that they alone advance: no time of this machine is in it, and a run is the same each time. As
`tests.bench.gpu_levels --only return`: 64 conversations of 4,096 tokens come back in turn, 16 at
once, 16 tokens each, to a pool of 5,722 blocks. Per round: answers a second, tokens found on the
device, loaded and computed, and why what a level had was not brought.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter

from engine.api import CacheGrant, Finished, Request, Sampling, Started
from engine.cache import PrefixCache
from engine.config import EngineConfig, LevelsConfig
from engine.core.core import Core
from engine.levels.levels import Levels
from tests.fakes import FakeClock
from tests.paced_engine import PacedRunner, PacedTransfer, Speeds

BLOCK, POOL, SLOTS = 16, 5_722, 24_576
CONVERSATIONS, TOKENS, AT_ONCE, OUTPUT = 64, 4096, 16, 16
POLL_S = 0.0005
"""Seconds between two turns without other work."""


class Returning:
    """An engine with or without host memory, and what became of its requests."""

    def __init__(
        self, speeds: Speeds, *, has_levels: bool, blocks: int = POOL, offloads_max: int = 512
    ) -> None:
        self.clock, self.speeds = FakeClock(), speeds
        cache = PrefixCache(blocks=blocks, block_size=BLOCK)
        config = LevelsConfig(host_mib=1 if has_levels else 0)
        self.runner = PacedRunner(self.clock, speeds)
        self.transfer = PacedTransfer(self.clock, speeds, SLOTS, offloads_max=offloads_max)
        self.levels = Levels(cache, config, self.transfer) if has_levels else None
        self.core = Core(
            cache,
            self.runner,
            EngineConfig(
                step_tokens_max=8192,
                prefill_chunk_tokens_max=8192,
                sequences_max=256,
                queue_tokens_max=10_000_000,
                levels=config,
            ),
            self.clock,
            vocab_size=50_000,
            context_tokens=40_960,
            pipeline_depth=2,
            levels=self.levels,
        )
        self.found: Counter[str] = Counter()
        self._names = 0

    def ask(self, prompts: list[tuple[int, ...]]) -> float:
        """Answer prompts that come at once; return the seconds that it took."""
        began_s = self.clock()
        for tokens in prompts:
            self._names += 1
            grant, greedy = CacheGrant(b"conversations"), Sampling(temperature=0)
            self.core.submit(Request(f"r{self._names}", tokens, OUTPUT, grant, greedy))
        while self.core.has_work():
            self._step()
        return self.clock() - began_s

    def settle(self) -> None:
        """Run turns until nothing moves."""
        while self.levels is not None and self.levels.is_busy:
            self._step()

    def _step(self) -> None:
        self.clock.advance(self.speeds.turn_s)
        for event in self.core.step():
            if isinstance(event, Started):
                self.found["cached"] += event.cached_tokens
                loaded = sum(tokens for _, tokens in event.loaded_tokens)
                self.found["loaded"] += loaded
                if event.wait is not None and event.wait.cause:
                    self.found[event.wait.cause] += event.wait.missed_tokens
                    self.found["requests that missed"] += 1
            elif isinstance(event, Finished):
                assert event.ending == "done", event
        if self.core.is_waiting_for_levels or not self.core.has_work():
            self.clock.advance(POLL_S)


def conversations(number: int = CONVERSATIONS, tokens: int = TOKENS) -> list[tuple[int, ...]]:
    """Return random prompts."""
    chance = random.Random(64)
    return [tuple(chance.choices(range(50_000), k=tokens)) for _ in range(number)]


def run(name: str, engine: Returning, rounds: int) -> None:
    """Print a line for each round."""
    prompts = conversations()
    for number in range(rounds):
        engine.found.clear()
        computed = engine.runner.prompt_tokens
        took_s = 0.0
        for start in range(0, CONVERSATIONS, AT_ONCE):
            took_s += engine.ask(prompts[start : start + AT_ONCE])
        engine.settle()
        computed = engine.runner.prompt_tokens - computed
        text = f"{name:14} {number} {CONVERSATIONS / took_s:7.1f} answers/s, computed {computed:8,}"
        for what, tokens in sorted(engine.found.items()):
            text += f", {what} {tokens:,}"
        if engine.levels is not None:
            host = engine.levels.stats()[0]
            text += (
                f"; offloaded {host.offloaded_total:,}, loaded {host.loaded_total:,}, failed"
                f" {host.failed_total}, declined {host.declined_total}, {engine.transfer.longest}"
            )
        print(text)


def main() -> None:
    """Print the rounds of each setup."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    run("with levels", Returning(Speeds(), has_levels=True), options.rounds)
    run("without", Returning(Speeds(), has_levels=False), options.rounds)
    roomy = CONVERSATIONS * (TOKENS // BLOCK + 2) + 512
    run("room for all", Returning(Speeds(), has_levels=False, blocks=roomy), options.rounds)


if __name__ == "__main__":
    main()
