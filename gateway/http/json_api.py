"""JSON requests and responses of paths outside all dialects: the admin and self-service APIs.

Bodies are validated strictly: an unknown field or an invalid value is refused with the field's path
as `param`. Errors have the shape `{"error": {"code", "message", "param"}}`. `route` makes a route
of a handler, and its description of the handler's types. This module knows no tenant and no engine.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import TypeVar, get_type_hints

import msgspec
from aiohttp import web

from gateway.dialects.protocol import ErrorShape
from gateway.dialects.validation import convert, find_duplicate_key
from gateway.errors import Kind, Refusal
from gateway.http.request_body import SMALL_VALUES_MAX, check_values, read_body
from gateway.http.route_table import JSON, Role, Route
from tenancy.accounting.exports import as_csv
from tenancy.types import DAY_MS, LATEST_MS

T = TypeVar("T")

WINDOW_DAYS_MAX = 400
"""The longest time window of a query, in days."""

WINDOW_DAYS_DEFAULT = 30
"""The length of a time window without `since`, in days."""


class ApiError(msgspec.Struct, frozen=True):
    """An error's stable code, its text, and the parameter that is wrong, if it is one."""

    code: str
    message: str
    param: str | None


class ApiErrorAnswer(msgspec.Struct, frozen=True):
    """An error of the admin and self-service APIs."""

    error: ApiError


class _JsonApiErrorShape(ErrorShape):
    """The error shape of the admin and self-service APIs."""

    name = ""
    family = "api"
    operation = "chat"
    error = ApiErrorAnswer

    def error_body(self, refusal: Refusal, request_id: str) -> tuple[int, bytes]:
        """Return (HTTP status, JSON body)."""
        error = ApiError(refusal.code, refusal.message, refusal.param)
        return refusal.kind.status, msgspec.json.encode(ApiErrorAnswer(error))


SHAPE = _JsonApiErrorShape()
FAMILY = SHAPE.family


class Window(msgspec.Struct, frozen=True):
    """A time window [since, until), in wall-clock milliseconds."""

    since_ms: int
    until_ms: int

    def as_json(self) -> dict[str, str]:
        """Return the window as responses show it, in RFC 3339."""
        return {"since": instant(self.since_ms), "until": instant(self.until_ms)}


def reply(value: object, status: int = 200) -> web.Response:
    """Return a JSON response."""
    body = msgspec.json.encode(value)
    return web.Response(status=status, body=body, content_type="application/json")


def wants_csv(given: Mapping[str, str]) -> bool:
    """Return whether the parameter `format` asks for CSV; JSON is the default. Raises Refusal."""
    return choice(given, "format", ("json", "csv")) == "csv"


def csv_answer(
    rows: Sequence[Mapping[str, object]], name: str, next_page: str = ""
) -> web.Response:
    """Return rows as a CSV file, with the columns of the first row that has them. O(cells).

    `next_page`: where more rows are, for the `Link` header (RFC 8288).
    """
    headers = {"Content-Disposition": f'attachment; filename="{name}.csv"'}
    if next_page:
        headers["Link"] = f'<{next_page}>; rel="next"'
    columns = tuple(dict.fromkeys(column for row in rows for column in row))
    cells = [{column: _cell(row.get(column)) for column in columns} for row in rows]
    return web.Response(
        body=b"".join(as_csv(columns, cells)),
        content_type="text/csv",
        charset="utf-8",
        headers=headers,
    )


def page_url(request: web.BaseRequest, **parameters: str | int) -> str:
    """Return the request's path and query with other parameters."""
    return str(request.rel_url.update_query(parameters))


def _cell(value: object) -> object:
    """Return a cell of CSV: JSON for a list, an object or a truth value."""
    is_plain = value is None or isinstance(value, str | int | float)
    if is_plain and not isinstance(value, bool):
        return value
    return msgspec.json.encode(value).decode()


def route(
    what: str,
    role: Role,
    summary: str,
    handler: Callable[..., Awaitable[object]],
    *,
    answer: type | None = None,
    body: type | None = None,
    query: str = "",
    status: int = 200,
) -> Route:
    """Return a route of these APIs. `what`: its method and path. `query`: names of parameters.

    The handler gets the request and, if it has a second parameter, the body as that type; `body`
    describes it more closely. What it returns is sent as JSON, unless it is a response. `answer`:
    the struct of an answer that is a dictionary.
    """
    method, path = what.split()
    names = tuple(query.split())
    hints = get_type_hints(handler)
    returned, kind = hints.pop("return"), hints.get("body")
    if answer is None and isinstance(returned, type) and issubclass(returned, msgspec.Struct):
        answer = returned

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        check_query(request, *names)
        sent = () if kind is None else (decode(await read_body(request), kind),)
        found = await handler(request, *sent)
        return found if isinstance(found, web.StreamResponse) else reply(found, status)

    content = (JSON, "text/csv") if "format" in names else (JSON,)
    about = (summary, body or kind, answer, names, status, content)
    return Route(method, path, handle, role, SHAPE, *about)


