"""Drafts on a GPU at Llama-3.1-8B's shape: python -m tests.bench.gpu_drafts [--json FILE]
    [--shape qwen3.5-35b] [--layers 20]

Random weights, bf16, prompts of 448 tokens of their own, 128 output tokens, greedy. Answers say
nothing here, so acceptance is drawn: each draft is taken to be right with a given probability, and
the step is computed as any other. Each line has tokens a second after the first ones with drafts
over those without, by rows and acceptance; the plain run is repeated after the others. First, real
answers with drafts are compared with those without: as far as two batch sizes give the same bits.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import abc
from pathlib import Path
from typing import Any

from engine.api import CacheGrant, Finished, Namespace, Request, SampledToken, Sampling, Tokens
from engine.core.step_drafts import EXPOSED_S
from engine.drafts.drafter import Drafter
from engine.plan import StepResult
from engine.runner.gpu_build import DRAFTED_TOKENS_MAX
from engine.scheduler.sequence import Sequence
from tests.bench.device import describe
from tests.bench.gpu_workloads import SHAPES, Bench, TimedRunner
from tests.bench.models import VOCAB, with_layers
from tests.bench.results import Results, print_line
from tests.draft_oracle import OracleSource

ROWS = (1, 8, 64, 256)
ACCEPTANCE = (0.7, 0.0)
PROMPT, OUTPUT = 448, 128
RUNS = 3
ANSWERS = 16
"""Whose tokens are compared with and without drafts."""


class AnySource:
    """Drafts any tokens; `DrawnRunner` decides which are right."""

    name = "any"

    def begin(self, sequence: Sequence) -> None:
        """Do nothing."""

    def extend(self, sequence_id: int, token_ids: abc.Sequence[int]) -> None:
        """Do nothing."""

    def propose(self, sequence_id: int, limit: int) -> list[int]:
        """Return `limit` drafts."""
        return [7] * limit

    def end(self, sequence_id: int) -> None:
        """Do nothing."""

    def erase(self, namespace: Namespace) -> None:
        """Do nothing."""


class DrawnRunner(TimedRunner):
    """A runner whose drafts are right with probability `right`; None: as computed."""

    right: float | None = None
    chance = random.Random(5)

    def collect(self) -> StepResult:
        """See `GpuRunner.collect`."""
        drafts = self._in_flight[0].drafts
        result = super().collect()
        if self.right is None:
            return result
        for sequence_id, drafted in drafts.items():
            kept = 0
            while kept < len(drafted) and self.chance.random() < self.right:
                kept += 1
            tokens = tuple(SampledToken(token) for token in drafted[:kept])
            result.sampled[sequence_id] = (*tokens, SampledToken(9))
        return result


class DraftBench(Bench):
    """A model on a GPU whose engine may draft."""

    make_runner = DrawnRunner
    runner: DrawnRunner

    def time_steps(self) -> tuple[float, ...]:
        """Return the times of steps, measured as at an engine's start."""
        return self.runner.time_steps(DRAFTED_TOKENS_MAX)

    def decode(self, rows: int, name: str) -> dict[str, float]:
        """Run prompts that are cached, but for a token; return tokens a second after the first
        ones, tokens a step of a sequence, and the host's median milliseconds a step."""
        chance = random.Random(rows)
        grant = CacheGrant(b"rows-%d" % rows)
        for row in range(rows):
            tokens = tuple(chance.randrange(VOCAB) for _ in range(PROMPT))
            self.core.submit(
                Request(f"{name}{row}", tokens, OUTPUT, grant, Sampling(temperature=0))
            )
        begun: set[str] = set()
        began_s = steps = produced = 0.0
        host: list[float] = []
        while self.core.has_work():
            before = time.perf_counter()
            self.runner.waited_s = 0.0
            events = self.core.step()
            now = time.perf_counter()
            if len(begun) == rows:
                steps += any(isinstance(event, Tokens) for event in events)
                produced += sum(len(e.tokens) for e in events if isinstance(e, Tokens))
                host.append(now - before - self.runner.waited_s)
            else:
                begun.update(e.request_id for e in events if isinstance(e, Tokens))
                began_s = now
            for event in events:
                assert not isinstance(event, Finished) or event.ending == "done", event
        return {
            "tok_s": produced / (time.perf_counter() - began_s),
            "tokens_a_step": produced / steps / rows,
            "host_ms": statistics.median(host) * 1e3,
        }

    def plain(self, rows: int, name: str) -> dict[str, float]:
        """As `decode`, without drafts."""
        self.core.drafts.drafter, self.runner.right = None, None
        return self.decode(rows, name)

    def answers(self, right: float | None, known: list[list[SampledToken]]) -> list[Any]:
        """Return answers with their logprobs: without drafts, or with those of an oracle."""
        chance, grant = random.Random(1), CacheGrant(b"answers")
        for number in range(ANSWERS):
            tokens = tuple(chance.randrange(VOCAB) for _ in range(64))
            sampling = Sampling(temperature=0, logprobs=0)
            self.core.submit(Request(f"{right}/{number}", tokens, 48, grant, sampling))

        def answer(request_id: str, index: int) -> list[int]:
            return [token.token_id for token in known[int(request_id.rpartition("/")[2])]]

        if right is not None:
            source = OracleSource(answer, right, VOCAB, seed=3)
            self.core.drafts.drafter = Drafter((1.0,) * 128, [source], EXPOSED_S)
        found: list[list[SampledToken]] = [[] for _ in range(ANSWERS)]
        while self.core.has_work():
            for event in self.core.step():
                if isinstance(event, Tokens):
                    found[int(event.request_id.rpartition("/")[2])] += event.tokens
        return found


