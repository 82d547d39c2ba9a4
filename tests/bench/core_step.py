"""Host time of a step: schedule, plan, commit and events, without a model.

    python -m tests.bench.core_step

Decoding sequences that share a prefix, four to a namespace, over a runner that does nothing. The
figure is the process's own time for one step, without the runner's part: a device would wait for it
if steps did not overlap, as they do not where they have drafts. Prints median and ninth decile of
five hundred steps: of one batch that stays as it is, of one in which each sequence that ends, after
about 150 tokens, makes room for a new one, and of one whose sequences get drafts, half of them
right.
"""

from __future__ import annotations

import gc
import random
import time
from collections import deque

from engine.api import CacheGrant, Finished, Request, SampledToken, Sampling
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.core.core import Core
from engine.drafts.drafter import DRAFTS_MAX
from engine.plan import Row, StepPlan, StepResult

BLOCK_SIZE = 16
SHARED_TOKENS = 1024
OWN_TOKENS = 64
STEPS = 500
FILLING_STEPS = 200
"""Steps after which all prompts have been computed, with room to spare."""
OUTPUT_TOKENS = (20, 280)
"""The least and the most tokens of a sequence that makes room for another."""


DRAFTING_STEPS = 200
"""Of a batch with drafts, whose answers grow faster."""
STEP_S = tuple(0.0046 + 0.00004 * rows for rows in range(128))
"""Of an 8B model on an H200, about."""
PERIOD = 50
"""Tokens after which an answer with drafts repeats itself."""


class IdleRunner:
    """Samples the same token for every sequence. `spent_s`: process time of its last launch."""

    def __init__(self) -> None:
        self.results: deque[StepResult] = deque()
        self.spent_s = 0.0
        self._tokens: tuple[SampledToken, ...] = (SampledToken(1),)

    def launch(self, plan: StepPlan) -> None:
        """Record the step; its result is ready at once."""
        began_s = time.process_time()
        drawn = {s: self._draw(row) for row in plan.rows for s in row.samples}
        self.results.append(StepResult(step=plan.step, sampled=drawn))
        self.spent_s = time.process_time() - began_s

    def _draw(self, row: Row) -> tuple[SampledToken, ...]:
        return self._tokens

    def collect(self) -> StepResult:
        """Return the oldest launched step's result."""
        return self.results.popleft()


class CountingRunner(IdleRunner):
    """Samples the position's number, which repeats, and accepts half of the drafts."""

    def _draw(self, row: Row) -> tuple[SampledToken, ...]:
        kept, end = row.drafts // 2, row.start + row.count - row.drafts
        return tuple(SampledToken((end + place) % PERIOD) for place in range(1 + kept))


class Batch:
    """A core with `rows` decoding sequences. `is_changing`: those that end are replaced."""

    def __init__(
        self, rows: int, depth: int, *, is_changing: bool = False, drafts: bool = False
    ) -> None:
        self.is_changing, self._rows, self._asked = is_changing, rows, 0
        self._chance = random.Random(rows)
        own_blocks = -(-(OWN_TOKENS + FILLING_STEPS + STEPS) // BLOCK_SIZE)
        blocks = SHARED_TOKENS // BLOCK_SIZE * (rows // 4 + 1) + (own_blocks + 4) * rows
        self._longest = FILLING_STEPS + STEPS
        if drafts:
            self._longest = (1 + DRAFTS_MAX) * (FILLING_STEPS + DRAFTING_STEPS)
            blocks += rows * self._longest // BLOCK_SIZE
        self.runner = CountingRunner() if drafts else IdleRunner()
        self._steps = DRAFTING_STEPS if drafts else STEPS
        self.core = Core(
            PrefixCache(blocks=blocks, block_size=BLOCK_SIZE),
            self.runner,
            EngineConfig(sequences_max=rows, queue_requests_max=2 * rows),
            time.perf_counter,
            vocab_size=50_000,
            context_tokens=8_192,
            pipeline_depth=depth,
            draft_step_s=STEP_S if drafts else (),
        )
        for _ in range(rows):
            self._ask()
        for _ in range(FILLING_STEPS):
            self.step()

    def measure(self) -> list[float]:
        """Return sorted seconds of each of its steps."""
        gc.collect()
        gc.freeze()
        spent = sorted(self.step() for _ in range(self._steps))
        gc.unfreeze()
        return spent

    def _ask(self) -> None:
        number = self._asked
        self._asked += 1
        own = tuple((number * 31 + k) % 50_000 for k in range(OWN_TOKENS))
        output = self._longest
        if self.is_changing:
            output = self._chance.randint(*OUTPUT_TOKENS)
        self.core.submit(
            Request(
                request_id=str(number),
                tokens=(*range(SHARED_TOKENS), *own),
                max_tokens=output,
                grant=CacheGrant((number % self._rows // 4).to_bytes(4, "little")),
                sampling=Sampling(temperature=0),
            )
        )

    def step(self) -> float:
        """Run a step; return the seconds it took."""
        began_s = time.process_time()
        self.runner.spent_s = 0.0
        events = self.core.step()
        spent_s = time.process_time() - began_s - self.runner.spent_s
        if self.is_changing:
            for event in events:
                if isinstance(event, Finished):
                    self._ask()
        return spent_s


def main() -> None:
    """Print a line for each batch and depth."""
    print("rows  depth  batch      median us  p90 us")
    for rows in (1, 16, 64, 256, 512):
        for depth, name in ((1, "the same"), (2, "the same"), (2, "changing"), (2, "drafts")):
            if name == "drafts" and rows > len(STEP_S) // 2:
                continue
            batch = Batch(rows, depth, is_changing=name == "changing", drafts=name == "drafts")
            spent = batch.measure()
            median, late = spent[len(spent) // 2] * 1e6, spent[len(spent) * 9 // 10] * 1e6
            print(f"{rows:4}  {depth:5}  {name:8}  {median:10.0f}  {late:6.0f}")


if __name__ == "__main__":
    main()
