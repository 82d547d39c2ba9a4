"""The workloads (a) to (e), (g) and (h) of `trunkline bench`.

(a) one long prompt: cold, repeated, and with a new question; (b) one stream; (c) concurrent
requests over one system prompt; (d) more of them, of several tenants; (e) conversations; (g)
requests that arrive at random; (h) answers with drafts and without. A workload takes a client and
prompts and returns figures. `trace` has the replay of traces, (f).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from gateway.bench.client import BenchError, Client, Measurement
from gateway.bench.drafting import KINDS, DraftSizes, measure_kind
from gateway.bench.figures import (
    Figure,
    batch_figures,
    compute_ratio,
    first_token_times,
    gap_figures,
    hit_ratio,
    percentile,
    throughput,
)
from gateway.bench.open_loop import DueRequest, poisson_times, send_when_due
from gateway.bench.prompts import Prompt, PromptMaker, join_prompts

T = TypeVar("T")


class Sizes(Struct, frozen=True):
    """Sizes of the workloads, in tokens and counts; tests use small ones."""

    long_prompt: int = 2048
    question: int = 32
    stream_output: int = 128
    system: int = 1024
    own: int = 64
    output: int = 64
    at_once: int = 16
    """Requests in flight, in (c) and (d)."""
    tenants: int = 4
    per_tenant: int = 8
    chats: int = 8
    turns: int = 4
    rates: tuple[float, ...] = (1.0, 2.0, 4.0)
    """Arrivals a second in (g), one after the other, each for `seconds`."""
    seconds: float = 20.0
    drafts: DraftSizes = DraftSizes()


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
        *hit_ratio("shared + new ", [extended]),
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
        figures += await _run_batch(client, label, requests, sizes)
    return figures


async def tenants(client: Client, prompts: PromptMaker, sizes: Sizes) -> list[Figure]:
    """(d) Measure several tenants at once, each with its own system prompt, twice. A request is
    sent as soon as fewer than `at_once` are in flight."""
    systems = [prompts.make(sizes.system) for _ in range(sizes.tenants)]
    figures: list[Figure] = []
    for label in ("cold ", "warm "):
        requests = [
            (join_prompts(system, prompts.make(sizes.own)), tenant)
            for _ in range(sizes.per_tenant)
            for tenant, system in enumerate(systems)
        ]
        figures += await _run_batch(client, label, requests, sizes)
    return figures


async def _run_batch(
    client: Client, label: str, requests: Sequence[tuple[Prompt, int]], sizes: Sizes
) -> list[Figure]:
    places = asyncio.Semaphore(sizes.at_once)

    async def complete(prompt: Prompt, tenant: int) -> Measurement:
        async with places:
            return await client.complete(prompt, sizes.output, tenant=tenant)

    start_s = client.clock()
    done = await gather_all(complete(prompt, tenant) for prompt, tenant in requests)
    return batch_figures(label, start_s, done) + compute_ratio(
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
        *hit_ratio("later turns ", later),
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


async def random_arrivals(client: Client, prompts: PromptMaker, sizes: Sizes) -> list[Figure]:
    """(g) Measure requests that arrive at random over the tenants' system prompts, which are cached
    beforehand; a Poisson process for each rate. Raises BenchError for a rate without an arrival."""
    systems = [prompts.make(sizes.system) for _ in range(sizes.tenants)]
    await gather_all(
        client.complete(system, 1, tenant=tenant) for tenant, system in enumerate(systems)
    )
    figures: list[Figure] = []
    for rate in sizes.rates:
        requests = []
        for due_s in poisson_times(prompts.chance, rate, sizes.seconds):
            tenant = prompts.chance.randrange(sizes.tenants)
            prompt = join_prompts(systems[tenant], prompts.make(sizes.own))
            requests.append(DueRequest(due_s, prompt, sizes.output, tenant))
        if not requests:
            raise BenchError(
                f"No request arrives in {sizes.seconds:g} s at {rate:g}/s; raise --seconds."
            )
        figures += await send_when_due(client, f"{rate:g}/s ", requests)
    return figures


async def drafts(client: Client, prompts: PromptMaker, sizes: Sizes) -> list[Figure]:
    """(h) Measure answers of several kinds with drafts and without, in turns."""
    figures: list[Figure] = []
    for name in KINDS:
        figures += await measure_kind(client, name, prompts.chance, sizes.drafts)
    return figures


WORKLOADS: dict[str, Workload] = {
    "a": long_prompt,
    "b": one_stream,
    "c": shared_system_prompt,
    "d": tenants,
    "e": conversations,
    "g": random_arrivals,
    "h": drafts,
}


async def gather_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order; the first failure cancels the rest."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
