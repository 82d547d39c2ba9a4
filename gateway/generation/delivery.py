"""What becomes of an answer: its bytes, and how they reach its client.

    plain ─ encoded as it comes; a client that leaves cancels its request
    threaded ─ an answer with the logprobs of whole prompts is encoded off the event loop
    stored (`stored_responses`) ─ the response is stored before its last bytes
    idempotent ─ the request runs to its end, and an `Idempotency-Key` replays its answer

A key belongs to its tenant and to one request: path, query, version, body and workspace. The same
request sent again gets the first response, byte for byte, and pays nothing
(`tenancy.ledger.idempotency` stores responses). The module knows no dialect by name and no engine.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial

import msgspec
from aiohttp import web

from gateway.config import IdempotencyConfig
from gateway.dialects.canonical import Delta, Text
from gateway.dialects.families import VERSION_HEADERS
from gateway.dialects.protocol import Encoder
from gateway.errors import Kind, Refusal
from gateway.generation.output_stream import InThread
from gateway.generation.rate_limits import RateLimits
from gateway.http.request_body import BODY_SHARE
from gateway.http.request_context import STATE
from gateway.http.response import PIECE_BYTES, ClientGone, begin, send, streamed, write
from gateway.ledger.query_pool import QueryPool
from gateway.unfinished_work import BackgroundWork
from tenancy.ledger.idempotency import Claim, ReplayedResponse, ReplayRecord, find
from tenancy.limits import NO_DEMAND
from tenancy.storage.interface import Store
from tenancy.types import HOUR_MS, Identity, WallClock

KEY_HEADER = "Idempotency-Key"
KEY_CHARS_MAX = 255
REPLAYED_HEADER = "Idempotency-Replayed"
_WINDOW_BITS, _MEMORY_LEVEL = 12, 4
"""zlib parameters: an open response then holds 36 KB. With zlib's defaults it would hold 215 KB and
compress streams only 1 % better, because chunks repeat the chunk before."""


class IdempotentRequest:
    """An idempotent request whose response is being recorded."""

    def __init__(self, tenant_id: int, claim: Claim, settings: IdempotencyConfig) -> None:
        self.claim = claim
        self._tenant_id = tenant_id
        self._settings = settings
        self._compressor = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS, _MEMORY_LEVEL)
        self._chunks: list[bytes] = []
        self._size = 0

    def record(self, data: bytes) -> None:
        """Record more of the response, until it exceeds the configured size."""
        self._size += len(data)
        if self._size <= self._settings.result_bytes_max:
            self._chunks.append(self._compressor.compress(data))
        else:
            self._chunks.clear()

    def to_store(self, head: Mapping[str, str], now_ms: int) -> ReplayRecord:
        """Return the complete response as a record to store. Called once, at the end."""
        answer = None
        if self._size <= self._settings.result_bytes_max:
            body = b"".join((*self._chunks, self._compressor.flush()))
            answer = ReplayedResponse(msgspec.json.encode(head).decode(), body)
        until_ms = now_ms + self._settings.keep_hours * HOUR_MS
        return ReplayRecord(until_ms, self._settings.tenant_bytes_max, answer)


class Replays:
    """The kept responses of one gateway."""

    def __init__(
        self,
        settings: IdempotencyConfig,
        contents: QueryPool,
        limits: RateLimits,
        wall: WallClock,
    ) -> None:
        self._settings, self._contents = settings, contents
        self._limits, self._wall = limits, wall

    async def find(
        self, request: web.BaseRequest, body: bytes, identity: Identity
    ) -> IdempotentRequest | web.StreamResponse:
        """Return the response of a request with a key, if one was stored and is sent again; else
        the request, which has to run. O(body).

        Raises Refusal for an invalid key, and if the server stores no responses; and what a replay
        raises.
        """
        found = _parse_key(request, body, identity, self._settings)
        replayed = await self._replay(request, identity.tenant.tenant_id, found.claim)
        return found if replayed is None else replayed

    async def _replay(
        self, request: web.BaseRequest, tenant_id: int, claim: Claim
    ) -> web.StreamResponse | None:
        """Send the first response again, a stream as a stream; None if there is none.

        It counts as one request and no tokens. Headers that identify a request are this one's.
        Raises IdempotencyConflict, StoreError, Refusal, ClientGone.
        """
        asked = (tenant_id, claim, self._wall())

        def load(store: Store) -> tuple[str, bytes] | None:
            stored = find(store, *asked)
            # The size was bounded when it was recorded.
            return None if stored is None else (stored.head, zlib.decompress(stored.body))

        found = await self._contents.ask(load, tenant_id)
        if found is None:
            return None
        stored_head, body = found
        request[BODY_SHARE].take(len(body))
        state = request[STATE]
        (await self._limits.reserve(state, NO_DEMAND)).settle(NO_DEMAND)
        self._limits.report(state)
        state.is_generation, state.ending = False, "replayed"
        ids = {**state.shape.headers(state.request_id), REPLAYED_HEADER: "true"}
        head = {**msgspec.json.decode(stored_head, type=dict[str, str]), **ids}
        if not state.is_stream:
            return await send(request, 200, body, head)
        response = streamed(request, head)
        await begin(request, response)
        for start in range(0, len(body), PIECE_BYTES):
            await write(request, response, body[start : start + PIECE_BYTES])
        return response


def _parse_key(
    request: web.BaseRequest, body: bytes, identity: Identity, settings: IdempotencyConfig
) -> IdempotentRequest:
    keys = request.headers.getall(KEY_HEADER)
    is_printable = keys[0].isascii() and keys[0].isprintable()
    if len(keys) != 1 or not 1 <= len(keys[0]) <= KEY_CHARS_MAX or not is_printable:
        message = (
            f"{KEY_HEADER}: expected one value of 1 to {KEY_CHARS_MAX} printable ASCII characters."
        )
        raise Refusal(Kind.BAD, "invalid_idempotency_key", message, param=KEY_HEADER)
    if not settings.keep_hours:
        message = (
            f"{KEY_HEADER}: this server stores no responses; send requests without this header."
        )
        raise Refusal(Kind.BAD, "idempotency_unavailable", message, param=KEY_HEADER)
    claim = Claim(
        keys[0], request_digest(request, body, identity.workspace), settings.keys_per_tenant_max
    )
    return IdempotentRequest(identity.tenant.tenant_id, claim, settings)


def request_digest(request: web.BaseRequest, body: bytes, workspace: str) -> bytes:
    """Return the digest of everything that a response depends on, except the API key."""
    query = [part for part in request.query.items() if part[0] != "key"]
    versions = [
        [_as_text(one) for one in request.headers.getall(name, [])] for name in VERSION_HEADERS
    ]
    found = hashlib.sha256(
        msgspec.msgpack.encode((workspace, request.method, request.path, query, versions))
    )
    found.update(body)
    return found.digest()


def _as_text(header: str) -> str:
    """Return a header's value with an escape for each byte that is no UTF-8: aiohttp decodes those
    to lone surrogates, which cannot be encoded."""
    return header.encode(errors="backslashreplace").decode()


TOKENS_IN_LOOP_MAX = 256
"""Most tokens of one delta that the event loop encodes with logprobs: 20 each take some 2 ms."""


class PlainAnswer:
    """An answer that is encoded as it comes."""

    in_thread: InThread | None = None
    """Where long pieces are made; None, if there are none."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    async def unary(self, deltas: Sequence[Delta]) -> bytes:
        """Return the body of a complete answer."""
        return self.encoder.unary(deltas)

    async def stream(self, batch: Sequence[Delta]) -> bytes:
        """Return the bytes of a batch of a stream."""
        return b"".join(map(self.encoder.stream, batch))

    async def withdraw(self) -> None:
        """Undo what was stored, because the request failed afterwards."""


