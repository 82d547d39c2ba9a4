"""What an attention window saves a long sequence: blocks, and time to read it and to go on.

    python -m tests.bench.attention_window [--tokens 2048] [--window 512] [--sinks 16] [--rounds 3]

One sequence at a time through the engine on the CPU, with the default model and random tokens, in
turns without a window and with one. Ratios are of the medians to those without a window; the spread
is the smallest and the largest ratio of a round. About half a minute on 2 free cores.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from msgspec import Struct

from engine.api import AttentionWindow, CacheGrant, Request, Sampling
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.core.core import Core
from engine.plan import Runner, StepPlan, StepResult
from engine.runner.cpu_runner import build_runner
from tests.bench.models import default_card
from tests.bench.results import spread

OUTPUT = 32


class WindowRun(Struct, frozen=True):
    """One sequence: seconds of its prompt, seconds a token behind it, most blocks held and those
    of its last step."""

    prompt_s: float
    token_s: float
    blocks: int
    blocks_last: int


class WatchedRunner:
    """`engine.plan.Runner` that counts the blocks of the table that a step was launched with."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.blocks = 0

    def launch(self, plan: StepPlan) -> None:
        """Count, and launch."""
        self.blocks = sum(block >= 0 for row in plan.rows for block in row.block_ids)
        self._runner.launch(plan)

    def collect(self) -> StepResult:
        """Return the oldest step's result."""
        return self._runner.collect()


def run(
    core: Core,
    watch: WatchedRunner,
    tokens: tuple[int, ...],
    asked: AttentionWindow | None,
    name: str,
) -> WindowRun:
    """Run one request to its end; nothing else runs."""
    grant = CacheGrant(name.encode())
    core.submit(Request(name, tokens, OUTPUT, grant, Sampling(temperature=0), attention=asked))
    started_s, first_s, most = time.perf_counter(), 0.0, 0
    while core.has_work():
        core.step()
        most = max(most, watch.blocks)
        if not first_s and any(sequence.output_tokens for sequence in core.scheduler.running):
            first_s = time.perf_counter()
    token_s = (time.perf_counter() - first_s) / (OUTPUT - 1)
    return WindowRun(first_s - started_s, token_s, most, watch.blocks)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--sinks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    card = default_card()
    config = EngineConfig(
        device="cpu",
        kv_blocks=given.tokens // 16 + 64,
        step_tokens_max=256,
        attention_policies=("window",),
    )
    built = build_runner(card, config)
    watch = WatchedRunner(built.runner)
    core = Core(
        PrefixCache(blocks=built.blocks, block_size=16), watch, config, time.monotonic,
        vocab_size=card.config.vocab, context_tokens=built.context,
    )  # fmt: skip
    chance = random.Random(0)
    kinds = {"without": None, "with": AttentionWindow(given.window, given.sinks)}
    found: dict[str, list[WindowRun]] = {name: [] for name in kinds}
    for number in range(given.rounds):
        tokens = tuple(chance.randrange(100, 30_000) for _ in range(given.tokens))
        for name, asked in kinds.items():
            found[name].append(run(core, watch, tokens, asked, f"{name} {number}"))
    for part in WindowRun.__struct_fields__:
        plain, windowed = ([getattr(one, part) for one in found[name]] for name in kinds)
        ratios = [b / a for a, b in zip(plain, windowed, strict=True)]
        ratio = statistics.median(windowed) / statistics.median(plain)
        print(f"{part:11} {statistics.median(plain):9.4f} {statistics.median(windowed):9.4f}"
              f"  {ratio:.2f} {spread(ratios, '.2f')}")  # fmt: skip


if __name__ == "__main__":
    main()