def decode(body: bytes, kind: type[T]) -> T:
    """Decode JSON as a `kind`. Raises Refusal with the invalid or duplicate field's path, and for a
    body of more than `SMALL_VALUES_MAX` values."""
    check_values(body, SMALL_VALUES_MAX)
    try:
        tree = msgspec.json.decode(body)
        duplicate = find_duplicate_key(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise Refusal(Kind.BAD, "invalid_json", "Invalid JSON in the request body.") from None
    if duplicate is not None:
        shown = duplicate[:64]
        message = f"Duplicate field: {shown!r}."
        raise Refusal(Kind.BAD, "invalid_value", message, param=shown)
    return convert(tree, kind, "")


def check_query(request: web.BaseRequest, *names: str) -> None:
    """Refuse unknown and duplicate parameters: each of `names` may come once, and `key`. Raises
    Refusal.
    """
    given = request.query
    for name in given:
        if name not in names and name != "key":
            known = ", ".join(names) or "none"
            message = f"Unknown parameter: {name[:64]!r}; expected: {known}."
            raise Refusal(Kind.BAD, "unknown_parameter", message, param=name[:64])
        if len(given.getall(name)) > 1:
            raise Refusal(Kind.BAD, "invalid_value", f"Duplicate parameter: {name!r}.", param=name)


def refuse_body(request: web.BaseRequest) -> None:
    """Raise Refusal if the request has a body.

    The endpoint reads its parameters from the query; it would silently ignore filters in a body.
    """
    if request.body_exists and request.content_length != 0:
        message = "Unexpected request body; expected query parameters only."
        raise Refusal(Kind.BAD, "unexpected_body", message)


def positive_int(given: Mapping[str, str], name: str, default: int, most: int) -> int:
    """Return the parameter `name`, an integer from 1 to `most`. Raises Refusal."""
    text = given.get(name)
    if text is None:
        return default
    is_number = text.isascii() and text.isdigit() and len(text) <= 18
    if not is_number or not 1 <= int(text) <= most:
        message = f"Invalid {name}: {text[:32]!r}; expected an integer from 1 to {most}."
        raise Refusal(Kind.BAD, "invalid_value", message, param=name)
    return int(text)


def choice(given: Mapping[str, str], name: str, options: Collection[str]) -> str | None:
    """Return the parameter `name`, one of `options`; None if it is not given. Raises Refusal."""
    text = given.get(name)
    if text is not None and text not in options:
        message = f"Unknown {name}: {text[:32]!r}; expected {' or '.join(options)}."
        raise Refusal(Kind.BAD, "invalid_value", message, param=name)
    return text


def window(given: Mapping[str, str], now_ms: int) -> Window:
    """Return the window of the parameters `since` and `until`: dates, or times with a zone.

    `until` defaults to now and `since` to thirty days before `until`. Raises Refusal for an invalid
    time, an empty window, and a window of more than 400 days.
    """
    end_ms = _time(given, "until")
    if end_ms is None:
        end_ms = now_ms + 1
    start_ms = _time(given, "since")
    if start_ms is None:
        start_ms = max(0, end_ms - WINDOW_DAYS_DEFAULT * DAY_MS)
    if not start_ms < end_ms:
        message = f"Invalid since: {instant(start_ms)}; expected before until, {instant(end_ms)}."
        raise Refusal(Kind.BAD, "invalid_value", message, param="since")
    if end_ms - start_ms > WINDOW_DAYS_MAX * DAY_MS:
        days = math.ceil((end_ms - start_ms) / DAY_MS)
        message = f"Time window too long: {days} days; limit {WINDOW_DAYS_MAX} days."
        raise Refusal(Kind.BAD, "invalid_value", message, param="since")
    return Window(start_ms, end_ms)


def instant(at_ms: int) -> str:
    """Return a wall-clock time in milliseconds as RFC 3339 in UTC."""
    at = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=at_ms)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _time(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    try:
        if len(text) == len("2026-01-31"):
            day = date.fromisoformat(text)
            at = datetime(day.year, day.month, day.day, tzinfo=UTC)
        else:
            at = datetime.fromisoformat(text[:40])
            if at.tzinfo is None:
                raise ValueError("no time zone")
        at_ms = (at - datetime.fromtimestamp(0, UTC)) // timedelta(milliseconds=1)
    except (ValueError, OverflowError):
        at_ms = -1
    if not 0 <= at_ms <= LATEST_MS:  # a later one, widened to whole hours, is no time
        message = (
            f"Invalid {name}: {text[:40]!r}; expected a date or a time such as 2026-01-31 or"
            " 2026-01-31T12:00:00Z."
        )
        raise Refusal(Kind.BAD, "invalid_value", message, param=name)
    return at_ms
