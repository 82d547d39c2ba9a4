"""Requests that clients name by `Idempotency-Key`: whose name it is, and the same answer again.

A name belongs to its tenant, and to one request: path, query, version, body and workspace. Whoever
sends that again gets what was answered, byte for byte, and pays nothing; see
`tenancy.ledger.idempotency` for what is kept. It knows no dialect and no engine; `answer` asks.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import Mapping

import msgspec
from aiohttp import web

from gateway.config import IdempotencyConfig
from gateway.context import Context
from gateway.errors import Kind, Refusal
from gateway.http.response import PIECE_BYTES, begin, send, streamed, write
from tenancy.ledger.idempotency import Claim, Keeping, KeptAnswer, find
from tenancy.types import Identity

NAME = "Idempotency-Key"
NAME_SIGNS_MAX = 255
REPLAYED = "Idempotency-Replayed"
HOUR_MS = 3_600_000
_WINDOW_BITS, _MEMORY_LEVEL = 12, 4
"""An answer that is open holds 36 KB. By zlib's own measure it would hold 215, and a stream come
out 1 % smaller: chunks repeat the one before."""


class NamedRequest:
    """One of them, on its way to its first answer. `is_left`: its client reads no more; it goes on,
    for the answer that the client comes back for."""

    def __init__(self, tenant_id: int, claim: Claim, settings: IdempotencyConfig) -> None:
        self.claim = claim
        self.is_left = False
        self._tenant_id = tenant_id
        self._settings = settings
        self._squeeze = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS, _MEMORY_LEVEL)
        self._pieces: list[bytes] = []
        self._size = 0

    async def find(self, gateway: Context) -> KeptAnswer | None:
        """What was answered to it before. Raises NameInUse, StoreError."""
        asked = (gateway.store, self._tenant_id, self.claim, gateway.wall())
        return await asyncio.to_thread(find, *asked)

    def record(self, data: bytes) -> None:
        """More of its answer. Changes: what is kept, until that is too large."""
        self._size += len(data)
        if self._size <= self._settings.result_bytes_max:
            self._pieces.append(self._squeeze.compress(data))
        else:
            self._pieces.clear()

    def keeping(self, head: Mapping[str, str], now_ms: int) -> Keeping:
        """What is to be kept: all that was recorded is the whole answer. Called once."""
        answer = None
        if self._size <= self._settings.result_bytes_max:
            body = b"".join((*self._pieces, self._squeeze.flush()))
            answer = KeptAnswer(msgspec.json.encode(head).decode(), body)
        until_ms = now_ms + self._settings.keep_hours * HOUR_MS
        return Keeping(until_ms, self._settings.tenant_bytes_max, answer)


def named(
    request: web.BaseRequest, body: bytes, identity: Identity, settings: IdempotencyConfig
) -> NamedRequest:
    """The request under the name that it brings. O(body). Raises Refusal for what is no name, and
    where none are kept."""
    names = request.headers.getall(NAME)
    is_name = names[0].isascii() and names[0].isprintable()
    if len(names) != 1 or not 1 <= len(names[0]) <= NAME_SIGNS_MAX or not is_name:
        message = f"{NAME}: one, of 1 to {NAME_SIGNS_MAX} printable ASCII characters."
        raise Refusal(Kind.BAD, "invalid_idempotency_key", message, param=NAME)
    if not settings.keep_hours:
        message = f"{NAME}: this server keeps no answers; send requests without it."
        raise Refusal(Kind.BAD, "idempotency_unavailable", message, param=NAME)
    claim = Claim(names[0], digest(request, body, identity.workspace), settings.keys_per_tenant_max)
    return NamedRequest(identity.tenant.tenant_id, claim, settings)


def digest(request: web.BaseRequest, body: bytes, workspace: str) -> bytes:
    """Of all that an answer depends on, but for who asks. A key in the query is who asks."""
    query = [part for part in request.query.items() if part[0] != "key"]
    headers = request.headers
    versions = (headers.getall("anthropic-version", []), headers.getall("anthropic-beta", []))
    found = hashlib.sha256(
        msgspec.msgpack.encode((workspace, request.method, request.path, query, versions))
    )
    found.update(body)
    return found.digest()


async def replay(
    request: web.BaseRequest, answer: KeptAnswer, ids: Mapping[str, str], *, is_stream: bool
) -> web.StreamResponse:
    """The same bytes again; a stream as a stream. `ids`: headers that name this request, not the
    one that was answered. Raises ClientGone."""
    head = {**msgspec.json.decode(answer.head, type=dict[str, str]), **ids, REPLAYED: "true"}
    body = zlib.decompress(answer.body)  # bounded when it was recorded
    if not is_stream:
        return await send(request, 200, body, head)
    response = streamed(request, head)
    await begin(request, response)
    for start in range(0, len(body), PIECE_BYTES):
        await write(request, response, body[start : start + PIECE_BYTES])
    return response
