"""Builds an OpenAPI 3.1 document of a listener's routes, and serves it at `/openapi.json`.

It says what a server of this version offers, and is equal for all of them: a route declares its
summary, its structs and its parameters where its handler is. Routes without a summary, such as the
static files of the dashboard, are left out. `gateway.cli.openapi` prints the documents.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from typing import Any, Literal

import msgspec
from aiohttp import web

from gateway.dialects.families import FAMILIES, KEY_HEADERS
from gateway.dialects.protocol import ErrorShape
from gateway.http import json_api
from gateway.http.route_table import JSON, Route, canonical, parameters_of

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


def route(listener: ListenerName, routes: tuple[Route, ...]) -> Route:
    """Return the route of the document of a listener and its other routes. It needs no key: the
    document is no secret. The first answer takes about 20 ms to make."""

    async def show(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=await asyncio.to_thread(encoded), content_type=JSON)

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(document(listener, (*routes, own)))

    text = "Show this document."
    own = Route("GET", "/openapi.json", show, "open", summary=text, family=json_api.FAMILY)
    return own


def document(listener: ListenerName, routes: Iterable[Route]) -> dict[str, Any]:
    """Return a listener's document."""
    described = [one for one in routes if one.summary]
    schemas = _schemas(described)
    paths: dict[str, dict[str, Any]] = {}
    for one in described:
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


def _schemas(routes: Iterable[Route]) -> _Schemas:
    """Return the schemas of all bodies, answers and errors."""
    structs = {
        struct: struct is one.body and one.shape.family in _CAMEL
        for one in routes
        for struct in (one.body, one.answer, _shape(one).error)
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
    return _Schemas(by_struct, _ecma(components))


def _shape(one: Route) -> ErrorShape:
    return json_api.SHAPE if one.family else one.shape


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


def _ecma(schema: Any) -> Any:
    """Return a schema whose patterns end as JavaScript writes it, where `\\Z` is a letter."""
    if isinstance(schema, list):
        return [_ecma(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value.replace(r"\Z", "$")
        if name == "pattern" and isinstance(value, str)
        else _ecma(value)
        for name, value in schema.items()
    }


def _camel_name(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _operation(one: Route, schemas: _Schemas) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "Success."}
    schema = {} if one.answer is None else schemas.by_struct[one.answer]
    success["content"] = {kind: {"schema": schema} if kind == JSON else {} for kind in one.content}
    wrong = {"schema": schemas.by_struct[_shape(one).error]}
    error = {"description": "An error.", "content": {JSON: wrong}}
    described: dict[str, Any] = {
        "operationId": _operation_id(one),
        "summary": one.summary,
        "tags": [_shape(one).family if not one.path.startswith("/admin") else "admin"],
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


def _operation_id(one: Route) -> str:
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


def _security(one: Route) -> list[dict[str, list[str]]]:
    """Return the ways to send a key, each with the scope that the key needs."""
    if one.role == "open":
        return []
    realm, _, scope = one.role.partition(":")
    if realm == "admin":  # any administrator, without a scope
        return [{way: [scope] if scope else []} for way in list(_SCHEMES)[:3]]
    return [{way: [realm]} for way in _SCHEMES]
