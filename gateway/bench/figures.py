"""Figures of a run: what the measurements of its requests amount to.

Latencies are in ms. Percentiles are by nearest rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from gateway.bench.client import Measurement
from gateway.bench.prompts import Prompt


class Figure(Struct, frozen=True):
    """One measured number of one run."""

    name: str
    unit: str
    value: float


def batch_figures(label: str, start_s: float, done: Sequence[Measurement]) -> list[Figure]:
    """Return first-token times, gaps, throughput and hit ratio of concurrent requests."""
    return [
        Figure(f"{label}first token p50", "ms", percentile(first_token_times(done), 50) * 1e3),
        Figure(f"{label}first token max", "ms", max(first_token_times(done)) * 1e3),
        *gap_figures(label, done),
        throughput(label, start_s, done),
        *hit_ratio(label, done),
    ]


def gap_figures(label: str, done: Sequence[Measurement]) -> list[Figure]:
    """Return gaps between pieces of text, over all streams."""
    gaps = [gap for one in done for gap in one.gaps_s]
    if not gaps:
        return []
    return [
        Figure(f"{label}gap p50", "ms", percentile(gaps, 50) * 1e3),
        Figure(f"{label}gap p99", "ms", percentile(gaps, 99) * 1e3),
        Figure(f"{label}gap max", "ms", max(gaps) * 1e3),
    ]


def throughput(label: str, start_s: float, done: Sequence[Measurement]) -> Figure:
    """Return output tokens per second from `start_s` to the end of the last response."""
    tokens = sum(one.output_tokens for one in done)
    return Figure(f"{label}output", "tok/s", tokens / (max(one.ended_s for one in done) - start_s))


def hit_ratio(label: str, done: Sequence[Measurement]) -> list[Figure]:
    """Return cached over prompt tokens; nothing if the endpoint reports no cached tokens."""
    cached = [one.cached_tokens for one in done if one.cached_tokens is not None]
    if len(cached) < len(done):
        return []
    prompts = max(1, sum(one.prompt_tokens for one in done))
    return [Figure(f"{label}hit ratio", "%", 100 * sum(cached) / prompts)]


def compute_ratio(
    label: str, prompts: Sequence[Prompt], done: Sequence[Measurement]
) -> list[Figure]:
    """Return computed over unique prompt tokens: 1.0 means that no token was computed twice."""
    if any(one.cached_tokens is None for one in done) or not isinstance(prompts[0], list):
        return []
    computed = sum(one.prompt_tokens - (one.cached_tokens or 0) for one in done)
    unique = 0
    before: list[int] = []
    for prompt in sorted(p for p in prompts if isinstance(p, list)):
        unique += len(prompt) - _common_prefix(prompt, before)
        before = prompt
    return [Figure(f"{label}computed / unique tokens", "x", computed / unique)]


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two prompts, in tokens."""
    for at, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return at
    return min(len(a), len(b))


def first_token_times(done: Sequence[Measurement]) -> list[float]:
    """Return the times to first token, in seconds."""
    return [one.first_s for one in done]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile by nearest rank: always a measured value."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]
