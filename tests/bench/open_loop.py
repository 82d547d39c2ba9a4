"""Requests that arrive at random, for `tests.bench.gpu_http` and `tests.bench.gpu_mixed`: what is
sent when, by whom, and what the clients saw.

Arrivals are a Poisson process. A request's first token is counted from when the request was due, so
a client that falls behind does not hide the server's delay.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any, Literal

import aiohttp
from msgspec import Struct

from gateway.bench.figures import percentile
from gateway.bench.open_loop import poisson_times
from tests.bench.models import VOCAB

OtherTenant = Literal["prompts", "streams"]
OWN, OUTPUT = 64, 128
LEAD_S = 2.0
"""For so many seconds the quiet tenant is alone, before the other begins."""

REFERENCE = {
    "20/s": "vLLM 21 / 27, gap p99 9.2",
    "50/s": "vLLM 30 / 45, gap p99 13.8",
    "100/s": "vLLM 131 / 286, gap p99 126; 8.9k tok/s",
    "150/s": "vLLM 236 / 2,682, gap p99 207; 9.4k tok/s",
    "8 cold beside 64": "vLLM gap p99 207",
    "mixture 40/s": "vLLM 54 / 3,057",
}
"""vLLM 0.26 with the same client on the same kind of machine: first token p50 / p99, gap, ms."""


class Arrival(Struct, frozen=True):
    """A request: when it is due, its body, and after how many tokens its client leaves (0: never).

    `watched`: its gaps between tokens count; `timed`: its first token counts. `is_other`: sent with
    the other tenant's key.
    """

    due_s: float
    body: dict[str, Any]
    leave_after: int = 0
    watched: bool = True
    timed: bool = True
    is_other: bool = False


class Seen(Struct):
    """What a client saw of one request. Seconds since the run's start; `status` 0: cut off."""

    due_s: float
    watched: bool
    timed: bool
    status: int = 0
    tokens: int = 0
    cached: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    gaps: list[float] = []

    def add_token(self, now_s: float, before_s: float) -> None:
        """Note a token; `before_s`: when its sample's last one came, 0 for the first."""
        self.tokens += 1
        self.first_s = self.first_s or now_s
        self.last_s = now_s
        if before_s:
            self.gaps.append(now_s - before_s)


