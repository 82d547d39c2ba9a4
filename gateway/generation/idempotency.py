"""Idempotent requests: an `Idempotency-Key` header replays the response to an earlier request.

A key belongs to its tenant and to one request: path, query, version, body and workspace. The same
request sent again gets the first response, byte for byte, and pays nothing
(`tenancy.ledger.idempotency` stores responses). The module knows no dialect and no engine;
`gateway.generation.generation` and `gateway.generation.embedding` call it.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping

import msgspec
from aiohttp import web

from gateway.config import IdempotencyConfig
from gateway.context import Context
from gateway.dialects.families import VERSION_HEADERS
from gateway.errors import Kind, Refusal
from gateway.generation.rate_limits import report_limits, reserve
from gateway.http.request_body import BODY_SHARE
from gateway.http.request_context import STATE
from gateway.http.response import PIECE_BYTES, begin, send, streamed, write
from tenancy.ledger.idempotency import Claim, ReplayedResponse, ReplayRecord, find
from tenancy.limits import NO_DEMAND
from tenancy.storage.interface import Store
from tenancy.types import HOUR_MS, Identity

KEY_HEADER = "Idempotency-Key"
KEY_CHARS_MAX = 255
REPLAYED_HEADER = "Idempotency-Replayed"
_WINDOW_BITS, _MEMORY_LEVEL = 12, 4
"""zlib parameters: an open response then holds 36 KB. With zlib's defaults it would hold 215 KB and
compress streams only 1 % better, because chunks repeat the chunk before."""


class IdempotentRequest:
    """An idempotent request while its response is recorded.

    `is_disconnected`: the client is gone; the request continues, because the client may come back
    for its response.
    """

    def __init__(self, tenant_id: int, claim: Claim, settings: IdempotencyConfig) -> None:
        self.claim = claim
        self.is_disconnected = False
        self._tenant_id = tenant_id
        self._settings = settings
        self._compressor = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS, _MEMORY_LEVEL)
        self._chunks: list[bytes] = []
        self._size = 0

    async def replay(self, gateway: Context, request: web.BaseRequest) -> web.StreamResponse | None:
        """Send the first response again, a stream as a stream; None if there is none.

        It counts as one request and no tokens. Headers that identify a request are this one's.
        Raises IdempotencyConflict, StoreError, Refusal, ClientGone.
        """
        asked = (self._tenant_id, self.claim, gateway.wall())

        def load(store: Store) -> tuple[str, bytes] | None:
            stored = find(store, *asked)
            # The size was bounded when it was recorded.
            return None if stored is None else (stored.head, zlib.decompress(stored.body))

        found = await gateway.contents.ask(load, self._tenant_id)
        if found is None:
            return None
        stored_head, body = found
        request[BODY_SHARE].take(len(body))
        state = request[STATE]
        reserve(gateway, state, NO_DEMAND).settle(NO_DEMAND)
        report_limits(gateway, state)
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


async def find_replay(
    gateway: Context, request: web.BaseRequest, body: bytes, identity: Identity
) -> tuple[IdempotentRequest, web.StreamResponse | None]:
    """Return a request with a key, and its response if one was stored and is sent again; else it
    has to run. O(body).

    Raises Refusal for an invalid key, and if the server stores no responses; and what `replay`
    raises.
    """
    found = _parse_key(request, body, identity, gateway.config.idempotency)
    return found, await found.replay(gateway, request)


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
