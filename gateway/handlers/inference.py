"""Answering prompts: parse, render, admit, hold, submit, stream, settle.

One function for every dialect; a unary answer is the fold of the stream. Whatever happens between
the hold and the last byte (a refusal, a dead engine, a client that leaves), the request is
cancelled in the engine and settled in the ledger exactly once. The last bytes of a good answer
wait until its entry is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Protocol

from aiohttp import web

from engine.api import Request
from engine.client import RequestStream
from engine.errors import EngineError, EngineUnavailable
from gateway.admission import Circumstances, admit
from gateway.context import Context
from gateway.dialects import openai_chat, openai_completions
from gateway.dialects.canonical import Call, Delta, End, Prompt, Rendered, Reply
from gateway.errors import Kind, Refusal
from gateway.metering import Account
from gateway.middleware import STATE, ErrorShape, Handler, RequestState, Route, refusal_of
from gateway.server import ClientGone, read_body, send, write
from gateway.stream import AnswerStream
from tenancy.errors import LedgerUnavailable
from tenancy.types import Identity

INLINE_SIGNS_MAX = 4_096
"""Prompts up to this long are tokenized on the event loop; longer ones in a thread."""

JOINED_SIGNS_MAX = 4
"""How many characters a tokenizer's normalizer may make one of (a letter and its marks)."""


class Encoder(Protocol):
    """One answer's way to bytes."""

    def stream(self, delta: Delta) -> bytes:
        """Bytes of one delta; may be none."""

    def close(self) -> bytes:
        """After the last one."""

    def unary(self, deltas: Sequence[Delta]) -> bytes:
        """The fold of the stream."""

    def error_event(self, refusal: Refusal) -> bytes:
        """The answer breaks off."""


class Dialect(ErrorShape, Protocol):
    """What inference needs of a dialect."""

    stream_content_type: str

    def parse(self, body: bytes) -> Call:
        """Raises Refusal."""

    def encoder(self, call: Call, reply: Reply) -> Encoder:
        """For one answer."""

    def keep_alive(self) -> bytes:
        """Bytes that mean nothing."""


def routes(gateway: Context) -> tuple[Route, ...]:
    """The inference endpoints."""
    chat, completions = openai_chat.DIALECT, openai_completions.DIALECT
    return (
        Route(
            "POST",
            "/v1/chat/completions",
            _handler(gateway, chat, "chatcmpl-"),
            "inference",
            chat,
        ),
        Route(
            "POST",
            "/v1/completions",
            _handler(gateway, completions, "cmpl-"),
            "inference",
            completions,
        ),
    )


def _handler(gateway: Context, dialect: Dialect, id_prefix: str) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await _Answer(gateway, dialect, request).run(id_prefix)

    return handle