def tokens_of(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def body_of(model: str, prompt: list[int], count: int, **more: Any) -> dict[str, Any]:
    """Return the body of a streamed completion of `count` tokens, greedy unless `more` says
    otherwise."""
    return {
        "model": model, "prompt": prompt, "max_tokens": count, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, **more,
    }  # fmt: skip


def steady(model: str, rate: float, seconds: float) -> tuple[list[list[int]], list[Arrival]]:
    """Return eight prefixes of 2,048 to warm, and requests of 64 own tokens and 128 out."""
    rng = random.Random(int(rate))
    prefixes = [tokens_of(rng, 2_048) for _ in range(8)]
    return prefixes, [
        Arrival(due, body_of(model, rng.choice(prefixes) + tokens_of(rng, OWN), OUTPUT))
        for due in poisson_times(rng, rate, seconds)
    ]


def mixture(model: str, rate: float, seconds: float) -> tuple[list[list[int]], list[Arrival]]:
    """Return the leaves of a tree of two levels to warm, 4 x 1,024 and 4 x 512 under each, and
    requests of mixed lengths.

    A quarter asks for logprobs, a penalty or a seed with top-p, a tenth for two samples, and a
    fifth of the clients leaves.
    """
    rng = random.Random(1_000 + int(rate))
    roots = [tokens_of(rng, 1_024) for _ in range(4)]
    leaves = [root + tokens_of(rng, 512) for root in roots for _ in range(4)]
    arrivals = []
    for due in poisson_times(rng, rate, seconds):
        own, count = int(2 ** rng.uniform(4, 10)), int(2 ** rng.uniform(4, 8))
        more: dict[str, Any] = {"temperature": rng.choice([0, 0.7])}
        if rng.random() < 0.25:
            more |= rng.choice(
                [
                    {"logprobs": 5},
                    {"presence_penalty": 0.5, "frequency_penalty": 0.2},
                    {"seed": rng.randrange(1_000), "temperature": 0.8, "top_p": 0.9},
                ]
            )
        if rng.random() < 0.1:
            more |= {"n": 2, "temperature": 0.7}
        leave_after = rng.randrange(1, count) if rng.random() < 0.2 else 0
        prompt = rng.choice(leaves) + tokens_of(rng, own)
        arrivals.append(Arrival(due, body_of(model, prompt, count, **more), leave_after))
    return leaves, arrivals


def cold_beside_decoding(
    model: str, streams: int = 64, interval_s: float = 0.4
) -> tuple[list[list[int]], list[Arrival]]:
    """Return nothing to warm, streams whose gaps count, and 8 cold prompts of 8,192 whose first
    tokens count; without streams their gaps do."""
    rng = random.Random(8)
    arrivals = [
        Arrival(0.0, body_of(model, tokens_of(rng, 256), 700), timed=False) for _ in range(streams)
    ]
    for i in range(8):
        body = body_of(model, tokens_of(rng, 8_192), 16)
        arrivals.append(Arrival(1.5 + interval_s * i, body, watched=not streams))
    return [], arrivals


def quiet(
    model: str, seconds: float, other: OtherTenant | None
) -> tuple[list[list[int]], list[Arrival]]:
    """Return a prefix to warm, and a quiet tenant's requests, beside those of another or alone.

    The quiet tenant sends eight requests a second of 512 cached and 64 own tokens, 32 out. The
    other sends more than the machine can do: six cold prompts of 8,192 a second, one of which takes
    an H200 0.2 s, or streams of 256 tokens, 160 a second. Only what the quiet one sees counts, from
    a second after the other has begun: until a payer is known to share, steps are long.
    """
    rng = random.Random(15)
    prefix = tokens_of(rng, 512)
    arrivals = [
        Arrival(
            due, body_of(model, prefix + tokens_of(rng, OWN), 32),
            watched=due > LEAD_S + 1, timed=due > LEAD_S + 1,
        )
        for due in poisson_times(rng, 8, LEAD_S + 1 + seconds)
    ]  # fmt: skip
    if other is not None:
        rate, prompt, count = {"prompts": (6, 8_192, 1), "streams": (160, 64, 256)}[other]
        arrivals += [
            Arrival(
                LEAD_S + due, body_of(model, tokens_of(rng, prompt), count),
                watched=False, timed=False, is_other=True,
            )
            for due in poisson_times(rng, rate, 1 + seconds)
        ]  # fmt: skip
    return [prefix], arrivals


async def send(
    session: aiohttp.ClientSession, arrival: Arrival, start_s: float, other_key: str
) -> Seen:
    """Send a request when it is due and read its stream; return what was seen of it."""
    seen = Seen(arrival.due_s, arrival.watched, arrival.timed)
    before: dict[bytes, float] = {}
    body = json.dumps(arrival.body).encode()
    headers = {"Authorization": f"Bearer {other_key}"} if arrival.is_other else None
    await asyncio.sleep(max(0.0, start_s + seen.due_s - time.monotonic()))
    try:
        async with session.post("/v1/completions", data=body, headers=headers) as response:
            seen.status = response.status
            if response.status != 200:
                await response.read()
                return seen
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                if b'"choices":[]' in line:
                    usage = json.loads(line[6:])["usage"]
                    seen.tokens = usage["completion_tokens"]  # counts tokens without text, too
                    seen.cached = usage["prompt_tokens_details"]["cached_tokens"]
                    continue
                now_s = time.monotonic() - start_s
                at = line.find(b'"index":')
                sample = line[at + 8 : at + 9]
                seen.add_token(now_s, before.get(sample, 0.0))
                before[sample] = now_s
                if arrival.leave_after and seen.tokens >= arrival.leave_after:
                    response.close()
                    return seen
    except (aiohttp.ClientError, ConnectionError):
        seen.status = 0
    return seen


def in_ms(values: list[float], percent: float) -> float:
    """Return a percentile of seconds, in ms; 0 of nothing."""
    return percentile(values, percent) * 1e3 if values else 0.0


def summary(name: str, all_seen: list[Seen]) -> str:
    """Return a line: first tokens, gaps, tokens per second, refusals, and the reference."""
    served = [seen for seen in all_seen if seen.status == 200 and seen.tokens]
    firsts = [seen.first_s - seen.due_s for seen in served if seen.timed]
    gaps = [gap for seen in served if seen.watched for gap in seen.gaps]
    cut = sum(seen.status == 0 for seen in all_seen)
    wall_s = max((seen.last_s for seen in served), default=1.0)
    total = sum(seen.tokens for seen in served)
    return (
        f"{name}: first token p50 / p99 {in_ms(firsts, 50):.1f} / {in_ms(firsts, 99):.1f},"
        f" gap p50 {in_ms(gaps, 50):.1f} p99 {in_ms(gaps, 99):.1f} max {in_ms(gaps, 100):.0f} ms;"
        f" {total / wall_s:.0f} tok/s; {len(served)} of {len(all_seen)} served,"
        f" {len(all_seen) - len(served) - cut} refused, {cut} cut off"
        + (f"  [{REFERENCE[name]}]" if name in REFERENCE else "")
    )
