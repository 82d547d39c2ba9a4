"""A minimal HTTP server: `python -m tests.bench.overhead.mock_server`.

Bare aiohttp without checks or counters, which answers with constants at the null engine's rate. The
difference to it is the gateway's overhead. `tests.bench.overhead.overhead` starts and measures it
in the same run.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import msgspec
from aiohttp import web

from tests.bench.overhead.null_gateway import Ready

_CHUNK = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":0,"model":"mock",'
    b'"service_tier":"default","system_fingerprint":null,"choices":[{"index":0,"delta":'
    b'{"content":"t"},"logprobs":null,"finish_reason":null}]}\n\n'
)
_LAST = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":0,"model":"mock",'
    b'"service_tier":"default","system_fingerprint":null,"choices":[{"index":0,"delta":{},'
    b'"logprobs":null,"finish_reason":"length"}]}\n\n'
    b"data: [DONE]\n\n"
)
_WHOLE = (
    b'{"id":"chatcmpl-0","object":"chat.completion","created":0,"model":"mock","choices":[{'
    b'"index":0,"message":{"role":"assistant","content":"tttt","refusal":null,"annotations":[]},'
    b'"logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":9,"completion_tokens":4,'
    b'"total_tokens":13},"service_tier":"default","system_fingerprint":null}'
)


async def answer(request: web.Request) -> web.StreamResponse:
    """Send as many constant events as `max_tokens`, at the rate of `seed`."""
    body: dict[str, Any] = msgspec.json.decode(await request.read())
    if not body.get("stream"):
        return web.Response(body=_WHOLE, content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    rate = body.get("seed") or 0
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    for _ in range(body["max_tokens"]):
        if rate:
            due_s += 1 / rate
            if due_s > loop.time():
                await asyncio.sleep(due_s - loop.time())
        await response.write(_CHUNK)
    await response.write(_LAST)
    return response


async def serve() -> None:
    """Serve until standard input ends."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ready = Ready(f"http://127.0.0.1:{runner.addresses[0][1]}", "none", "mock", os.getpid())
    sys.stdout.buffer.write(msgspec.json.encode(ready) + b"\n")
    sys.stdout.buffer.flush()
    await asyncio.to_thread(sys.stdin.buffer.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve())
