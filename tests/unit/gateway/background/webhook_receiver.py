"""A receiver of webhooks on a loopback port, and a verifier written from Standard Webhooks."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import web
from msgspec import Struct

TOLERANCE_S = 300


class Received(Struct, frozen=True):
    """A request that arrived."""

    headers: dict[str, str]
    body: bytes
    path: str


def verify(secret: str, headers: Mapping[str, str], body: bytes, now_s: int) -> bool:
    """Return whether the standard accepts this message: signature, and age within five minutes.

    `signed_content = "{webhook-id}.{webhook-timestamp}.{body}"`; the key is the base64 after
    `whsec_`; the header holds `v1,<base64>`, several separated by spaces.
    """
    message_id, sent_s = headers["webhook-id"], headers["webhook-timestamp"]
    if abs(now_s - int(sent_s)) > TOLERANCE_S:
        return False
    key = base64.b64decode(secret.split("_", 1)[1])
    content = f"{message_id}.{sent_s}.{body.decode('utf-8')}".encode()
    expected = hmac.digest(key, content, hashlib.sha256)
    versions = [one.split(",", 1) for one in headers["webhook-signature"].split(" ")]
    return any(
        name == "v1" and hmac.compare_digest(base64.b64decode(given), expected)
        for name, given in versions
    )


class Receiver:
    """Answers each request with the next status of `answers`, then with 204.

    A status of 0 answers nothing until the receiver closes.
    """

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)
        self.received: list[Received] = []
        self.url = ""
        self._closing = asyncio.Event()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.received.append(Received(headers, body, request.path))
        status = self.answers.pop(0) if self.answers else 204
        if status == 0:
            await self._closing.wait()
        location = {"Location": "/elsewhere"} if 300 <= status < 400 else {}
        return web.Response(status=status or 204, headers=location)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Receiver]:
        """Listen on a free loopback port."""
        runner = web.ServerRunner(web.Server(self.handle))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
        try:
            yield self
        finally:
            self._closing.set()
            await runner.cleanup()
