"""Plain JSON in and out, for paths that belong to no dialect: administration and self-service.

Bodies are strict: what is no field, or no value of it, is refused by its path. Errors are
`{"error": {"code", "message", "param"}}`. It knows no tenant and no engine; handlers call it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from gateway.config import ServerConfig
from gateway.dialects.validation import convert, find_duplicate_key
from gateway.errors import Kind, Refusal
from gateway.http.request_body import read_body

T = TypeVar("T")

DAY_MS = 86_400_000
WINDOW_DAYS_MAX = 400
WINDOW_DAYS = 30
_STATUS = {Kind.QUOTA: 429}


class _PlainShape:
    """Errors in the plainest form."""

    def error_body(self, refusal: Refusal, request_id: str) -> tuple[int, bytes]:
        """(HTTP status, JSON)."""
        error = {"code": refusal.code, "message": refusal.message, "param": refusal.param}
        status = _STATUS.get(refusal.kind, refusal.kind.value)
        return status, msgspec.json.encode({"error": error})

    def headers(self, request_id: str) -> dict[str, str]:
        """None of its own."""
        return {}


SHAPE = _PlainShape()


class Window(msgspec.Struct, frozen=True):
    """[since, until) in wall-clock milliseconds."""

    since_ms: int
    until_ms: int

    def shown(self) -> dict[str, str]:
        """As it is answered."""
        return {"since": instant(self.since_ms), "until": instant(self.until_ms)}


def answer(value: object, status: int = 200) -> web.Response:
    """A JSON answer."""
    body = msgspec.json.encode(value)
    return web.Response(status=status, body=body, content_type="application/json")


async def read(request: web.BaseRequest, settings: ServerConfig, kind: type[T]) -> T:
    """The body as a `kind`. Raises Refusal."""
    return decode(await read_body(request, settings), kind)


async def read_object(request: web.BaseRequest, settings: ServerConfig) -> dict[str, Any]:
    """The body as a JSON object, whatever its fields. Raises Refusal."""
    return await read(request, settings, dict[str, Any])


def decode(body: bytes, kind: type[T]) -> T:
    """JSON as a `kind`, no field twice. Raises Refusal naming the field."""
    try:
        tree = msgspec.json.decode(body)
        twice = find_duplicate_key(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise Refusal(Kind.BAD, "invalid_json", "The body is not valid JSON.") from None
    if twice is not None:
        shown = twice[:64]
        message = f"{shown!r} was given twice."
        raise Refusal(Kind.BAD, "invalid_value", message, param=shown)
    return convert(tree, kind, "")


def query(request: web.BaseRequest, *names: str) -> Mapping[str, str]:
    """The query's parameters; each of `names` at most once, and no others. Raises Refusal."""
    given = request.query
    for name in given:
        if name not in names and name != "key":
            known = ", ".join(names) or "none"
            message = f"Unknown parameter {name[:64]!r}; there are: {known}."
            raise Refusal(Kind.BAD, "unknown_parameter", message, param=name[:64])
        if len(given.getall(name)) > 1:
            raise Refusal(Kind.BAD, "invalid_value", f"{name} was given twice.", param=name)
    return given


def no_body(request: web.BaseRequest) -> None:
    """What is asked for stands in the query alone: a body that was meant to narrow it would be
    passed over. Raises Refusal."""
    if request.body_exists and request.content_length != 0:
        message = "This takes no body; what it takes stands in the query."
        raise Refusal(Kind.BAD, "unexpected_body", message)


def whole(given: Mapping[str, str], name: str, default: int, most: int) -> int:
    """A number from 1 to `most`. Raises Refusal."""
    text = given.get(name)
    if text is None:
        return default
    is_number = text.isascii() and text.isdigit() and len(text) <= 18
    if not is_number or not 1 <= int(text) <= most:
        message = f"{name}: a whole number from 1 to {most} (it is {text[:32]!r})."
        raise Refusal(Kind.BAD, "invalid_value", message, param=name)
    return int(text)


def window(given: Mapping[str, str], now_ms: int) -> Window:
    """`since` and `until`: dates or instants in UTC, the last thirty days where neither is given.

    Raises Refusal for what is no time, and for more than 400 days.
    """
    end_ms = _time(given, "until")
    if end_ms is None:
        end_ms = now_ms + 1
    start_ms = _time(given, "since")
    if start_ms is None:
        start_ms = max(0, end_ms - WINDOW_DAYS * DAY_MS)
    if not start_ms < end_ms:
        message = f"since ({instant(start_ms)}) is not before until ({instant(end_ms)})."
        raise Refusal(Kind.BAD, "invalid_value", message, param="since")
    if end_ms - start_ms > WINDOW_DAYS_MAX * DAY_MS:
        message = f"A window is at most {WINDOW_DAYS_MAX} days; ask for parts of it."
        raise Refusal(Kind.BAD, "invalid_value", message, param="since")
    return Window(start_ms, end_ms)


def instant(at_ms: int) -> str:
    """RFC 3339 in UTC."""
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
    if at_ms < 0:
        message = f"{name}: a date or an instant such as 2026-01-31 or 2026-01-31T12:00:00Z."
        raise Refusal(Kind.BAD, "invalid_value", message, param=name)
    return at_ms
