"""A streaming client that notes when each piece of text came.

One request is one `Measured`: instants on the client's clock, counts from the endpoint's own usage.
It knows no workload. `workloads` and `trace` call it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
from msgspec import Struct

Clock = Callable[[], float]

LINE_BYTES_MAX = 1 << 20


class BenchError(Exception):
    """The endpoint did not do what a benchmark needs; the message says what and what would."""


class BenchTarget(Struct, frozen=True):
    """An endpoint. `keys`: one for each tenant that it may be driven as."""

    url: str
    model: str
    keys: tuple[str, ...] = ("",)
    ignores_end: bool = True
    """Whether it takes `ignore_eos` (ours and vLLM do): outputs are then as long as asked."""

    def headers(self, tenant: int = 0) -> dict[str, str]:
        """What authenticates a tenant."""
        key = self.keys[tenant % len(self.keys)]
        return {"Authorization": f"Bearer {key}"} if key else {}


class Measured(Struct, frozen=True):
    """One answered request. `sent_s`: when it was due; `pieces_s`: when each piece of text came.

    Counts are the endpoint's. `cached_tokens` is None where it does not say.
    """

    sent_s: float
    pieces_s: tuple[float, ...]
    ended_s: float
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    text: str

    @property
    def first_s(self) -> float:
        """Time to the first piece of text."""
        return (self.pieces_s[0] if self.pieces_s else self.ended_s) - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between one piece and the next."""
        return [b - a for a, b in zip(self.pieces_s, self.pieces_s[1:], strict=False)]


class Client:
    """Sends to one target over one session. `due_s` stands for the instant of sending where a
    request was to go out earlier than it could."""

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
    ) -> Measured:
        """A completion of a prompt in text or token ids."""
        return await self._ask("/completions", {"prompt": prompt}, output_tokens, tenant, due_s)

    async def chat(
        self,
        messages: list[dict[str, str]],
        output_tokens: int,
        *,
        tenant: int = 0,
        due_s: float | None = None,
    ) -> Measured:
        """The next turn of a conversation."""
        body = {"messages": messages}
        return await self._ask("/chat/completions", body, output_tokens, tenant, due_s)

    async def _ask(
        self, path: str, body: dict[str, Any], output_tokens: int, tenant: int, due_s: float | None
    ) -> Measured:
        body |= {
            "model": self.target.model,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.target.ignores_end:
            body["ignore_eos"] = True
        sent_s = self.clock() if due_s is None else due_s
        try:
            async with self.session.post(
                self.target.url + path, json=body, headers=self.target.headers(tenant)
            ) as response:
                if response.status != 200:
                    raise BenchError(_refusal(body, response.status, await response.text()))
                return await self._read(response, sent_s)
        except (aiohttp.ClientError, TimeoutError) as error:
            what = str(error) or type(error).__name__
            raise BenchError(f"{self.target.url}{path}: {what}.") from error

    async def _read(self, response: aiohttp.ClientResponse, sent_s: float) -> Measured:
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
        return Measured(
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
    """Server-sent events with the instant at which their bytes arrived."""
    rest = b""
    async for data in response.content.iter_any():
        at_s = clock()
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > LINE_BYTES_MAX:
            raise BenchError("The stream has a line of more than a megabyte.")
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


def _refusal(asked: dict[str, Any], status: int, said: str) -> str:
    message = f"The endpoint answered {status}: {said[:300].strip()}"
    if status in (400, 422) and "ignore_eos" in said:
        message += " (give --no-ignore-eos: this endpoint does not know the field)"
    elif status in (400, 422) and isinstance(asked.get("prompt"), list):
        message += " (if it takes no token ids as a prompt, give --text)"
    return message
