"""Stored responses of running requests: load what a request continues, store what it answered.

    body ─ parse ─ thread of stored items ─ parse again ─ run ─ store ─ ledger ─ last bytes

The response is stored before its ledger entry and its last bytes, so the answer says truthfully
whether it is. It is deleted again if the entry cannot be written. The module knows no dialect by
name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from gateway.context import Context
from gateway.dialects.canonical import (
    NO_EARLIER_ITEMS,
    Call,
    Delta,
    EarlierItems,
    End,
    ItemReference,
    Reply,
    RequestMetadata,
    ThreadDirectives,
)
from gateway.dialects.protocol import Dialect, Encoder, StoredEncoder
from gateway.errors import Kind, Refusal
from tenancy.errors import StoreError
from tenancy.responses.conversations import (
    ItemRecord,
    ItemsChange,
    delete_items,
    find_items,
    load_items,
)
from tenancy.responses.stored_responses import (
    LOADED_AT_ONCE,
    StoredResponse,
    delete_response,
    load_parts,
    load_thread,
)
from tenancy.responses.stored_sums import Obstacle
from tenancy.types import HOUR_MS, Identity

REFERENCED_BODIES_MAX = 4
"""Bytes of the responses that one request may refer to, in bodies of the largest size."""

CONVERSATION_ITEMS_MAX = 10_001
"""Items of a conversation that a request loads: one more than any request may have."""

Item = dict[str, Any]
Part = Literal["input", "output"]
COLUMNS: tuple[tuple[Part, Literal["input", "response"]], ...] = (
    ("input", "input"),
    ("output", "response"),
)
"""The parts of a stored response that hold items, and their columns in the database."""


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
    earlier = await load_earlier_items(gateway, call.thread, identity)

    def parse(_is_abandoned: Callable[[], bool]) -> Call:
        return dialect.parse(body, replace(metadata, earlier=earlier))

    return await gateway.preparations.run(identity.tenant.tenant_id, parse)


async def load_earlier_items(
    gateway: Context, thread: ThreadDirectives, identity: Identity
) -> EarlierItems:
    """Return the stored items that a call needs. Runs in a thread: they may be many.

    Raises Refusal if the response or the conversation that the call continues is missing, expired
    or another's, or if the referenced responses are too large together; StoreError.
    """
    if not gateway.config.responses.keep_hours:
        if thread.previous_id:
            raise _previous_not_found(thread.previous_id)
        if thread.conversation_id:
            raise conversation_not_found(thread.conversation_id)
        return NO_EARLIER_ITEMS

    def load() -> EarlierItems:
        history = _load_history(gateway, thread.previous_id, identity)
        if thread.conversation_id:
            history = _load_conversation(gateway, thread.conversation_id, identity)
        return EarlierItems(history, _load_referenced(gateway, thread.references, identity))

    return await asyncio.to_thread(load)


def _load_history(gateway: Context, previous_id: str, identity: Identity) -> tuple[Item, ...]:
    if not previous_id:
        return ()
    owner = identity.tenant.tenant_id, identity.workspace
    turns = load_thread(gateway.store, *owner, previous_id, gateway.wall())
    if turns is None:
        raise _previous_not_found(previous_id)
    items: list[Item] = []
    for turn in turns:
        items += _items_of("input", turn.input)
        items += _items_of("output", turn.response)
    return tuple(items)


def _load_conversation(
    gateway: Context, conversation_id: str, identity: Identity
) -> tuple[Item, ...]:
    owner = identity.tenant.tenant_id, identity.workspace
    items = load_items(
        gateway.store, owner, conversation_id, gateway.wall(), CONVERSATION_ITEMS_MAX
    )
    if items is None:
        raise conversation_not_found(conversation_id)
    return tuple(msgspec.json.decode(item, type=dict[str, Any]) for item in items)


def _load_referenced(
    gateway: Context, references: Sequence[ItemReference], identity: Identity
) -> dict[str, Item]:
    """Return the referenced items that are stored, by id. Cost: O(bytes of their responses)."""
    owner = identity.tenant.tenant_id, identity.workspace
    room = bytes_max = REFERENCED_BODIES_MAX * gateway.config.server.body_bytes_max
    found: dict[str, Item] = {}
    names = [one.item_id for one in references]
    for first in range(0, len(names), LOADED_AT_ONCE):
        kept = names[first : first + LOADED_AT_ONCE]
        for name, data in find_items(gateway.store, owner, kept, gateway.wall()).items():
            found[name] = msgspec.json.decode(data, type=dict[str, Any])
    for part, column in COLUMNS:
        wanted: dict[str, list[ItemReference]] = {}
        for one in references:
            if one.part == part and one.response_id:
                wanted.setdefault(one.response_id, []).append(one)
        names = list(wanted)
        for first in range(0, len(names), LOADED_AT_ONCE):
            ids = names[first : first + LOADED_AT_ONCE]
            loaded = load_parts(gateway.store, owner, column, ids, gateway.wall(), room)
            if loaded is None:
                message = (
                    "input: the responses whose items are referenced have more than"
                    f" {bytes_max} bytes together; expected fewer references."
                )
                raise Refusal(Kind.BAD, "invalid_value", message, param="input")
            for name, data in loaded.items():
                room -= len(data)
                items = _items_of(part, data)
                for one in wanted[name]:
                    if one.number < len(items):
                        found[one.item_id] = items[one.number]
    return found


def _items_of(part: Part, data: bytes) -> list[Item]:
    """Return the items of a stored request's input, or of the output of a stored response."""
    if part == "input":
        return msgspec.json.decode(data, type=list[dict[str, Any]])
    return msgspec.json.decode(data, type=_Output).output