class _Answer:
    """One request on its way through."""

    def __init__(self, gateway: Context, dialect: Dialect, request: web.Request) -> None:
        self._gateway = gateway
        self._dialect = dialect
        self._request = request
        self._state: RequestState = request[STATE]
        self._response: web.StreamResponse | None = None

    async def run(self, id_prefix: str) -> web.StreamResponse:
        """Everything up to the hold; nothing has to be undone before it."""
        gateway, state = self._gateway, self._state
        identity = state.identity
        assert identity is not None, "this route asks for a key"
        _check_media(self._request)
        body = await read_body(self._request, gateway.config.server)
        call = self._dialect.parse(body)
        del body
        state.model, state.is_stream = gateway.model, call.stream
        if call.model not in gateway.model_names:
            raise _no_such_model(gateway)
        if gateway.is_draining:
            raise _shutting_down()
        rendered = [await _render(gateway, prompt) for prompt in call.prompts]
        reply = Reply(f"{id_prefix}{state.request_id}", call.model, gateway.wall() // 1000)
        encoder = self._dialect.encoder(call, reply)
        return await self._admitted(call, rendered, identity, encoder)

    async def _admitted(
        self, call: Call, rendered: list[Rendered], identity: Identity, encoder: Encoder
    ) -> web.StreamResponse:
        """From the tenant's count to the ledger's entry, however it ends."""
        gateway, tenant_id = self._gateway, identity.tenant.tenant_id
        requests = admit(
            call, rendered, identity, self._state.request_id, _circumstances(gateway, tenant_id)
        )
        account = Account(
            gateway.ledger, gateway.wall, self._state.request_id, identity, gateway.model
        )
        gateway.enter(tenant_id)
        answer = AnswerStream(call, rendered, (), gateway.renderer)
        ending = "failed"
        try:
            await account.open()
            answer = AnswerStream(call, rendered, await self._submit(requests), gateway.renderer)
            shape = self._stream if call.stream else self._unary
            response = await shape(answer, encoder, account)
            ending = self._state.code
        except (asyncio.CancelledError, ClientGone):
            ending = "cancelled"
            raise
        except (Refusal, EngineError) as error:
            ending = error.code
            raise
        else:
            return response
        finally:
            gateway.leave(tenant_id)
            await gateway.finish(self._give_up(answer, account, ending))

    async def _submit(self, requests: tuple[Request, ...]) -> list[RequestStream]:
        """All prompts of a call or none."""
        streams: list[RequestStream] = []
        try:
            streams.extend(map(self._gateway.engine.submit, requests))
        except EngineError:
            for stream in streams:
                await stream.aclose()
            raise
        return streams

    async def _give_up(self, answer: AnswerStream, account: Account, ending: str) -> None:
        """After any ending: cancel what runs, settle what was not. Both may be done already."""
        await answer.cancel()
        self._note(answer)
        if account.is_open:
            with suppress(LedgerUnavailable):  # the hold stays and is closed at the next start
                await account.settle(ending, answer.usage_so_far())

    def _note(self, answer: AnswerStream) -> None:
        usage = answer.usage_so_far()
        self._state.prompt_tokens = usage.total_in
        self._state.cached_tokens = usage.physical_cached
        self._state.output_tokens = usage.out
        self._state.first_token_s = answer.first_token_s

    # -- the two shapes of an answer ------------------------------------------------------------

    async def _unary(
        self, answer: AnswerStream, encoder: Encoder, account: Account
    ) -> web.StreamResponse:
        deltas: list[Delta] = []
        async for batch in answer.batches():
            deltas.extend(batch)
        await self._settle(deltas, account)
        return await send(
            self._request,
            200,
            encoder.unary(deltas),
            {"Content-Type": "application/json"},
            self._gateway.config.server.write_timeout_s,
        )

    async def _stream(
        self, answer: AnswerStream, encoder: Encoder, account: Account
    ) -> web.StreamResponse:
        """Server-sent events. Until the first one, an error is still a plain HTTP answer."""
        interval_s = self._gateway.config.server.stream_keep_alive_s
        try:
            async for batch in paced(answer.batches(), interval_s):
                if batch is None:
                    await self._send(self._dialect.keep_alive())
                    continue
                data = b"".join(map(encoder.stream, batch))
                if batch and isinstance(batch[-1], End):
                    await self._settle(batch, account)
                    data += encoder.close()
                if data:
                    await self._send(data)
                if batch and isinstance(batch[-1], End):
                    self._state.is_complete = True
                    break
        except (Refusal, EngineError, LedgerUnavailable) as error:
            await self._break_off(encoder, error)
        assert self._response is not None, "a whole answer has bytes"
        return self._response

    async def _break_off(self, encoder: Encoder, error: Exception) -> None:
        """Tell the client inside the stream, then break the connection: half is not whole."""
        if self._response is None:
            raise error
        refusal = refusal_of(error) or Refusal(
            Kind.INTERNAL, "internal_error", "The answer broke off."
        )
        self._state.ending, self._state.code = "failed", refusal.code
        await self._send(encoder.error_event(refusal))
        self._response.force_close()

    async def _send(self, data: bytes) -> None:
        if self._response is None:
            self._response = web.StreamResponse(
                headers={
                    "Content-Type": self._dialect.stream_content_type,
                    "X-Accel-Buffering": "no",
                }
            )
            await self._response.prepare(self._request)
        timeout_s = self._gateway.config.server.write_timeout_s
        await write(self._request, self._response, data, timeout_s)

    async def _settle(self, deltas: Sequence[Delta], account: Account) -> None:
        last = deltas[-1]
        assert isinstance(last, End), "a whole answer ends with its usage"
        await account.settle("done", last.usage)


async def paced(
    batches: AsyncIterator[list[Delta]], interval_s: float
) -> AsyncIterator[list[Delta] | None]:
    """The same batches, with None wherever nothing came for `interval_s`."""
    reading: asyncio.Future[list[Delta]] | None = None
    try:
        while True:
            reading = asyncio.ensure_future(anext(batches))
            while not (await asyncio.wait([reading], timeout=interval_s))[0]:
                yield None
            try:
                batch = reading.result()
            except StopAsyncIteration:
                return
            yield batch
    finally:
        if reading is not None:
            reading.cancel()
            await asyncio.wait([reading])
            if not reading.cancelled():
                reading.exception()  # known to whoever reads; asked for so that nobody is warned


def _circumstances(gateway: Context, tenant_id: int) -> Circumstances:
    info = gateway.engine.info
    if info is None or not gateway.engine.ready():
        raise EngineUnavailable("not_ready", "The engine is starting.", 2.0)
    return Circumstances(
        info=info,
        stats=gateway.engine.stats,
        limits=gateway.config.limits,
        template_digest=gateway.renderer.template_digest,
        model_stop_token_ids=gateway.renderer.stop_token_ids,
        running=gateway.running[tenant_id],
    )


async def _render(gateway: Context, prompt: Prompt) -> Rendered:
    """Tokens of a prompt; long ones in a thread, so that the loop keeps serving others."""
    signs = len(prompt.text or "") + sum(len(segment.text) for segment in prompt.segments)
    _check_signs(gateway, signs)
    if signs <= INLINE_SIGNS_MAX:
        return gateway.renderer.render(prompt)
    return await asyncio.to_thread(gateway.renderer.render, prompt)


def _check_signs(gateway: Context, signs: int) -> None:
    """Refuse what cannot fit, however it is tokenized: counting 9 MB of words takes half a minute.

    A token stands for at most as many signs as the longest has bytes; normalizing may join a few.
    """
    info = gateway.engine.info
    if info is None:
        return
    signs_max = info.context_tokens * gateway.token_bytes_max * JOINED_SIGNS_MAX
    if signs > signs_max:
        message = (
            f"The request is too long: this model's context is {info.context_tokens} tokens, which"
            f" never hold more than {signs_max} characters, and the prompt has {signs}."
        )
        raise Refusal(Kind.BAD, "context_length_exceeded", message, param="messages")


def _check_media(request: web.Request) -> None:
    if request.content_type != "application/json" or (request.charset or "utf-8") != "utf-8":
        message = "The body has to be application/json in UTF-8."
        raise Refusal(Kind.MEDIA, "unsupported_media_type", message)


def _no_such_model(gateway: Context) -> Refusal:
    names = ", ".join(gateway.model_names)
    message = f"There is no such model here; there is: {names}."
    return Refusal(Kind.NOT_FOUND, "model_not_found", message, param="model")


def _shutting_down() -> Refusal:
    message = "This server is shutting down."
    return Refusal(Kind.BUSY, "shutting_down", message, retry_after_s=5.0)
