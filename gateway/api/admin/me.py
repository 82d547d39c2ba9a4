"""`GET /admin/v1/me`: the administrator that asks, and the server that answers.

The dashboard offers what the scopes allow, and shows the server's address in its snippets.
"""

from __future__ import annotations

import asyncio
from importlib import metadata
from typing import Any

from aiohttp import web
from msgspec import Struct

from gateway.api.admin.audit import ChangeLog
from gateway.config import Config
from gateway.engines.served_models import ServedModels
from gateway.http import json_api
from gateway.http.request_context import STATE
from gateway.http.route_table import Route
from tenancy.accounts.keys import find_key
from tenancy.accounts.tenants import oldest_tenant_ms
from tenancy.storage.interface import Store
from tenancy.types import WallClock


class AdministratorAnswer(Struct, frozen=True):
    """The asking administrator, its scopes, and the server."""

    actor: str
    actor_id: str
    label: str
    scopes: list[str]
    server: dict[str, Any]


def routes(
    store: Store, config: Config, models: ServedModels, changes: ChangeLog, wall: WallClock
) -> tuple[Route, ...]:
    """Return the route of the asking administrator."""

    async def me(request: web.BaseRequest) -> object:
        state, actor = request[STATE], changes.actor(request)
        label, version, began_ms = await asyncio.to_thread(_read, store, state.admin_key_id)
        return {
            "actor": actor.kind,
            "actor_id": actor.actor_id,
            "label": label,
            "scopes": sorted(state.admin_scopes),
            "server": {
                "version": version,
                "model": models.default.name,
                "models": models.names,
                "public": config.server.listen,
                "classes": sorted(config.caching.all_classes()),
                "began_ms": began_ms,
                "at_ms": wall(),
            },
        }

    what, text = "GET /admin/v1/me", "Show the asking administrator."
    return (json_api.route(what, "admin", text, me, answer=AdministratorAnswer),)


def _read(store: Store, key_id: int | None) -> tuple[str, str, int | None]:
    """Return the label of the key, the installed version, and when the oldest tenant was made.
    Reads files: call it in a thread."""
    label = "" if key_id is None else find_key(store, str(key_id)).label
    return label, metadata.version("trunkline"), oldest_tenant_ms(store)