class ThreadedAnswer(PlainAnswer):
    """An answer with so many logprobs that the event loop should not encode it."""

    def __init__(self, encoder: Encoder, in_thread: InThread) -> None:
        super().__init__(encoder)
        self.in_thread = in_thread

    async def unary(self, deltas: Sequence[Delta]) -> bytes:
        """Return the body of a complete answer."""
        assert self.in_thread is not None
        return await self.in_thread(partial(self.encoder.unary, deltas))

    async def stream(self, batch: Sequence[Delta]) -> bytes:
        """Return the bytes of a batch of a stream."""
        assert self.in_thread is not None
        if not any(isinstance(one, Text) and len(one.tokens) > TOKENS_IN_LOOP_MAX for one in batch):
            return await super().stream(batch)
        return b"".join(await self.in_thread(lambda: list(map(self.encoder.stream, batch))))


Head = Callable[[], dict[str, str]]


class AnswerDelivery:
    """Sends one answer, whole or in pieces."""

    claim: Claim | None = None
    """On the client's idempotency key."""

    def __init__(self, request: web.BaseRequest) -> None:
        self.request = request
        self.response: web.StreamResponse | None = None
        """The response of a stream, from its first byte on."""

    def run(self, work: Coroutine[None, None, web.StreamResponse]) -> Awaitable[web.StreamResponse]:
        """Run what makes the answer."""
        return work

    def record(self, data: bytes) -> None:
        """Note a piece of the answer, before it is sent. May be called in a thread."""

    def to_store(self, head: Head, now_ms: int) -> ReplayRecord | None:
        """Return the complete answer as the ledger keeps it; None, if it is not kept."""

    async def send(self, body: bytes, head: Mapping[str, str]) -> web.StreamResponse:
        """Send a whole answer. Raises ClientGone."""
        return await send(self.request, 200, body, dict(head))

    async def write(self, data: bytes, head: Head) -> None:
        """Send a piece of a stream, with its head before the first one. Raises ClientGone."""
        if self.response is None:
            self.response = streamed(self.request, head())
            await begin(self.request, self.response)
        await write(self.request, self.response, data)


class IdempotentDelivery(AnswerDelivery):
    """Sends an answer and keeps it."""

    def __init__(
        self, request: web.BaseRequest, kept: IdempotentRequest, work: BackgroundWork
    ) -> None:
        super().__init__(request)
        self.claim = kept.claim
        self._kept = kept
        self._work = work
        self._is_disconnected = False

    def run(self, work: Coroutine[None, None, web.StreamResponse]) -> Awaitable[web.StreamResponse]:
        """Run to completion even if the client disconnects: the client will retry and get the
        response that it pays for. Raises ClientGone at the end."""
        return self._complete(work)

    async def _complete(
        self, work: Coroutine[None, None, web.StreamResponse]
    ) -> web.StreamResponse:
        try:
            response = await self._work.run_to_completion(work)
        finally:
            self.request[STATE].is_complete &= not self._is_disconnected
        if self._is_disconnected:
            raise ClientGone
        return response

    def record(self, data: bytes) -> None:
        """Keep a piece of the answer."""
        self._kept.record(data)

    def to_store(self, head: Head, now_ms: int) -> ReplayRecord | None:
        """Return the complete answer as the ledger keeps it."""
        return self._kept.to_store(head(), now_ms)

    async def write(self, data: bytes, head: Head) -> None:
        """Send a piece of a stream, until the client is gone."""
        if self._is_disconnected:
            return
        try:
            await super().write(data, head)
        except ClientGone:
            self._is_disconnected = True
