"""Checks the error that advice states: a recorded trace, sampled and counted exactly.

python -m tests.bench.advice conversation_trace.jsonl
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from gateway.analytics.aggregates import SAMPLE_MAX, TOKENS_MAX
from gateway.bench.trace import BLOCK_TOKENS, Arrival, read_trace
from tenancy.reuse.miss_ratio_curve import BLOCK_BYTES, CurvePoint, ReuseSampler, hash_units

SPANS = (60.0, 300.0, 1_800.0, 3_600.0)
SIZES = (4_096, 65_536, 262_144, 1_048_576)
SEEDS = 8
PARTS = BLOCK_TOKENS // (BLOCK_BYTES // 4)
"""Our blocks in one block of the trace."""


def blocks_of(arrival: Arrival) -> list[tuple[int, int]]:
    """Return (the trace's block, number of our blocks in it) of the sampled part of a prompt."""
    left = min(arrival.prompt_tokens, TOKENS_MAX) // (BLOCK_BYTES // 4)
    found = []
    for block in arrival.blocks:
        if left <= 0:
            break
        found.append((block, min(PARTS, left)))
        left -= PARTS
    return found


def retained_hit_ratio(arrivals: Sequence[Arrival], span: float, *, is_early: bool) -> float:
    """Return the hit ratio of an unbounded cache with this retention, over all prompts, or over
    those that came after one retention time."""
    used: dict[int, float] = {}
    hits = uses = 0
    for one in arrivals:
        for block, count in blocks_of(one):
            if is_early or one.at_s >= span:
                uses += count
                hits += count if block in used and one.at_s - used[block] <= span else 0
            used[block] = one.at_s
    return hits / uses


def lru_hit_ratio(arrivals: Sequence[Arrival], size: int) -> float:
    """Return the hit ratio of a least-recently-used cache of so many of our blocks."""
    cache: OrderedDict[int, int] = OrderedDict()
    hits = uses = held = 0
    for one in arrivals:
        for block, count in blocks_of(one):
            there = cache.pop(block, 0)
            uses, hits = uses + count, hits + min(there, count)
            cache[block] = max(there, count)
            held += cache[block] - there
            while held > size:
                held -= cache.popitem(last=False)[1]
    return hits / uses


def sampled_advice(arrivals: Sequence[Arrival], seed: int) -> list[CurvePoint]:
    """Return the sampler's advice for a trace whose blocks have tokens by this seed."""
    sampler = ReuseSampler(SAMPLE_MAX, SPANS)
    for one in arrivals:
        data = b"".join(
            random.Random(f"{seed}/{block}").randbytes(8) * (BLOCK_TOKENS // 2)
            for block in one.blocks
        )
        sampler.use(hash_units(data[: 4 * min(one.prompt_tokens, TOKENS_MAX)]), one.at_s)
    return [*sampler.by_seconds(SPANS), *sampler.by_blocks(SIZES)]


def main() -> None:
    """Print a line for each retention and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    arrivals = read_trace(parser.parse_args().trace, 10**9)
    rows = list(zip(*(sampled_advice(arrivals, seed) for seed in range(SEEDS)), strict=True))
    print("| | exact | sampled_advice | stated error | largest error |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for number, points in enumerate(rows):
        is_span = number < len(SPANS)
        at, ratios = points[0].at, [point.hit_ratio for point in points]
        exact = (
            retained_hit_ratio(arrivals, at, is_early=points[0].is_early)
            if is_span
            else lru_hit_ratio(arrivals, int(at))
        )
        worst = max(abs(ratio - exact) for ratio in ratios)
        stated = statistics.mean(point.error for point in points)
        name = f"{at:,.0f} {'s' if is_span else 'blocks'}" + ", early" * points[0].is_early
        print(
            f"| {name} | {100 * exact:.1f} % | {100 * min(ratios):.1f} to {100 * max(ratios):.1f} %"
            f" | {100 * stated:.1f} | {100 * worst:.1f} |"
        )


if __name__ == "__main__":
    main()
