"""A collector of OpenTelemetry over HTTP, on loopback: it keeps the bodies that it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


class OtlpCollector:
    """An OTLP/HTTP collector. `status`: of its responses, once it `is_answering`; it keeps the
    bodies that it answers with 200, and with `keeps_all` the others too.
    """

    def __init__(self, *, keeps_all: bool = False) -> None:
        self.status = 200
        self.bodies: list[bytes] = []
        self.url = ""
        self.is_answering = asyncio.Event()
        self.is_answering.set()
        self._keeps_all = keeps_all

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        await self.is_answering.wait()
        if self._keeps_all or self.status == 200:
            self.bodies.append(body)
        return web.Response(status=self.status)

    @asynccontextmanager
    async def listen(self, path: str) -> AsyncIterator[None]:
        """Take what is posted to `path`, until the block ends."""
        app = web.Application()
        app.router.add_post(path, self.take)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}"
            yield
        finally:
            await runner.cleanup()
