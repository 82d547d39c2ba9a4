"""Host time of a step: schedule, plan, commit and events, without a model.

    python -m tests.bench.core_step

Decoding sequences that share a prefix, four to a namespace, over a runner that does nothing. The
figure is the host time of one step, for which a device would wait if steps did not overlap. Prints
median and ninth decile of five hundred steps.
"""

from __future__ import annotations

import sys
import time
from collections import deque

from engine.api import CacheGrant, Request, SampledToken, Sampling
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.core.core import Core
from engine.plan import Sampled, StepPlan, StepResult

BLOCK_SIZE = 16
SHARED_TOKENS = 1024
OWN_TOKENS = 64
STEPS = 500


class IdleRunner:
    """Samples the same token for every sequence, at negligible cost."""

    def __init__(self) -> None:
        self.results: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Record the step; its result is ready at once."""
        token = SampledToken(1)
        drawn = tuple(Sampled(s, (token,)) for row in plan.rows for s in row.samples)
        self.results.append(StepResult(step=plan.step, sampled=drawn))

    def collect(self) -> StepResult:
        """Return the oldest launched step's result."""
        return self.results.popleft()


def measure(rows: int, depth: int) -> list[float]:
    """Return sorted seconds of each of `STEPS` steps with `rows` decoding sequences."""
    config = EngineConfig(sequences_max=rows, queue_requests_max=rows)
    own_blocks = -(-(OWN_TOKENS + STEPS + 64) // BLOCK_SIZE)
    blocks = SHARED_TOKENS // BLOCK_SIZE * (rows // 4 + 1) + (own_blocks + 4) * rows
    core = Core(
        PrefixCache(blocks=blocks, block_size=BLOCK_SIZE),
        IdleRunner(),
        config,
        time.perf_counter,
        vocab_size=50_000,
        context_tokens=8192,
        pipeline_depth=depth,
    )
    shared = tuple(range(SHARED_TOKENS))
    for index in range(rows):
        own = tuple((index * 31 + k) % 50_000 for k in range(OWN_TOKENS))
        namespace = (index // 4).to_bytes(4, "little")
        core.submit(
            Request(
                request_id=str(index),
                tokens=shared + own,
                max_tokens=STEPS + 1000,
                grant=CacheGrant(namespace),
                sampling=Sampling(temperature=0),
            )
        )
    while core.scheduler.waiting or any(
        not sequence.is_decoding for sequence in core.scheduler.running
    ):
        core.step()
    spent = []
    for _ in range(STEPS):
        began = time.perf_counter()
        core.step()
        spent.append(time.perf_counter() - began)
    return sorted(spent)


def main() -> None:
    """Print a line for each batch and depth."""
    out = sys.stdout.write
    out("rows  depth  median us  p90 us\n")
    for rows in (16, 64, 256):
        for depth in (1, 2):
            spent = measure(rows, depth)
            median, late = spent[STEPS // 2] * 1e6, spent[STEPS * 9 // 10] * 1e6
            out(f"{rows:4}  {depth:5}  {median:9.0f}  {late:6.0f}\n")


if __name__ == "__main__":
    main()