def measure(
    bench: DraftBench,
    results: Results,
    rows_of: abc.Sequence[int],
    acceptance: abc.Sequence[float],
    runs: int,
    make_drafter: abc.Callable[[], Drafter],
) -> None:
    """Add a line for each number of rows and acceptance: tokens a second with drafts over those
    without, which are measured before and behind. The runs share a drafter: what the first one
    learns, the others know."""
    for rows in rows_of:
        bench.plain(rows, f"cold{rows}-")
        plain = [bench.plain(rows, f"plain{rows}-{run}-") for run in range(runs)]
        for right in acceptance:
            found, drafter = [], make_drafter()
            for run in range(runs):
                bench.core.drafts.drafter, bench.runner.right = drafter, right
                found.append(bench.decode(rows, f"{right}-{rows}-{run}-"))
            plain.append(bench.plain(rows, f"again{rows}-{right}-"))
            base = statistics.median(one["tok_s"] for one in plain)
            ratios = [round(one["tok_s"] / base, 3) for one in found]
            results.add(
                {
                    "rows": rows,
                    "acceptance": right,
                    "plain_tok_s": round(base, 1),
                    "ratio": round(statistics.median(ratios), 3),
                    "ratios": ratios,
                    "tokens_a_step": round(found[-1]["tokens_a_step"], 3),
                    "host_ms": round(found[-1]["host_ms"], 3),
                    "plain_host_ms": round(plain[0]["host_ms"], 3),
                    "exposed_ms": round(drafter.times.exposed_s * 1e3, 3),
                }
            )


def compare(bench: DraftBench, results: Results) -> None:
    """Compare real answers with drafts with those without. Raises AssertionError where a token
    differs whose logprob was not within rounding of the other's."""
    plain = bench.answers(None, [])
    for right in (0.0, 0.9, 1.0):
        found = bench.answers(right, plain)
        equal, worst = 0, 0.0
        for one, other in zip(found, plain, strict=True):
            same = 0
            while same < len(one) and one[same].token_id == other[same].token_id:
                worst = max(worst, abs(_logprob(one[same]) - _logprob(other[same])))
                same += 1
            equal += same == len(one)
            if same < len(one):
                worst = max(worst, abs(_logprob(one[same]) - _logprob(other[same])))
        results.add({"right": right, "equal": equal, "of": ANSWERS, "logprob_error": worst})
        assert worst < 0.1, worst


def _logprob(token: SampledToken) -> float:
    assert token.logprob is not None
    return token.logprob


def main() -> None:
    """Print a line of JSON for each number of rows and acceptance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    options = parser.parse_args()
    config = SHAPES[options.shape]
    if options.layers:
        config = with_layers(config, options.layers)
    has_states = bool(config.recurrent_layers)  # a kept one takes the room of 3,145 tokens
    bench, results = DraftBench(config, 60_000 if has_states else 12_000), Results()
    print_line(describe(bench.copy_rate))
    began_s = time.perf_counter()
    times = bench.time_steps()
    took_s = time.perf_counter() - began_s
    sizes = {size: round(times[size - 1] * 1e3, 3) for size in (1, 8, 16, 64, 128, 256)}
    results.add({"step_ms": sizes, "timing_s": round(took_s, 1)})
    compare(bench, results)
    measure(
        bench, results, ROWS[:3] if has_states else ROWS, ACCEPTANCE, RUNS,
        lambda: Drafter(times, [AnySource()], EXPOSED_S, computes_twice=has_states),
    )  # fmt: skip
    results.write(options.json)


if __name__ == "__main__":
    main()
