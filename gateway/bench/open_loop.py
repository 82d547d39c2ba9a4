"""Open loop: requests are sent when they are due, whether or not earlier ones were answered.

Latency counts from the time at which a request is due, so an endpoint that falls behind cannot hide
it by slowing the client down. Replays of traces (f) and random arrivals (g) send this way.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

from msgspec import Struct

from gateway.bench.client import BenchError, Client, Measurement
from gateway.bench.figures import Figure, batch_figures, first_token_times, percentile
from gateway.bench.prompts import Prompt


class DueRequest(Struct, frozen=True):
    """A request, and when it is due, in seconds since the start of the run."""

    due_s: float
    prompt: Prompt
    output_tokens: int
    tenant: int


def poisson_times(chance: random.Random, rate: float, seconds: float) -> list[float]:
    """Return the arrivals of a Poisson process with `rate` a second, of the first `seconds`."""
    times, at_s = [], chance.expovariate(rate)
    while at_s < seconds:
        times.append(at_s)
        at_s += chance.expovariate(rate)
    return times


async def send_when_due(client: Client, label: str, requests: Iterable[DueRequest]) -> list[Figure]:
    """Send each request when it is due, and wait for all responses; failed requests are counted.

    `requests` in the order of their times; an iterator may make each when it is next. Raises
    BenchError if all failed.
    """
    start_s = client.clock()
    done: list[Measurement] = []
    failed: list[BenchError] = []
    late_max_s = 0.0

    async def send(request: DueRequest, due_s: float) -> None:
        try:
            done.append(
                await client.complete(
                    request.prompt, request.output_tokens, tenant=request.tenant, due_s=due_s
                )
            )
        except BenchError as error:
            failed.append(error)

    async with asyncio.TaskGroup() as tasks:
        for request in requests:
            due_s = start_s + request.due_s
            await asyncio.sleep(max(0.0, due_s - client.clock()))
            late_max_s = max(late_max_s, client.clock() - due_s)
            tasks.create_task(send(request, due_s))
    if not done:
        raise BenchError(f"All {len(failed)} requests failed; the first: {failed[0]}")
    p99_s = percentile(first_token_times(done), 99)
    return [
        *batch_figures(label, start_s, done),
        Figure(f"{label}first token p99", "ms", p99_s * 1e3),
        Figure(f"{label}answered", "requests", len(done)),
        Figure(f"{label}failed", "requests", len(failed)),
        Figure(f"{label}most delay of sending", "ms", late_max_s * 1e3),
    ]
