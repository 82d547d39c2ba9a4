"""`GET /admin/v1/me`: the administrator that asks, and the server that answers.

The dashboard offers what the scopes allow, and shows the server's address in its snippets.
"""

from __future__ import annotations

import asyncio
from importlib import metadata

from aiohttp import web

from gateway.api.admin.audit import actor_of
from gateway.context import Context
from gateway.http import json_api
from gateway.http.middleware import Route
from gateway.http.request_context import STATE
from tenancy.accounts.keys import find_key
from tenancy.accounts.tenants import oldest_tenant_ms
from tenancy.storage.interface import Store


def routes(gateway: Context) -> tuple[Route, ...]:
    """Return the route of the asking administrator."""

    async def me(request: web.BaseRequest) -> web.StreamResponse:
        json_api.query(request)
        state, actor = request[STATE], actor_of(gateway, request)
        label, version, began_ms = await asyncio.to_thread(_read, gateway.store, state.admin_key_id)
        config = gateway.config
        return json_api.answer(
            {
                "actor": actor.kind,
                "actor_id": actor.actor_id,
                "label": label,
                "scopes": sorted(state.admin_scopes),
                "server": {
                    "version": version,
                    "model": gateway.models.default.name,
                    "models": gateway.models.names,
                    "public": config.server.listen,
                    "classes": sorted(config.caching.all_classes()),
                    "began_ms": began_ms,
                    "at_ms": gateway.wall(),
                },
            }
        )

    return (Route("GET", "/admin/v1/me", me, "admin", json_api.SHAPE),)


def _read(store: Store, key_id: int | None) -> tuple[str, str, int | None]:
    """Return the label of the key, the installed version, and when the oldest tenant was made.
    Reads files: call it in a thread."""
    label = "" if key_id is None else find_key(store, str(key_id)).label
    return label, metadata.version("trunkline"), oldest_tenant_ms(store)
