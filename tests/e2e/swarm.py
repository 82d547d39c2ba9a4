"""A seeded swarm of clients that send everything at once, and disconnect at random."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import aiohttp

CLIENTS = 12
LEAVES_WITHIN_S = 0.05
SHARED = "The trunk is shared, the branches are one's own. "
PLANTED = "planted words"
"""Text in every prompt, and nowhere else."""

NAMES = 8
EXPECTED = frozenset({200, 400, 401, 403, 404, 405, 409, 413, 415, 429, 503})
"""Statuses of client errors and successes; no request may cause another one."""


class Swarm:
    """Clients of one server.

    `left`: requests whose clients disconnected. `wrong`: responses that should not exist.
    """

    def __init__(self, url: str, keys: tuple[str, ...], model: str, seed: int) -> None:
        self._url = url
        self._keys = keys
        self._model = model
        self._seed = seed
        self._kept: dict[tuple[str, str], bytes] = {}
        self._resources: list[tuple[str, str]] = []
        self._erasures = 0
        self._erasing = 0
        self.left = 0
        self.wrong: list[str] = []

    async def run(self, requests: int) -> None:
        """Send so many requests."""
        asked = 0

        async def client(number: int) -> None:
            nonlocal asked
            chance = random.Random(f"{self._seed} {number}")
            async with aiohttp.ClientSession() as session:
                while asked < requests:
                    asked += 1
                    what = chance.choices(_WHATS, _WEIGHTS)[0]
                    await what(self, session, chance)

        await asyncio.gather(*map(client, range(CLIENTS)))

    # -- requests -------------------------------------------------------------------------------

    async def chat(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        body = {
            "model": self._model,
            "messages": [
                {"role": "system", "content": SHARED * chance.randint(1, 3)},
                {"role": "user", "content": _words(chance)},
            ],
            "max_tokens": chance.randint(1, 24),
            "stream": chance.random() < 0.6,
            "n": chance.choice((1, 1, 1, 2)),
        }
        if chance.random() < 0.3:
            body["stop"] = chance.choices("etaoin", k=2)
        if chance.random() < 0.3:
            body["cache_salt"] = f"partition {chance.randint(1, 5)}"
        await self._send(session, chance, "/v1/chat/completions", body)

    async def completion(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        prompt: Any = [_words(chance) for _ in range(chance.randint(1, 3))]
        body = {"model": self._model, "prompt": prompt, "max_tokens": chance.randint(1, 12)}
        body["stream"] = chance.random() < 0.5
        await self._send(session, chance, "/v1/completions", body)

    async def response(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        body = {
            "model": self._model,
            "instructions": SHARED,
            "input": _words(chance),
            "max_output_tokens": chance.randint(16, 32),
            "stream": chance.random() < 0.6,
        }
        await self._send(session, chance, "/v1/responses", body)

    async def message(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        """Send a message, every second time with a breakpoint; sometimes a prewarm or a count."""
        text: dict[str, Any] = {"type": "text", "text": SHARED * 2}
        if chance.random() < 0.6:
            text["cache_control"] = {"type": "ephemeral", "ttl": chance.choice(("5m", "1h"))}
        body: dict[str, Any] = {
            "model": self._model,
            "system": [text],
            "messages": [{"role": "user", "content": _words(chance)}],
        }
        if chance.random() < 0.1:
            await self._send(session, chance, "/v1/messages/count_tokens", body)
            return
        body["max_tokens"] = chance.choice((0, 1, 8, 24))
        body["stream"] = bool(body["max_tokens"]) and chance.random() < 0.6
        await self._send(session, chance, "/v1/messages", body)

    async def gemini(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        """Send a request over a cached content, if one exists."""
        action = chance.choice(
            ("generateContent", "streamGenerateContent", "streamGenerateContent?alt=sse")
        )
        path = f"/v1beta/models/{self._model}:{action}"
        body: dict[str, Any] = {
            "contents": [{"role": "user", "parts": [{"text": _words(chance)}]}],
            "generationConfig": {"maxOutputTokens": chance.randint(1, 16)},
        }
        key = None
        if self._resources and chance.random() < 0.6:
            key, body["cachedContent"] = chance.choice(self._resources)
        await self._send(session, chance, path, body, key=key)

    async def resource(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        """Create, list or delete cached contents."""
        if self._resources and chance.random() < 0.5:
            key, name = self._resources.pop(chance.randrange(len(self._resources)))
            await self._send(session, chance, f"/v1beta/{name}", None, key=key, method="DELETE")
            return
        if chance.random() < 0.2:
            await self._send(session, chance, "/v1beta/cachedContents", None, method="GET")
            return
        key = chance.choice(self._keys)
        body = {
            "model": f"models/{self._model}",
            "contents": [{"role": "user", "parts": [{"text": SHARED * 2 + _words(chance)}]}],
            "ttl": "600s",
        }
        made = await self._send(session, chance, "/v1beta/cachedContents", body, key=key)
        if made is not None:
            self._resources.append((key, json.loads(made)["name"]))

    async def idempotent(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        """Send one of a few requests that are repeated: each has one response."""
        number, key = chance.randrange(NAMES), chance.choice(self._keys)
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": f"{PLANTED} {number}"}],
            "max_tokens": 12,
            "stream": bool(number % 2),
        }
        name = f"name {number}"
        before, is_erasing = self._erasures, self._erasing > 0
        found = await self._send(session, chance, "/v1/chat/completions", body, key=key, name=name)
        if found is None or is_erasing or self._erasing or before != self._erasures:
            return  # an erasure deletes stored responses too
        if self._kept.setdefault((key, name), found) != found:
            self.wrong.append(f"{name} was answered twice")

    async def quote(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        request = {"model": self._model, "messages": [{"role": "user", "content": _words(chance)}]}
        body = {"endpoint": "/v1/chat/completions", "request": request}
        await self._send(session, chance, "/v1/cache/quote", body)

    async def read_only(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        """Send a request that costs no tokens, or an unknown path."""
        path = chance.choice(
            ("/v1/models", "/v1/cache", "/v1/usage", "/health", "/readyz", "/v1/nothing")
        )
        await self._send(session, chance, path, None, method="GET")

    async def erase(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        """Erase the cache beside running requests."""
        lease = chance.choice(("", "?lease_id=" + "ab" * 16))
        self._erasing += 1
        await self._send(session, chance, f"/v1/cache{lease}", None, method="DELETE", stays=True)
        self._erasing -= 1
        self._erasures += 1
        self._kept.clear()

    async def invalid(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        """Send a truncated body, or an invalid value."""
        path = chance.choice(("/v1/chat/completions", "/v1/messages", "/v1/responses"))
        wrong: Any = chance.choice((-1, 1e308, "x", None, [], {}, True, 2**70, "\ud800"))
        field = chance.choice(("max_tokens", "stream", "messages", "model", "temperature", "n"))
        body = {"model": self._model, "messages": [{"role": "user", "content": _words(chance)}]}
        data = json.dumps({**body, field: wrong}).encode()
        if chance.random() < 0.4:
            data = data[: chance.randrange(len(data))]
        await self._send(session, chance, path, data)

    # -- sending --------------------------------------------------------------------------------

    async def _send(
        self,
        session: aiohttp.ClientSession,
        chance: random.Random,
        path: str,
        body: dict[str, Any] | bytes | None,
        *,
        key: str | None = None,
        name: str | None = None,
        method: str = "POST",
        stays: bool = False,
    ) -> bytes | None:
        """Send a request; return the response's bytes if it succeeded and was awaited.

        A third of all clients disconnect early, some before a byte, some during a stream; not with
        `stays`.
        """
        key = key or chance.choice(self._keys)
        headers = {"Authorization": f"Bearer {key}"}
        if chance.random() < 0.02:
            headers["Authorization"] = "Bearer tl-nobody"
        if name is not None:
            headers["Idempotency-Key"] = name
        data = body if isinstance(body, bytes) else None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = data if data is not None else json.dumps(body).encode()
        patience_s = chance.uniform(0, LEAVES_WITHIN_S) if chance.random() < 0.33 else None
        patience_s = None if stays else patience_s
        reads = chance.choice((1, 200, 2_000)) if chance.random() < 0.1 else None
        place = (
            "idempotent" if name else path.partition("?")[0].rpartition("/")[2].rpartition(":")[2]
        )
        what = f"{method} {place if len(place) < 30 else 'one'}"
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                async with session.request(
                    method, self._url + path, data=data, headers=headers
                ) as response:
                    if response.status not in EXPECTED:
                        self.wrong.append(f"{what}: {response.status} {await response.text()}")
                    if reads is not None:
                        await response.content.read(reads)
                        response.close()
                    else:
                        found = await response.read()
                        return found if response.status == 200 else None
        self.left += 1
        return None


_MIX: dict[Callable[[Swarm, aiohttp.ClientSession, random.Random], Coroutine[Any, Any, None]], int]
_MIX = {
    Swarm.chat: 20,
    Swarm.completion: 8,
    Swarm.response: 10,
    Swarm.message: 15,
    Swarm.gemini: 12,
    Swarm.resource: 6,
    Swarm.idempotent: 10,
    Swarm.quote: 4,
    Swarm.read_only: 6,
    Swarm.erase: 1,
    Swarm.invalid: 8,
}
_WHATS, _WEIGHTS = tuple(_MIX), tuple(_MIX.values())


def _words(chance: random.Random) -> str:
    """Return text that is partly repeated, in several scripts."""
    said = chance.choice(("ascii only", "Grüße", "日本語", "🌳 " * 4, "\u202eright to left"))
    return f"{PLANTED} {chance.randint(1, 30)} {said} " * chance.randint(1, 2)
