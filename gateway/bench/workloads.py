"""The workloads: what is asked of an endpoint, and which figures come of it.

(a) one long prompt: cold, again, and with a new question; (b) one stream; (c) many at once over one
system prompt; (d) the same for several tenants; (e) conversations. Each takes a client and prompts
and returns figures. Replays of traces, (f), are in `trace`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from gateway.bench.client import Client, Measured
from gateway.bench.prompts import Prompt, PromptMaker, joined

T = TypeVar("T")


class Figure(Struct, frozen=True):
    """One number of one run."""

    name: str
    unit: str
    value: float


class Sizes(Struct, frozen=True):
    """How large the workloads are; tests make them small."""

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
    """(a) Time to the first token of one long prompt: cold, repeated, and with a new question."""
    prompt = prompts.make(sizes.long_prompt)
    question = prompts.make(sizes.question)
    cold = await client.complete(prompt, 1)
    again = await client.complete(prompt, 1)
    asked = await client.complete(joined(prompt, question), 1)
    return [
        Figure("cold", "ms", cold.first_s * 1e3),
        Figure("again", "ms", again.first_s * 1e3),
        Figure("shared + new", "ms", asked.first_s * 1e3),
        *_hits("shared + new ", [asked]),
    ]


async def one_stream(client: Client, prompts: PromptMaker, sizes: Sizes) -> list[Figure]:
    """(b) One answer, alone."""
    done = await client.complete(prompts.make(sizes.question), sizes.stream_output)
    writing_s = done.pieces_s[-1] - done.pieces_s[0] if done.pieces_s else 0.0
    figures = [Figure("first token", "ms", done.first_s * 1e3), *gap_figures("", [done])]
    if writing_s > 0:
        figures.append(Figure("decode", "tok/s", (done.output_tokens - 1) / writing_s))
    return figures


async def shared_system_prompt(client: Client, prompts: PromptMaker, sizes: Sizes) -> list[Figure]:
    """(c) Many at once over one system prompt nobody has seen, then others over the same."""
    system = prompts.make(sizes.system)
    figures: list[Figure] = []
    for label in ("cold ", "warm "):
        asked = [(joined(system, prompts.make(sizes.own)), 0) for _ in range(sizes.at_once)]
        figures += await _together(client, label, asked, sizes.output)
    return figures


async def tenants(client: Client, prompts: PromptMaker, sizes: Sizes) -> list[Figure]:
    """(d) Several tenants at once, each over a system prompt of its own, twice."""
    systems = [prompts.make(sizes.system) for _ in range(sizes.tenants)]
    figures: list[Figure] = []
    for label in ("cold ", "warm "):
        asked = [
            (joined(system, prompts.make(sizes.own)), tenant)
            for _ in range(sizes.per_tenant)
            for tenant, system in enumerate(systems)
        ]
        figures += await _together(client, label, asked, sizes.output)
    return figures


async def _together(
    client: Client, label: str, asked: Sequence[tuple[Prompt, int]], output: int
) -> list[Figure]:
    start_s = client.clock()
    done = await all_or_fail(
        client.complete(prompt, output, tenant=tenant) for prompt, tenant in asked
    )
    return crowd_figures(label, start_s, done) + _work(label, [p for p, _ in asked], done)


async def conversations(client: Client, prompts: PromptMaker, sizes: Sizes) -> list[Figure]:
    """(e) Conversations side by side: every turn carries all earlier ones."""
    system = prompts.words(sizes.system // 4)
    start_s = client.clock()
    talks = await all_or_fail(_converse(client, prompts, system, sizes) for _ in range(sizes.chats))
    first = [turns[0] for turns in talks]
    later = [turn for turns in talks for turn in turns[1:]]
    every = first + later
    return [
        Figure("first turn first token p50", "ms", percentile(firsts(first), 50) * 1e3),
        Figure("later turns first token p50", "ms", percentile(firsts(later), 50) * 1e3),
        Figure("later turns first token p99", "ms", percentile(firsts(later), 99) * 1e3),
        *gap_figures("", every),
        throughput("", start_s, every),
        *_hits("later turns ", later),
    ]


async def _converse(
    client: Client, prompts: PromptMaker, system: str, sizes: Sizes
) -> list[Measured]:
    messages = [{"role": "system", "content": system}]
    turns: list[Measured] = []
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


def crowd_figures(label: str, start_s: float, done: Sequence[Measured]) -> list[Figure]:
    """First tokens, gaps, throughput and hits of requests that ran together."""
    return [
        Figure(f"{label}first token p50", "ms", percentile(firsts(done), 50) * 1e3),
        Figure(f"{label}first token max", "ms", max(firsts(done)) * 1e3),
        *gap_figures(label, done),
        throughput(label, start_s, done),
        *_hits(label, done),
    ]


def gap_figures(label: str, done: Sequence[Measured]) -> list[Figure]:
    """Between pieces of text, over all streams."""
    gaps = [gap for one in done for gap in one.gaps_s]
    if not gaps:
        return []
    return [
        Figure(f"{label}gap p50", "ms", percentile(gaps, 50) * 1e3),
        Figure(f"{label}gap p99", "ms", percentile(gaps, 99) * 1e3),
        Figure(f"{label}gap max", "ms", max(gaps) * 1e3),
    ]


def throughput(label: str, start_s: float, done: Sequence[Measured]) -> Figure:
    """Output tokens over the time from the start to the last answer's end."""
    tokens = sum(one.output_tokens for one in done)
    return Figure(f"{label}output", "tok/s", tokens / (max(one.ended_s for one in done) - start_s))


def _hits(label: str, done: Sequence[Measured]) -> list[Figure]:
    known = [(one.cached_tokens, one.prompt_tokens) for one in done]
    cached = sum(c for c, _ in known if c is not None)
    if any(c is None for c, _ in known):
        return []  # the endpoint does not say
    return [Figure(f"{label}hit ratio", "%", 100 * cached / max(1, sum(p for _, p in known)))]


def _work(label: str, prompts: Sequence[Prompt], done: Sequence[Measured]) -> list[Figure]:
    """Prompt tokens computed, against those that were different: 1.0 means nothing twice."""
    if any(one.cached_tokens is None for one in done) or not isinstance(prompts[0], list):
        return []
    computed = sum(one.prompt_tokens - (one.cached_tokens or 0) for one in done)
    unique = 0
    before: list[int] = []
    for prompt in sorted(p for p in prompts if isinstance(p, list)):
        unique += len(prompt) - _common(prompt, before)
        before = prompt
    return [Figure(f"{label}computed / unique tokens", "x", computed / unique)]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two prompts begin with alike."""
    for at, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return at
    return min(len(a), len(b))


def firsts(done: Sequence[Measured]) -> list[float]:
    """Times to the first token."""
    return [one.first_s for one in done]


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: always a value that was measured."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


async def all_or_fail(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first failure cancels the rest."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
