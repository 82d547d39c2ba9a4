"""The workloads (a) to (e) of `trunkline bench`, and their figures.

(a) one long prompt: cold, repeated, and with a new question; (b) one stream; (c) concurrent
requests over one system prompt; (d) the same for several tenants; (e) conversations. A workload
takes a client and prompts and returns figures. `trace` has the replay of traces, (f).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from gateway.bench.client import Client, Measurement
from gateway.bench.prompts import Prompt, PromptMaker, join_prompts

T = TypeVar("T")


class Figure(Struct, frozen=True):
    """One measured number of one run."""

    name: str
    unit: str
    value: float


class Sizes(Struct, frozen=True):
    """Sizes of the workloads, in tokens and counts; tests use small ones."""

    long_prompt: int = 2048
    question: int = 32
    stream_output: int = 128
    system: int = 1024
    own: int = 64
    output: int = 64
    at_once: int = 16
    tenants: int = 4
    per_tenant: int = 8
    chats: int = 8
    turns: int = 4


Workload = Callable[[Client, PromptMaker, Sizes], Awaitable[list[Figure]]]


async def long_prompt(client: Client, prompts: PromptMaker, sizes: Sizes) -> list[Figure]:
    """(a) Measure time to first token of one long prompt: cold, repeated, with a new question."""
    prompt = prompts.make(sizes.long_prompt)
    question = prompts.make(sizes.question)
    cold = await client.complete(prompt, 1)
    repeated = await client.complete(prompt, 1)
    extended = await client.complete(join_prompts(prompt, question), 1)
    return [
        Figure("cold", "ms", cold.first_s * 1e3),
        Figure("again", "ms", repeated.first_s * 1e3),
        Figure("shared + new", "ms", extended.first_s * 1e3),
        *_hit_ratio("shared + new ", [extended]),
    ]


async def one_stream(client: Client, prompts: PromptMaker, sizes: Sizes) -> list[Figure]:
    """(b) Measure one stream, alone."""
    done = await client.complete(prompts.make(sizes.question), sizes.stream_output)
    decode_s = done.pieces_s[-1] - done.pieces_s[0] if done.pieces_s else 0.0
    figures = [Figure("first token", "ms", done.first_s * 1e3), *gap_figures("", [done])]
    if decode_s > 0:
        figures.append(Figure("decode", "tok/s", (done.output_tokens - 1) / decode_s))
    return figures


async def shared_system_prompt(client: Client, prompts: PromptMaker, sizes: Sizes) -> list[Figure]:
    """(c) Measure concurrent requests over one uncached system prompt, then others over the same
    one."""
    system = prompts.make(sizes.system)
    figures: list[Figure] = []
    for label in ("cold ", "warm "):
        requests = [
            (join_prompts(system, prompts.make(sizes.own)), 0) for _ in range(sizes.at_once)
        ]
        figures += await _run_batch(client, label, requests, sizes.output)
    return figures


async def tenants(client: Client, prompts: PromptMaker, sizes: Sizes) -> list[Figure]:
    """(d) Measure several tenants at once, each with its own system prompt, twice."""
    systems = [prompts.make(sizes.system) for _ in range(sizes.tenants)]
    figures: list[Figure] = []
    for label in ("cold ", "warm "):
        requests = [
            (join_prompts(system, prompts.make(sizes.own)), tenant)
            for _ in range(sizes.per_tenant)
            for tenant, system in enumerate(systems)
        ]
        figures += await _run_batch(client, label, requests, sizes.output)
    return figures


async def _run_batch(
    client: Client, label: str, requests: Sequence[tuple[Prompt, int]], output: int
) -> list[Figure]:
    start_s = client.clock()
    done = await gather_all(
        client.complete(prompt, output, tenant=tenant) for prompt, tenant in requests
    )
    return batch_figures(label, start_s, done) + _compute_ratio(
        label, [p for p, _ in requests], done
    )


async def conversations(client: Client, prompts: PromptMaker, sizes: Sizes) -> list[Figure]:
    """(e) Measure concurrent conversations: every turn carries all earlier ones."""
    system = prompts.words(sizes.system // 4)
    start_s = client.clock()
    conversations_done = await gather_all(
        _converse(client, prompts, system, sizes) for _ in range(sizes.chats)
    )
    first = [turns[0] for turns in conversations_done]
    later = [turn for turns in conversations_done for turn in turns[1:]]
    all_turns = first + later
    return [
        Figure("first turn first token p50", "ms", percentile(first_token_times(first), 50) * 1e3),
        Figure("later turns first token p50", "ms", percentile(first_token_times(later), 50) * 1e3),
        Figure("later turns first token p99", "ms", percentile(first_token_times(later), 99) * 1e3),
        *gap_figures("", all_turns),
        throughput("", start_s, all_turns),
        *_hit_ratio("later turns ", later),
    ]


async def _converse(
    client: Client, prompts: PromptMaker, system: str, sizes: Sizes
) -> list[Measurement]:
    messages = [{"role": "system", "content": system}]
    turns: list[Measurement] = []
    for _ in range(sizes.turns):
        messages.append({"role": "user", "content": prompts.words(sizes.own)})
        turns.append(await client.chat(messages, sizes.output))
        messages.append({"role": "assistant", "content": turns[-1].text})
    return turns


WORKLOADS: dict[str, Workload] = {
    "a": long_prompt,
    "b": one_stream,
    "c": shared_system_prompt,
    "d": tenants,
    "e": conversations,
}


# --- figures -----------------------------------------------------------------------------------


def batch_figures(label: str, start_s: float, done: Sequence[Measurement]) -> list[Figure]:
    """Return first-token times, gaps, throughput and hit ratio of concurrent requests."""
    return [
        Figure(f"{label}first token p50", "ms", percentile(first_token_times(done), 50) * 1e3),
        Figure(f"{label}first token max", "ms", max(first_token_times(done)) * 1e3),
        *gap_figures(label, done),
        throughput(label, start_s, done),
        *_hit_ratio(label, done),
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


def _hit_ratio(label: str, done: Sequence[Measurement]) -> list[Figure]:
    known = [(one.cached_tokens, one.prompt_tokens) for one in done]
    cached = sum(c for c, _ in known if c is not None)
    if any(c is None for c, _ in known):
        return []  # the endpoint reports no cached tokens
    return [Figure(f"{label}hit ratio", "%", 100 * cached / max(1, sum(p for _, p in known)))]


def _compute_ratio(
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


async def gather_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order; the first failure cancels the rest."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
