"""Stored responses of running requests: load what a request continues, store what it answered.

    body ─ parse ─ thread of stored items ─ parse again ─ run ─ store ─ ledger ─ last bytes

The response is stored before its ledger entry and its last bytes, so the answer says truthfully
whether it is. It is deleted again if the entry cannot be written. The module knows no dialect by
name; `gateway.generation.generation` and the quote handler call it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from gateway.context import Context
from gateway.dialects.canonical import (
    Call,
    Delta,
    End,
    Reply,
    RequestMetadata,
    ThreadDirectives,
)
from gateway.dialects.protocol import Dialect, Encoder, StoredEncoder
from gateway.errors import Kind, Refusal
from tenancy.accounts.stored_responses import (
    Obstacle,
    ResponseRecord,
    delete_response,
    load_thread,
)
from tenancy.errors import StoreError
from tenancy.types import Identity

HOUR_MS = 3_600_000
History = tuple[dict[str, Any], ...]


async def parse_with_history(
    gateway: Context,
    dialect: Dialect,
    body: bytes,
    metadata: RequestMetadata,
    call: Call,
    identity: Identity,
) -> Call:
    """Return the call of a body with the items that it continues; `call`: as first parsed.

    Raises Refusal if what it continues is missing, and StoreError.
    """
    history = await load_history(gateway, call.thread, identity)

    def parse(_is_abandoned: Callable[[], bool]) -> Call:
        return dialect.parse(body, replace(metadata, history=history))

    return await gateway.preparations.run(identity.tenant.tenant_id, parse)


async def load_history(gateway: Context, thread: ThreadDirectives, identity: Identity) -> History:
    """Return the items that a call continues, in order. Runs in a thread: they may be many.

    Raises Refusal if the response is missing, expired or another's; StoreError.
    """
    tenant_id, workspace = identity.tenant.tenant_id, identity.workspace

    def load() -> History | None:
        now_ms = gateway.wall()
        turns = load_thread(gateway.store, tenant_id, workspace, thread.previous_id, now_ms)
        if turns is None:
            return None
        items: list[dict[str, Any]] = []
        for turn in turns:
            items += msgspec.json.decode(turn.input, type=list[dict[str, Any]])
            items += msgspec.json.decode(turn.response, type=_Output).output
        return tuple(items)

    found = await asyncio.to_thread(load) if gateway.config.responses.keep_hours else None
    if found is None:
        name = thread.previous_id[:64]
        message = (
            f"Previous response with id {name!r} not found: it or an earlier one of its thread was"
            " not stored, has expired or was deleted; send the earlier items as input."
        )
        code = "previous_response_not_found"
        raise Refusal(Kind.BAD, code, message, param="previous_response_id")
    return found


class _Output(msgspec.Struct):
    output: list[dict[str, Any]]


class StoredAnswer:
    """The response of a running request, to be stored at its end."""

    def __init__(
        self,
        gateway: Context,
        identity: Identity,
        thread: ThreadDirectives,
        reply: Reply,
        encoder: StoredEncoder,
    ) -> None:
        self._gateway = gateway
        self._identity = identity
        self._thread = thread
        self._response_id = reply.response_id
        self._created_ms = gateway.wall()
        self._encoder = encoder

    async def unary(self, deltas: Sequence[Delta]) -> bytes:
        """Store the response; return its body. All deltas must have been encoded."""
        end = deltas[-1]
        assert isinstance(end, End), "a complete answer ends with its usage"
        await self._store(end)
        return self._encoder.response(end)

    async def stream(self, batch: Sequence[Delta]) -> bytes:
        """Encode the last batch of a stream; its end, when the response is stored."""
        end = batch[-1]
        assert isinstance(end, End), "a complete answer ends with its usage"
        data = b"".join(map(self._encoder.stream, batch[:-1]))
        await self._store(end)
        return data + self._encoder.stream(end)

    async def _store(self, end: End) -> None:
        """Store the response; afterwards the encoder says whether it is stored.

        A response that cannot be stored is answered all the same, and the log has the reason.
        """
        self._encoder.is_stored = True
        keep_ms = self._gateway.config.responses.keep_hours * HOUR_MS
        record = ResponseRecord(
            response_id=self._response_id,
            tenant_id=self._identity.tenant.tenant_id,
            workspace=self._identity.workspace,
            created_ms=self._created_ms,
            expires_ms=self._gateway.wall() + keep_ms,
            input=self._thread.input,
            response=self._encoder.response(end),
            previous_id=self._thread.previous_id or None,
        )
        obstacle: Obstacle | str
        try:
            obstacle = await self._gateway.responses.write(record)
        except StoreError as error:
            obstacle = error.code
        if obstacle:
            self._encoder.is_stored = False
            facts = {"tenant_id": record.tenant_id, "reason": obstacle}
            self._gateway.log("response_not_stored", facts)

    async def withdraw(self) -> None:
        """Delete the response: its request failed after it was stored."""
        if not self._encoder.is_stored:
            return
        tenant_id, now_ms = self._identity.tenant.tenant_id, self._gateway.wall()
        owner = (self._gateway.store, tenant_id, self._identity.workspace)
        try:
            await asyncio.to_thread(delete_response, *owner, self._response_id, now_ms)
        except StoreError as error:
            facts = {"tenant_id": tenant_id, "reason": error.code}
            self._gateway.log("response_not_withdrawn", facts)


def stored_answer(
    gateway: Context, identity: Identity, call: Call, reply: Reply, encoder: Encoder
) -> StoredAnswer | None:
    """Return what will store the response, or None if it is not to be stored."""
    if not gateway.config.responses.keep_hours:
        return None
    assert isinstance(encoder, StoredEncoder), "a dialect that asks to store can encode it"
    return StoredAnswer(gateway, identity, call.thread, reply, encoder)
