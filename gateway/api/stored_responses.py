"""Stored responses by id: read, list the input items, delete. Nothing here runs the model.

A response of another tenant or workspace is a 404 as a missing one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from gateway.dialects.families import responses, stored_items
from gateway.errors import Kind, Refusal
from gateway.generation.serving import Serving
from gateway.generation.stored_responses import check_named_values
from gateway.http.request_body import BODY_SHARE
from gateway.http.request_context import STATE, identity_of
from gateway.http.response import send_json
from gateway.http.route_table import Handler, Route
from tenancy.responses.stored_responses import delete_response, find_response, load_thread

Answer = Callable[[web.BaseRequest, "Owner", str], Awaitable[object]]
Owner = tuple[int, str]
"""The tenant and workspace whose objects a request may read."""


def routes(serving: Serving) -> tuple[Route, ...]:
    """Return the routes of stored responses, with and without /v1, as clients write base URLs."""
    of, page = _StoredResponses(serving), ("limit", "order", "after")
    methods: tuple[tuple[str, str, Answer, str, tuple[str, ...]], ...] = (
        ("GET", "", of.get, "Show a stored response.", ("stream",)),
        ("DELETE", "", of.delete, "Delete a stored response.", ()),
        ("POST", "/cancel", of.cancel, "Refused: no response runs in background.", ()),
        ("GET", "/input_items", of.input_items, "List the input items of a response.", page),
    )
    return tuple(
        Route(
            *(verb, f"{base}/responses/{{id}}{path}", _handler(answer), "inference"),
            *(responses.DIALECT, text),
            query=query,
        )
        for base in ("/v1", "")
        for verb, path, answer, text, query in methods
    )


def _handler(answer: Answer) -> Handler:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        identity = identity_of(request)
        owner = identity.tenant.tenant_id, identity.workspace
        found = await answer(request, owner, request[STATE].parameters["id"])
        return await send_json(request, found)

    return handle


class _StoredResponses:
    """One method per route of stored responses; what it returns is sent as JSON."""

    def __init__(self, serving: Serving) -> None:
        self._stored, self._server = serving.stored, serving.gateway.config.server

    async def get(self, request: web.BaseRequest, owner: Owner, response_id: str) -> bytes:
        """Return the response as it was answered."""
        if request.query.get("stream", "false") != "false":
            problem = "stream: a stored response is not streamed again; expected false."
            raise Refusal(Kind.BAD, "invalid_value", problem, param="stream")
        asked = *owner, response_id, self._stored.wall()
        contents = self._stored.contents
        found = await contents.ask(lambda store: find_response(store, *asked), owner[0])
        if found is None:
            raise responses.not_found(response_id)
        request[BODY_SHARE].take(len(found))
        return found

    async def delete(self, _: web.BaseRequest, owner: Owner, response_id: str) -> object:
        """Delete the response."""
        asked = self._stored.store, *owner, response_id, self._stored.wall()
        if not await self._stored.contents.ask(lambda _: delete_response(*asked), owner[0]):
            raise responses.not_found(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def cancel(self, request: web.BaseRequest, owner: Owner, response_id: str) -> object:
        """Refuse: only background responses can be cancelled, and there are none."""
        await self.get(request, owner, response_id)
        message = (
            f"Response with id {response_id[:64]!r} cannot be cancelled: it is complete, and this"
            " server runs no background responses."
        )
        raise Refusal(Kind.BAD, "invalid_value", message, param="response_id")

    async def input_items(self, request: web.BaseRequest, owner: Owner, response_id: str) -> bytes:
        """Return a page of what the response answered: its own input after the items of its
        thread."""
        page = stored_items.parse_page(request.query)
        asked = *owner, response_id, self._stored.wall()
        contents = self._stored.contents
        turns = await contents.ask(lambda store: load_thread(store, *asked), owner[0])
        if turns is None:
            raise responses.not_found(response_id)
        loaded = [data for turn in turns for data in (turn.input, turn.response)]
        request[BODY_SHARE].take(sum(map(len, loaded)))

        def show(_is_abandoned: Callable[[], bool]) -> bytes:
            check_named_values(loaded, self._server.body_values_max)
            items: list[dict[str, Any]] = []
            for turn in turns:
                own = msgspec.json.decode(turn.input, type=list[dict[str, Any]])
                items += stored_items.shown_input(turn.response_id, own)
                if turn is not turns[-1]:
                    items += msgspec.json.decode(turn.response, type=dict[str, Any])["output"]
            return msgspec.json.encode(stored_items.page_of(items, page))

        return await self._stored.preparations.run(owner[0], show)
