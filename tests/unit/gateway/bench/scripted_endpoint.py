"""A scripted endpoint with known timings and hits, a client of it, and a trace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from gateway.bench.client import BenchTarget, Client
from gateway.bench.figures import Figure
from gateway.bench.workloads import Sizes
from tests.fakes import FakeClock

SMALL = Sizes(
    long_prompt=64, question=8, stream_output=6, system=32, own=8, output=4, at_once=4, tenants=2,
    per_tenant=3, chats=2, turns=3, rates=(200.0,), seconds=0.03,
)  # fmt: skip

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WatchedClock(FakeClock):
    """A clock that reports its reads, so that a server can wait until its bytes were seen."""

    def __init__(self) -> None:
        super().__init__()
        self.read = asyncio.Event()

    def __call__(self) -> float:
        self.read.set()
        return super().__call__()


class Endpoint:
    """A scripted OpenAI-compatible endpoint. `pauses_s`: virtual seconds before each piece of text.

    It remembers every prompt, as a perfect cache would, and counts the cached tokens.
    """

    def __init__(self, clock: WatchedClock, pauses_s: tuple[float, ...] = (0.05, 0.01)) -> None:
        self.clock = clock
        self.pauses_s = pauses_s
        self.remembers = True
        self.reports_hits = True
        self.waits_for_reads = True
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self._seen: list[list[Any]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        prompt = _prompt_of(body)
        cached = max((common_prefix(prompt, other) for other in self._seen), default=0)
        cached = min(cached, len(prompt) - 1)
        if self.remembers:
            self._seen.append(prompt)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_chat = "messages" in body
        for number, pause_s in enumerate(self.pauses_s):
            self.clock.advance(pause_s)
            piece = {"delta": {"content": "ö"}} if is_chat else {"text": f"{number}"}
            await self._send(response, {"choices": [{"index": 0, **piece}]})
        usage: dict[str, Any] = {
            "prompt_tokens": len(prompt),
            "completion_tokens": body["max_tokens"],
        }
        if self.reports_hits:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        self.clock.read.clear()
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
        if self.waits_for_reads:
            await self.clock.read.wait()


def _prompt_of(body: dict[str, Any]) -> list[Any]:
    if "messages" in body:
        return list("".join(f"<{m['role']}>{m['content']}" for m in body["messages"]))
    prompt = body["prompt"]
    return list(prompt)


def common_prefix(a: list[Any], b: list[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@asynccontextmanager
async def serve(handler: Handler) -> AsyncIterator[str]:
    """Serve the handler for every path on a loopback port."""
    app = web.Application()
    app.router.add_post("/v1/{path:.*}", handler)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client_of(
    handler: Handler, clock: FakeClock, keys: tuple[str, ...] = ("",)
) -> AsyncIterator[Client]:
    async with serve(handler) as url, aiohttp.ClientSession() as session:
        yield Client(session, BenchTarget(url, "scripted", keys), clock)


def values(figures: list[Figure]) -> dict[str, float]:
    return {figure.name: figure.value for figure in figures}


MOONCAKE = (
    '{"timestamp": 1000, "input_length": 700, "output_length": 3, "hash_ids": [7, 8]}\n'
    '{"timestamp": 1500, "input_length": 520, "output_length": 2, "hash_ids": [7, 9]}\n'
)


def write_trace(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path
