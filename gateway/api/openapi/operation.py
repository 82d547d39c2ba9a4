"""One entry of the tables that describe the routes: `Operation`."""

from __future__ import annotations

from msgspec import Struct

from gateway.dialects.protocol import ErrorShape
from gateway.http import json_api
from gateway.http.middleware import Role

JSON = "application/json"
SSE = "text/event-stream"


class Operation(Struct, frozen=True):
    """A described route. `path`: as the route declares it, with its parameters' patterns.

    `body` and `answer`: the structs of the request and of a success; None for no request body, and
    for an answer that has no struct. `query`: the names of its parameters. `content`: the content
    types of a success. `headers`: those that it may have beside every request's.
    """

    method: str
    path: str
    role: Role
    summary: str
    body: type | None = None
    answer: type | None = None
    query: tuple[str, ...] = ()
    status: int = 200
    shape: ErrorShape = json_api.SHAPE
    content: tuple[str, ...] = (JSON,)
    headers: tuple[str, ...] = ()
