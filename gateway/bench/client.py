"""A streaming client that records when each piece of text arrives.

One request gives one `Measurement`: times on the client's clock, counts from the endpoint's usage.
It knows no workload.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
from msgspec import Struct

Clock = Callable[[], float]

LINE_BYTES_MAX = 1 << 20
"""Longest line of a stream."""


class BenchError(Exception):
    """An endpoint failed a requirement of the benchmark; the message names it and a remedy."""


class BenchTarget(Struct, frozen=True):
    """An endpoint."""

    url: str
    model: str
    keys: tuple[str, ...]
    """One per tenant."""
    ignores_end: bool = True
    """Whether the endpoint accepts `ignore_eos` (Trunkline and vLLM do), so that outputs have
    full length."""

    def headers(self, tenant: int = 0) -> dict[str, str]:
        """Return the headers that authenticate a tenant, by its number."""
        key = self.keys[tenant % len(self.keys)]
        return {"Authorization": f"Bearer {key}"} if key else {}


class Measurement(Struct, frozen=True):
    """One completed request.

    Counts are the endpoint's; `cached_tokens` is None if it does not report them.
    """

    sent_s: float
    """When it was due."""
    pieces_s: tuple[float, ...]
    """When each piece of text arrived."""
    ended_s: float
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    text: str

    @property
    def first_s(self) -> float:
        """Seconds to the first piece of text."""
        return (self.pieces_s[0] if self.pieces_s else self.ended_s) - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between successive pieces."""
        return [b - a for a, b in zip(self.pieces_s, self.pieces_s[1:], strict=False)]


class Client:
    """Sends requests to one target over one session.

    `due_s` replaces the time of sending in measurements: when the request should have been sent.
    """

    def __init__(self, session: aiohttp.ClientSession, target: BenchTarget, clock: Clock) -> None:
        self.session = session
        self.target = target
        self.clock = clock

    async def complete(
        self,
        prompt: list[int] | str,
        output_tokens: int,
        *,
        tenant: int = 0,
        due_s: float | None = None,
    ) -> Measurement:
        """Request a completion of a prompt in text or token ids. Raises BenchError."""
        return await self._send("/completions", {"prompt": prompt}, output_tokens, tenant, due_s)

    async def chat(
        self,
        messages: list[dict[str, str]],
        output_tokens: int,
        *,
        fields: Mapping[str, Any] = {},
        headers: Mapping[str, str] = {},
    ) -> Measurement:
        """Request the next turn of a conversation of the first tenant, with further `fields` and
        `headers`. Raises BenchError."""
        body = {"messages": messages, **fields}
        return await self._send("/chat/completions", body, output_tokens, 0, None, headers)

    async def _send(
        self,
        path: str,
        body: dict[str, Any],
        output_tokens: int,
        tenant: int,
        due_s: float | None,
        headers: Mapping[str, str] = {},
    ) -> Measurement:
        body |= {
            "model": self.target.model,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.target.ignores_end:
            body.setdefault("ignore_eos", True)
        else:
            body.pop("ignore_eos", None)
        sent_s = self.clock() if due_s is None else due_s
        sent = {**self.target.headers(tenant), **headers}
        try:
            async with self.session.post(
                self.target.url + path, json=body, headers=sent
            ) as response:
                if response.status != 200:
                    raise BenchError(_error_message(body, response.status, await response.text()))
                return await self._read(response, sent_s)
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise BenchError(f"{self.target.url}{path}: {reason}.") from error

    async def _read(self, response: aiohttp.ClientResponse, sent_s: float) -> Measurement:
        pieces_s: list[float] = []
        texts: list[str] = []
        usage: dict[str, Any] = {}
        async for at_s, event in _events(response, self.clock):
            if "error" in event:
                raise BenchError(f"The stream ended with an error: {json.dumps(event['error'])}.")
            text = "".join(_text(choice) for choice in event.get("choices") or [])
            if text:
                pieces_s.append(at_s)
                texts.append(text)
            usage = event.get("usage") or usage
        if not usage:
            raise BenchError(
                "The endpoint reports no usage in its stream (stream_options.include_usage)."
            )
        details = usage.get("prompt_tokens_details") or {}
        return Measurement(
            sent_s=sent_s,
            pieces_s=tuple(pieces_s),
            ended_s=self.clock(),
            prompt_tokens=int(usage.get("prompt_tokens", 0)),
            cached_tokens=details.get("cached_tokens"),
            output_tokens=int(usage.get("completion_tokens", 0)),
            text="".join(texts),
        )


async def _events(
    response: aiohttp.ClientResponse, clock: Clock
) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """Yield server-sent events with the time at which their bytes arrived."""
    rest = b""
    async for data in response.content.iter_any():
        at_s = clock()
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > LINE_BYTES_MAX:
            raise BenchError("The stream has a line longer than 1 MiB.")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            content = line[5:].strip()
            if content == b"[DONE]":
                return
            try:
                event = json.loads(content)
            except ValueError as error:
                raise BenchError(f"The stream has an event that is not JSON: {error}.") from error
            if isinstance(event, dict):
                yield at_s, event


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return str(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or "")


def _error_message(body: dict[str, Any], status: int, answer: str) -> str:
    message = f"The endpoint returned {status}: {answer[:300].strip()}"
    if status in (400, 422) and "ignore_eos" in answer:
        message += " (pass --no-ignore-eos if the endpoint does not know the field)"
    elif status in (400, 422) and isinstance(body.get("prompt"), list):
        message += " (pass --text if the endpoint takes no token ids)"
    return message
