"""Stored responses of running requests: load what a request continues, store what it answered.

    body ─ parse ─ measure, load ─ decode, parse again ─ run ─ store ─ ledger ─ last bytes

The response is stored before its ledger entry and its last bytes, so the answer says truthfully
whether it is. It is deleted again if the entry cannot be written. The module knows no dialect by
name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from gateway.config import Config, ServerConfig
from gateway.context import Log
from gateway.dialects.canonical import (
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
from gateway.generation.delivery import PlainAnswer
from gateway.http.request_body import SHARE_PARTS, BodyShare
from gateway.ledger.query_pool import QueryPool
from gateway.ledger.response_writer import ResponseWriter
from gateway.preparation_pool import PreparationPool
from gateway.structured_output.json_text import count_values
from tenancy.errors import StoreError
from tenancy.responses.conversations import (
    ItemRecord,
    ItemsChange,
    delete_items,
    find_items,
    load_items,
    measure_conversation,
    measure_items,
)
from tenancy.responses.stored_responses import (
    ItemsColumn,
    StoredResponse,
    delete_response,
    load_parts,
    load_thread,
    measure_parts,
    measure_thread,
)
from tenancy.responses.stored_sums import Obstacle
from tenancy.storage.interface import Store
from tenancy.types import HOUR_MS, Identity, WallClock

NAMED_BODIES_MAX = 4
"""Bytes of the stored items that one request may name, in bodies of the largest size."""

CONVERSATION_ITEMS_MAX = 10_001
"""Items of a conversation that a request loads: one more than any request may have."""

Item = dict[str, Any]
Part = Literal["input", "output"]
COLUMNS: dict[Part, ItemsColumn] = {"input": "input", "output": "response"}
"""The parts of a stored response that hold items, and their columns in the database."""


class StoredResponses:
    """Loads and stores the responses of one gateway."""

    def __init__(
        self,
        config: Config,
        store: Store,
        contents: QueryPool,
        responses: ResponseWriter,
        preparations: PreparationPool,
        wall: WallClock,
        log: Log,
    ) -> None:
        self._server, self.keep_hours = config.server, config.responses.keep_hours
        self.store, self.contents, self.responses = store, contents, responses
        self.preparations, self.wall, self.log = preparations, wall, log

    async def continue_call(
        self,
        dialect: Dialect,
        body: bytes,
        metadata: RequestMetadata,
        call: Call,
        identity: Identity,
        share: BodyShare,
    ) -> Call:
        """Return the call of a body with the items that it continues; `call`: as first parsed.

        What a request names counts as what it sends: its bytes are taken from `share` before they
        are loaded, and its values are counted before they are decoded. Raises Refusal if what it
        continues is missing, expired or another's, or if what it names is too large or finds no
        room; StoreError.
        """
        named = NamedItems(self._server, call.thread, identity, self.wall())
        if not self.keep_hours:
            if call.thread.previous_id:
                raise _previous_not_found(call.thread.previous_id)
            if call.thread.conversation_id:
                raise conversation_not_found(call.thread.conversation_id)
        else:
            tenant_id = identity.tenant.tenant_id
            share.take(await self.contents.ask(named.measure, tenant_id))
            await self.contents.ask(named.load, tenant_id)

        def parse(_is_abandoned: Callable[[], bool]) -> Call:
            return dialect.parse(body, replace(metadata, earlier=named.decode()))

        return await self.preparations.run(identity.tenant.tenant_id, parse)

    def answer(
        self, identity: Identity, call: Call, reply: Reply, encoder: Encoder
    ) -> PlainAnswer | None:
        """Return the answer that stores the response or appends its items; None if nothing is to
        be stored."""
        thread = call.thread
        if not self.keep_hours or not (thread.store or thread.conversation_id):
            return None
        assert isinstance(encoder, StoredEncoder), "a dialect that asks to store can encode it"
        return StoredAnswer(self, identity, thread, reply, encoder)


class NamedItems:
    """The stored items that one call continues and refers to: measured, loaded, then decoded."""

    def __init__(
        self, server: ServerConfig, thread: ThreadDirectives, identity: Identity, now_ms: int
    ) -> None:
        self._thread = thread
        self._owner = identity.tenant.tenant_id, identity.workspace
        self._now_ms = now_ms
        self._values_max = server.body_values_max
        # With the largest body itself, a tenant that is alone finds room for as much.
        quarter = server.body_bytes_in_flight_max // SHARE_PARTS
        self._bytes_max = min(
            NAMED_BODIES_MAX * server.body_bytes_max, quarter - server.body_bytes_max
        )
        self._parts: dict[Part, dict[str, list[ItemReference]]] = {"input": {}, "output": {}}
        """References to stored responses, by the part and the response that have the items."""
        for one in thread.references:
            if one.response_id:
                self._parts[one.part].setdefault(one.response_id, []).append(one)
        self._history: list[tuple[Part | None, bytes]] = []
        self._items: dict[str, bytes] = {}
        self._responses: dict[tuple[Part, str], bytes] = {}

    def measure(self, store: Store) -> int:
        """Return the bytes of what the call names. O(references).

        Raises Refusal if what it continues is missing, or if they are too many; StoreError.
        """
        thread, now_ms, size = self._thread, self._now_ms, 0
        if thread.previous_id:
            found = measure_thread(store, *self._owner, thread.previous_id, now_ms)
            if found is None:
                raise _previous_not_found(thread.previous_id)
            size += found
        if thread.conversation_id:
            found = measure_conversation(store, self._owner, thread.conversation_id, now_ms)
            if found is None:
                raise conversation_not_found(thread.conversation_id)
            size += found
        if thread.references:
            ids = [one.item_id for one in thread.references]
            size += sum(measure_items(store, self._owner, ids, now_ms).values())
        for part, wanted in self._parts.items():
            if wanted:
                column = COLUMNS[part]
                sizes = measure_parts(store, self._owner, column, list(wanted), now_ms)
                size += sum(sizes.values())
        if size > self._bytes_max:
            message = (
                f"input: the stored items that this request names have {size} bytes together, limit"
                f" {self._bytes_max}; expected fewer references, or a shorter conversation."
            )
            raise Refusal(Kind.BAD, "invalid_value", message, param="input")
        return size

    def load(self, store: Store) -> None:
        """Load what was measured. O(bytes). Raises Refusal if it is gone meanwhile; StoreError."""
        thread, now_ms = self._thread, self._now_ms
        if thread.previous_id:
            turns = load_thread(store, *self._owner, thread.previous_id, now_ms)
            if turns is None:
                raise _previous_not_found(thread.previous_id)
            for turn in turns:
                self._history += ("input", turn.input), ("output", turn.response)
        if thread.conversation_id:
            most = CONVERSATION_ITEMS_MAX
            items = load_items(store, self._owner, thread.conversation_id, now_ms, most)
            if items is None:
                raise conversation_not_found(thread.conversation_id)
            self._history = [(None, item) for item in items]
        if thread.references:
            ids = [one.item_id for one in thread.references]
            self._items = find_items(store, self._owner, ids, now_ms)
        for part, wanted in self._parts.items():
            if wanted:
                found = load_parts(store, self._owner, COLUMNS[part], list(wanted), now_ms)
                self._responses |= {(part, one): data for one, data in found.items()}

    def decode(self) -> EarlierItems:
        """Return the items that were loaded. O(bytes). Raises Refusal for too many values."""
        kept = [data for _, data in self._history]
        loaded = [*kept, *self._items.values(), *self._responses.values()]
        check_named_values(loaded, self._values_max)
        history: list[Item] = []
        for part, data in self._history:
            history += [_decode_item(data)] if part is None else _items_of(part, data)
        referenced = {name: _decode_item(data) for name, data in self._items.items()}
        for (part, name), data in self._responses.items():
            items = _items_of(part, data)
            for one in self._parts[part][name]:
                if one.number < len(items):
                    referenced[one.item_id] = items[one.number]
        return EarlierItems(tuple(history), referenced)


def check_named_values(loaded: Sequence[bytes], values_max: int) -> None:
    """Refuse stored content of too many JSON values, before it is decoded. O(bytes).

    Raises Refusal, TOO_BIG.
    """
    count = 0
    for data in loaded:
        count += count_values(data, values_max - count)
        if count > values_max:
            message = (
                f"The stored items that this request names have more than {values_max} JSON values"
                " together; expected fewer references, or a shorter conversation."
            )
            raise Refusal(Kind.TOO_BIG, "request_too_large", message, param="input")


def _decode_item(data: bytes) -> Item:
    return msgspec.json.decode(data, type=dict[str, Any])


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


class StoredAnswer(PlainAnswer):
    """The answer of a running request whose response is stored before its last bytes."""

    def __init__(
        self,
        stored: StoredResponses,
        identity: Identity,
        thread: ThreadDirectives,
        reply: Reply,
        encoder: StoredEncoder,
    ) -> None:
        super().__init__(encoder)
        self._stored = stored
        self._identity = identity
        self._thread = thread
        self._response_id = reply.response_id
        self._created_ms = stored.wall()
        self._encoder = encoder
        self._appended: tuple[str, ...] = ()

    async def unary(self, deltas: Sequence[Delta]) -> bytes:
        """Store the response; return its body."""
        await super().unary(deltas)
        end = deltas[-1]
        assert isinstance(end, End), "a complete answer ends with its usage"
        await self._store(end)
        return self._encoder.response(end)

    async def stream(self, batch: Sequence[Delta]) -> bytes:
        """Return the bytes of a batch; those of the end, when the response is stored."""
        if not batch or not isinstance(end := batch[-1], End):
            return await super().stream(batch)
        data = await super().stream(batch[:-1])
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
            obstacle = await self._stored.responses.write(record)
        except StoreError as error:
            obstacle = error.code
        if obstacle:
            self._encoder.is_stored = self._encoder.is_appended = False
            facts = {"tenant_id": record.tenant_id, "reason": obstacle}
            self._stored.log("response_not_stored", facts)
        elif turn is not None:
            self._appended = tuple(item.item_id for item in turn.items)

    async def _turn(self) -> ItemsChange:
        """Return the items to append to the conversation. In a thread: they may be many."""
        tenant_id = self._identity.tenant.tenant_id
        items = await self._stored.preparations.run_admitted(tenant_id, self._encoder.turn)
        return ItemsChange(
            owner=(self._identity.tenant.tenant_id, self._identity.workspace),
            conversation_id=self._thread.conversation_id,
            items=tuple(ItemRecord(item.item_id, item.data) for item in items),
            since_ms=self._created_ms,
            now_ms=self._stored.wall(),
            expires_ms=self._expires_ms(),
        )

    def _expires_ms(self) -> int:
        return self._stored.wall() + self._stored.keep_hours * HOUR_MS

    async def withdraw(self) -> None:
        """Delete the response and its items: its request failed after they were stored."""
        if not (self._encoder.is_stored or self._appended):
            return
        tenant_id = self._identity.tenant.tenant_id
        try:
            await self._stored.contents.ask(lambda _: self._delete(), tenant_id)
        except StoreError as error:
            facts = {"tenant_id": tenant_id, "reason": error.code}
            self._stored.log("response_not_withdrawn", facts)

    def _delete(self) -> None:
        store, now_ms = self._stored.store, self._stored.wall()
        owner = self._identity.tenant.tenant_id, self._identity.workspace
        if self._encoder.is_stored:
            delete_response(store, *owner, self._response_id, now_ms)
        if self._appended:
            delete_items(store, owner, self._thread.conversation_id, self._appended, now_ms)
