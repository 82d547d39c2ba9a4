"""Builds an OpenAPI 3.1 document of operations, and serves it at `/openapi.json`.

It knows no gateway and no tenant: the documents say what a server of this version offers, and are
equal for all of them. `gateway.app` adds the routes, `gateway.cli.openapi` prints the documents.
The static files of the dashboard are no API and are left out.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from functools import cache
from importlib import metadata
from typing import Any, Literal

import msgspec
from aiohttp import web

from gateway.api.openapi import admin_operations, public_operations
from gateway.api.openapi.operation import JSON, Operation
from gateway.dialects.families import FAMILIES, KEY_HEADERS
from gateway.http.middleware import Route
from gateway.http.route_table import canonical, parameters_of

ListenerName = Literal["public", "admin"]

_CAMEL = [one.name for one in FAMILIES.values() if one.is_camel_case]
"""Families with snake_case names in our structs for the camelCase names of their JSON."""
_SCHEMES: dict[str, dict[str, str]] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    **{
        name.lower(): {"type": "apiKey", "in": "header", "name": name.lower()}
        for name in KEY_HEADERS
    },
    "key": {"type": "apiKey", "in": "query", "name": "key"},
}
"""Ways to send a key. An administrator's key goes in a header only."""
_TITLES = {"public": "Trunkline", "admin": "Trunkline's admin API"}


def routes(listener: ListenerName) -> tuple[Route, ...]:
    """Return the route of a listener's document. It needs no key: the document is no secret."""

    async def show(request: web.BaseRequest) -> web.StreamResponse:
        body = await asyncio.to_thread(encoded, listener)
        return web.Response(body=body, content_type=JSON)

    return (Route("GET", "/openapi.json", show, "open"),)


@cache
def encoded(listener: ListenerName) -> bytes:
    """Return a listener's document as JSON. The first call takes about 20 ms and reads a file."""
    return msgspec.json.encode(_document(listener))


def document(listener: ListenerName) -> dict[str, Any]:
    """Return a listener's document as JSON values."""
    found: dict[str, Any] = msgspec.json.decode(encoded(listener))
    return found


def _document(listener: ListenerName) -> dict[str, Any]:
    tables: dict[str, Callable[[], tuple[Operation, ...]]] = {
        "public": public_operations.operations,
        "admin": admin_operations.operations,
    }
    operations = tables[listener]()
    schemas = _schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(canonical(one.path), {})[one.method.lower()] = _operation(one, schemas)
    ways = _SCHEMES if listener == "public" else {n: _SCHEMES[n] for n in list(_SCHEMES)[:3]}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": _TITLES[listener],
            "version": metadata.version("trunkline"),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": schemas.components, "securitySchemes": ways},
    }


class _Schemas(msgspec.Struct, frozen=True):
    """Schemas by struct, and the components that they refer to."""

    by_struct: dict[type, dict[str, Any]]
    components: dict[str, Any]


def _schemas(operations: Iterable[Operation]) -> _Schemas:
    """Return the schemas of all bodies, answers and errors."""
    structs = {
        struct: struct is one.body and one.shape.family in _CAMEL
        for one in operations
        for struct in (one.body, one.answer, one.shape.error)
        if struct is not None
    }
    by_struct: dict[type, dict[str, Any]] = {}
    components: dict[str, Any] = {}
    for is_camel in (False, True):
        chosen = [struct for struct, has_camel in structs.items() if has_camel is is_camel]
        made, parts = msgspec.json.schema_components(
            chosen, ref_template="#/components/schemas/{name}"
        )
        by_struct.update(zip(chosen, made, strict=True))
        components |= _camel(parts) if is_camel else parts
    return _Schemas(by_struct, components)


def _camel(schema: Any) -> Any:
    """Return a schema with camelCase names of properties."""
    if isinstance(schema, list):
        return [_camel(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {name: _camel(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        renamed["properties"] = {
            _camel_name(name): value for name, value in renamed["properties"].items()
        }
        renamed["required"] = [_camel_name(name) for name in schema.get("required", [])]
    return renamed


def _camel_name(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _operation(one: Operation, schemas: _Schemas) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "Success."}
    schema = {} if one.answer is None else schemas.by_struct[one.answer]
    success["content"] = {kind: {"schema": schema} if kind == JSON else {} for kind in one.content}
    wrong = {"schema": schemas.by_struct[one.shape.error]}
    error = {"description": "An error.", "content": {JSON: wrong}}
    described: dict[str, Any] = {
        "operationId": _operation_id(one),
        "summary": one.summary,
        "tags": [one.shape.family if not one.path.startswith("/admin") else "admin"],
        "parameters": [
            *_path_parameters(one.path),
            *(_parameter("query", name) for name in one.query),
            *(_parameter("header", name) for name in one.headers),
        ],
        "responses": {str(one.status): success, "4XX": error, "5XX": error},
        "security": _security(one),
    }
    if one.body is not None:
        content = {JSON: {"schema": schemas.by_struct[one.body]}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _operation_id(one: Operation) -> str:
    words = re.findall(r"[a-z0-9]+", canonical(one.path).lower())
    return "_".join((one.method.lower(), *words))


def _path_parameters(path: str) -> list[dict[str, Any]]:
    found = []
    for name, pattern in parameters_of(path):
        schema: dict[str, Any] = {"type": "string"}
        if "|" in pattern:
            schema["enum"] = pattern.split("|")
        found.append({"name": name, "in": "path", "required": True, "schema": schema})
    return found


def _parameter(place: str, name: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": False, "schema": {"type": "string"}}


def _security(one: Operation) -> list[dict[str, list[str]]]:
    """Return the ways to send a key, each with the scope that the key needs."""
    if one.role == "open":
        return []
    realm, _, scope = one.role.partition(":")
    if realm == "admin":  # any administrator, without a scope
        return [{way: [scope] if scope else []} for way in list(_SCHEMES)[:3]]
    return [{way: [realm]} for way in _SCHEMES]
