"""Stored responses by id: read, list the input items, delete. Nothing here runs the model.

A response of another tenant or workspace is a 404 as a missing one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
from aiohttp import web

from gateway.context import Context
from gateway.dialects.families import responses, stored_items
from gateway.errors import Kind, Refusal
from gateway.generation.stored_responses import check_named_values
from gateway.http.middleware import Handler, Route
from gateway.http.request_body import BODY_SHARE
from gateway.http.request_context import STATE, identity_of
from gateway.http.response import send_json
from tenancy.responses.stored_responses import delete_response, find_response, load_thread

Owner = tuple[int, str]
"""The tenant and workspace whose objects a request may read."""
Method = Callable[[Context, web.BaseRequest, Owner, str], Awaitable[web.StreamResponse]]


def routes(gateway: Context) -> tuple[Route, ...]:
    """Return the routes of stored responses, with and without /v1, as clients write base URLs."""
    return tuple(_routes(gateway))


def _routes(gateway: Context) -> Iterator[Route]:
    methods: tuple[tuple[str, str, Method], ...] = (
        ("GET", "/{id}", _get),
        ("DELETE", "/{id}", _delete),
        ("POST", "/{id}/cancel", _cancel),
        ("GET", "/{id}/input_items", _input_items),
    )
    for base in ("/v1/responses", "/responses"):
        for verb, path, method in methods:
            yield Route(verb, base + path, _bind(gateway, method), "inference", responses.DIALECT)


def _bind(gateway: Context, method: Method) -> Handler:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        identity = identity_of(request)
        owner = identity.tenant.tenant_id, identity.workspace
        return await method(gateway, request, owner, request[STATE].parameters["id"])

    return handle


async def _get(
    gateway: Context, request: web.BaseRequest, owner: Owner, response_id: str
) -> web.StreamResponse:
    """Send the response as it was answered."""
    if request.query.get("stream", "false") != "false":
        problem = "stream: a stored response is not streamed again; expected false."
        raise Refusal(Kind.BAD, "invalid_value", problem, param="stream")
    return await send_json(request, await _find(gateway, request, owner, response_id))


async def _delete(
    gateway: Context, request: web.BaseRequest, owner: Owner, response_id: str
) -> web.StreamResponse:
    asked = gateway.store, *owner, response_id, gateway.wall()
    if not await gateway.contents.ask(lambda _: delete_response(*asked), owner[0]):
        raise responses.not_found(response_id)
    return await send_json(request, {"id": response_id, "object": "response", "deleted": True})


async def _cancel(
    gateway: Context, request: web.BaseRequest, owner: Owner, response_id: str
) -> web.StreamResponse:
    """Refuse: only background responses can be cancelled, and there are none."""
    await _find(gateway, request, owner, response_id)
    message = (
        f"Response with id {response_id[:64]!r} cannot be cancelled: it is complete, and this"
        " server runs no background responses."
    )
    raise Refusal(Kind.BAD, "invalid_value", message, param="response_id")


async def _input_items(
    gateway: Context, request: web.BaseRequest, owner: Owner, response_id: str
) -> web.StreamResponse:
    """Send a page of what the response answered: its own input after the items of its thread."""
    page = stored_items.parse_page(request.query)
    asked = *owner, response_id, gateway.wall()
    turns = await gateway.contents.ask(lambda store: load_thread(store, *asked), owner[0])
    if turns is None:
        raise responses.not_found(response_id)
    loaded = [data for turn in turns for data in (turn.input, turn.response)]
    request[BODY_SHARE].take(sum(map(len, loaded)))

    def show(_is_abandoned: Callable[[], bool]) -> bytes:
        check_named_values(loaded, gateway.config.server.body_values_max)
        items: list[dict[str, Any]] = []
        for turn in turns:
            own = msgspec.json.decode(turn.input, type=list[dict[str, Any]])
            items += stored_items.shown_input(turn.response_id, own)
            if turn is not turns[-1]:
                items += msgspec.json.decode(turn.response, type=dict[str, Any])["output"]
        return msgspec.json.encode(stored_items.page_of(items, page))

    return await send_json(request, await gateway.preparations.run(owner[0], show))


async def _find(
    gateway: Context, request: web.BaseRequest, owner: Owner, response_id: str
) -> bytes:
    asked = *owner, response_id, gateway.wall()
    found = await gateway.contents.ask(lambda store: find_response(store, *asked), owner[0])
    if found is None:
        raise responses.not_found(response_id)
    request[BODY_SHARE].take(len(found))
    return found
