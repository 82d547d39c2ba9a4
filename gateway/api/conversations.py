"""Conversations by id: create, read, change, delete, and their items. Nothing here runs the model.

A conversation of another tenant or workspace is a 404 as a missing one. `/v1/responses` appends to
a conversation by `gateway.generation.stored_responses`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from gateway.dialects.families import conversations, responses, stored_items
from gateway.errors import Kind, Refusal
from gateway.generation.serving import Serving
from gateway.generation.stored_responses import conversation_not_found
from gateway.http.request_body import BODY_SHARE, read_body
from gateway.http.request_context import STATE, identity_of, request_metadata
from gateway.http.response import send_json
from gateway.http.route_table import Handler, Route
from gateway.ledger.response_writer import storage_quota
from tenancy.responses.conversations import (
    ConversationRecord,
    ItemRecord,
    ItemsChange,
    append_items,
    create_conversation,
    delete_conversation,
    delete_items,
    find_conversation,
    find_item,
    page_items,
    set_metadata,
)
from tenancy.responses.stored_sums import Obstacle
from tenancy.storage.interface import Store
from tenancy.types import HOUR_MS

Item = dict[str, Any]
T = TypeVar("T")


def routes(serving: Serving, new_id: Callable[[], str]) -> tuple[Route, ...]:
    """Return the routes of conversations, with and without /v1, as clients write base URLs."""
    of, page = ConversationRequest, ("limit", "order", "after")
    methods: tuple[tuple[str, str, Method, str, type | None, tuple[str, ...]], ...] = (
        ("POST", "", of.create, "Create a conversation.", conversations.CreateBody, ()),
        ("GET", "/{id}", of.show, "Show a conversation.", None, ()),
        (
            *("POST", "/{id}", of.change, "Change a conversation's metadata."),
            *(conversations.UpdateBody, ()),
        ),
        ("DELETE", "/{id}", of.delete, "Delete a conversation and its items.", None, ()),
        ("POST", "/{id}/items", of.append, "Append items.", conversations.ItemsBody, ()),
        ("GET", "/{id}/items", of.list_items, "List the items of a conversation.", None, page),
        ("GET", "/{id}/items/{item}", of.show_item, "Show an item.", None, ()),
        ("DELETE", "/{id}/items/{item}", of.delete_item, "Delete an item.", None, ()),
    )

    def handler(method: Method) -> Handler:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            if not serving.stored.keep_hours:
                message = (
                    "This server stores no conversations (responses.keep_hours is 0); send the"
                    " earlier items as input."
                )
                raise Refusal(Kind.NOT_FOUND, "not_served", message)
            return await method(ConversationRequest(serving, new_id, request))

        return handle

    return tuple(
        Route(
            *(verb, f"{base}/conversations{path}", handler(method), "inference"),
            *(responses.DIALECT, text, body),
            query=query,
        )
        for base in ("/v1", "")
        for verb, path, method, text, body, query in methods
    )


class ConversationRequest:
    """One request for a conversation or its items."""

    def __init__(
        self, serving: Serving, new_id: Callable[[], str], request: web.BaseRequest
    ) -> None:
        self._serving, self._stored, self._new_id = serving, serving.stored, new_id
        self._config = serving.gateway.config
        self._request = request
        identity = identity_of(request)
        self._owner = identity.tenant.tenant_id, identity.workspace
        self._now_ms = self._stored.wall()
        parameters = request[STATE].parameters
        self._id = parameters.get("id", "")
        self._item_id = parameters.get("item", "")

    async def create(self) -> web.StreamResponse:
        """Store a new conversation with its first items."""
        items, metadata = await self._parse(conversations.parse_create)
        record = ConversationRecord(
            conversations.ID_PREFIX + self._new_id(),
            *self._owner,
            self._now_ms,
            self._expires_ms(),
            msgspec.json.encode(metadata),
        )

        def store() -> Obstacle:
            kept, quota = self._named(items), storage_quota(self._config)
            return create_conversation(self._stored.store, record, kept, quota, self._bytes_max())

        self._check(await self._write(store))
        return await self._answer(record)

    async def show(self) -> web.StreamResponse:
        """Send the conversation."""
        return await self._answer(await self._find())

    async def change(self) -> web.StreamResponse:
        """Set the metadata."""
        metadata = await self._parse(conversations.parse_update)
        found = await self._find()
        record = msgspec.structs.replace(
            found,
            metadata=msgspec.json.encode(metadata),
            expires_ms=max(found.expires_ms, self._expires_ms()),
        )
        store = self._stored.store
        if not await self._write(partial(set_metadata, store, record, self._now_ms)):
            raise conversation_not_found(self._id)
        return await self._answer(record)

    async def delete(self) -> web.StreamResponse:
        """Delete the conversation with its items."""
        owned = self._stored.store, self._owner, self._id
        if not await self._write(partial(delete_conversation, *owned, self._now_ms)):
            raise conversation_not_found(self._id)
        deleted = {"id": self._id, "object": "conversation.deleted", "deleted": True}
        return await send_json(self._request, deleted)

    async def append(self) -> web.StreamResponse:
        """Append items; send them as they are listed."""
        items = await self._parse(conversations.parse_items)

        def store() -> tuple[bytes, Obstacle]:
            kept = self._named(items)
            change = ItemsChange(
                self._owner, self._id, tuple(kept), self._now_ms, self._now_ms, self._expires_ms()
            )
            quota = storage_quota(self._config)
            obstacle = append_items(self._stored.store, change, quota, self._bytes_max())
            return conversations.shown_list([one.item for one in kept]), obstacle

        shown, obstacle = await self._write(store)
        self._check(obstacle)
        return await send_json(self._request, shown)

    async def list_items(self) -> web.StreamResponse:
        """Send a page of the items."""
        page = stored_items.parse_page(self._request.query)
        await self._find()

        def load(store: Store) -> bytes:
            bounds = page.after, page.limit + 1
            found = page_items(store, self._id, *bounds, is_descending=page.is_descending)
            if found is None:
                raise stored_items.unknown_after(page.after)
            return conversations.shown_list(found[: page.limit], has_more=len(found) > page.limit)

        return await self._send_loaded(await self._read(load))

    async def show_item(self) -> web.StreamResponse:
        """Send one item."""
        await self._find()
        found = await self._read(lambda store: find_item(store, self._id, self._item_id))
        if found is None:
            raise stored_items.item_not_found(self._item_id)
        return await self._send_loaded(found)

    async def delete_item(self) -> web.StreamResponse:
        """Delete one item; send its conversation."""
        found, store = await self._find(), self._stored.store
        owned = store, self._owner, self._id
        if not await self._write(partial(delete_items, *owned, [self._item_id], self._now_ms)):
            raise stored_items.item_not_found(self._item_id)
        return await self._answer(found)

    async def _parse(self, parse: Callable[..., Any]) -> Any:
        body = await read_body(self._request)
        mode = request_metadata(self._request, self._config).tolerance
        return await self._serving.preparation.parse(self._owner[0], parse, body, mode)

    async def _find(self) -> ConversationRecord:
        owned = self._owner, self._id, self._now_ms
        found = await self._read(lambda store: find_conversation(store, *owned))
        if found is None:
            raise conversation_not_found(self._id)
        return found

    async def _read(self, question: Callable[[Store], T]) -> T:
        """Read from a connection apart when it is the tenant's turn."""
        return await self._stored.contents.ask(question, self._owner[0])

    async def _write(self, change: Callable[[], T]) -> T:
        """Write to the database when it is the tenant's turn."""
        return await self._stored.contents.ask(lambda _: change(), self._owner[0])

    async def _send_loaded(self, data: bytes) -> web.StreamResponse:
        """Send stored content; it counts as if the request had sent it. Raises Refusal."""
        self._request[BODY_SHARE].take(len(data))
        return await send_json(self._request, data)

    async def _answer(self, record: ConversationRecord) -> web.StreamResponse:
        shown = conversations.shown_conversation(
            record.conversation_id, record.created_ms, record.metadata
        )
        return await send_json(self._request, shown)

    def _named(self, items: list[Item]) -> list[ItemRecord]:
        named = conversations.named_items(items, self._new_id())
        return [ItemRecord(item.item_id, item.data) for item in named]

    def _expires_ms(self) -> int:
        return self._now_ms + self._stored.keep_hours * HOUR_MS

    def _bytes_max(self) -> int:
        return self._config.server.body_bytes_max

    def _check(self, obstacle: Obstacle) -> None:
        """Raise Refusal if something was not stored."""
        if obstacle == "conversation_missing":
            raise conversation_not_found(self._id)
        if obstacle == "quota":
            message = (
                "The conversation, or all that this tenant stores, would be too large; delete"
                " conversations or responses that are not needed, or wait until they expire."
            )
            raise Refusal(Kind.QUOTA, "storage_full", message)
        if obstacle:
            message = "The conversation was not stored: its tenant's cache is being erased."
            raise Refusal(Kind.CONFLICT, obstacle, message)


Method = Callable[[ConversationRequest], Awaitable[web.StreamResponse]]