def conversation_not_found(conversation_id: str) -> Refusal:
    """Return the refusal of a request for a conversation that is not stored."""
    message = (
        f"Conversation with id {conversation_id[:64]!r} not found: it was not stored, has expired"
        " or was deleted."
    )
    return Refusal(Kind.NOT_FOUND, "conversation_not_found", message, param="conversation")


def _previous_not_found(response_id: str) -> Refusal:
    message = (
        f"Previous response with id {response_id[:64]!r} not found: it or an earlier one of its"
        " thread was not stored, has expired or was deleted; send the earlier items as input."
    )
    code = "previous_response_not_found"
    return Refusal(Kind.BAD, code, message, param="previous_response_id")


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
        self._appended: tuple[str, ...] = ()

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
        """Store the response; afterwards the encoder says what is stored.

        A response that cannot be stored is answered all the same, and the log has the reason.
        """
        self._encoder.is_stored = self._thread.store
        turn = await self._turn() if self._thread.conversation_id else None
        record = StoredResponse(
            response_id=self._response_id,
            tenant_id=self._identity.tenant.tenant_id,
            workspace=self._identity.workspace,
            created_ms=self._created_ms,
            expires_ms=self._expires_ms(),
            input=self._thread.input,
            response=self._encoder.response(end),
            previous_id=self._thread.previous_id or None,
            is_kept=self._thread.store,
            turn=turn,
        )
        obstacle: Obstacle | str
        try:
            obstacle = await self._gateway.responses.write(record)
        except StoreError as error:
            obstacle = error.code
        if obstacle:
            self._encoder.is_stored = self._encoder.is_appended = False
            facts = {"tenant_id": record.tenant_id, "reason": obstacle}
            self._gateway.log("response_not_stored", facts)
        elif turn is not None:
            self._appended = tuple(item.item_id for item in turn.items)

    async def _turn(self) -> ItemsChange:
        """Return the items to append to the conversation. In a thread: they may be many."""
        items = await asyncio.to_thread(self._encoder.turn)
        return ItemsChange(
            owner=(self._identity.tenant.tenant_id, self._identity.workspace),
            conversation_id=self._thread.conversation_id,
            items=tuple(ItemRecord(item.item_id, item.data) for item in items),
            since_ms=self._created_ms,
            now_ms=self._gateway.wall(),
            expires_ms=self._expires_ms(),
        )

    def _expires_ms(self) -> int:
        return self._gateway.wall() + self._gateway.config.responses.keep_hours * HOUR_MS

    async def withdraw(self) -> None:
        """Delete the response and its items: its request failed after they were stored."""
        if not (self._encoder.is_stored or self._appended):
            return
        tenant_id = self._identity.tenant.tenant_id
        try:
            await asyncio.to_thread(self._delete, (tenant_id, self._identity.workspace))
        except StoreError as error:
            facts = {"tenant_id": tenant_id, "reason": error.code}
            self._gateway.log("response_not_withdrawn", facts)

    def _delete(self, owner: tuple[int, str]) -> None:
        store, now_ms = self._gateway.store, self._gateway.wall()
        if self._encoder.is_stored:
            delete_response(store, *owner, self._response_id, now_ms)
        if self._appended:
            delete_items(store, owner, self._thread.conversation_id, self._appended, now_ms)


def stored_answer(
    gateway: Context, identity: Identity, call: Call, reply: Reply, encoder: Encoder
) -> StoredAnswer | None:
    """Return what will store the response or append its items, or None if nothing is stored."""
    thread = call.thread
    if not gateway.config.responses.keep_hours or not (thread.store or thread.conversation_id):
        return None
    assert isinstance(encoder, StoredEncoder), "a dialect that asks to store can encode it"
    return StoredAnswer(gateway, identity, call.thread, reply, encoder)
