"""Wire format of Gemini's cachedContents: create, update, list and get.

Functions are pure; `gateway.api.cached_contents` calls them. No answer repeats the content itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import Struct

from gateway.dialects.canonical import CacheDirectives, Prompt
from gateway.dialects.gemini import generate_content, wire
from gateway.dialects.gemini.prompt import prompt_of
from gateway.dialects.tolerance import Tolerance
from gateway.dialects.validation import invalid_field, parse_int
from gateway.errors import Kind, Refusal

SHAPE = generate_content.DIALECT
"""The dialect of the endpoints."""
DIRECTIVES = CacheDirectives("gemini")
"""How the answers of cached contents count."""
Body = wire.CachedBody
TTL_DEFAULT_S = 3_600.0
"""Seconds a resource lives if the request names no expiry."""

TTL_MAX_S = 366 * 86_400.0
"""Most seconds from a request to the expiry it sets."""

PAGE_DEFAULT, PAGE_MAX = 100, 1_000
"""Resources in one page of the list: the default, and the most."""

_TTL = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)s")


class CachedContentCreate(Struct, frozen=True):
    """A request to create cached content. `expires_ms` is in milliseconds since the epoch."""

    model: str
    display_name: str
    prompt: Prompt
    expires_ms: int


class CachedContentUpdate(Struct, frozen=True):
    """A new expiry, the only field that may change. `model` and `display_name` are "" if unsent."""

    expires_ms: int
    model: str = ""
    display_name: str = ""

    def check(self, model: str, display_name: str) -> None:
        """Compare the sent fields with the resource's. Raises Refusal if one differs."""
        for param, sent, current in (
            ("model", self.model, model),
            ("displayName", self.display_name, display_name),
        ):
            if sent and sent != current:
                raise _immutable_field(param)


class CachedContentView(Struct, frozen=True):
    """The public fields of a resource. Times are in milliseconds since the epoch."""

    resource_id: str
    model: str
    display_name: str
    tokens: int
    created_ms: int
    updated_ms: int
    expires_ms: int


def parse_create(body: bytes, now_ms: int) -> CachedContentCreate:
    """Decode a create request. Raises Refusal."""
    fields = wire.decode(body, wire.CachedBody, Tolerance())
    if not fields.model:
        problem = "this field is required; expected the model that reads the cached content."
        raise invalid_field("model", problem, "missing_required_parameter")
    prompt = prompt_of(fields, Tolerance("strict"), needs_contents=False)
    if not prompt.segments and not prompt.tools:
        problem = "nothing to cache; expected contents, a system instruction or tools."
        raise invalid_field("contents", problem, "missing_required_parameter")
    expires_ms = _expiry(fields, now_ms)
    if expires_ms is None:
        expires_ms = now_ms + int(TTL_DEFAULT_S * 1000)
    return CachedContentCreate(
        fields.model.removeprefix("models/"),
        fields.display_name,
        msgspec.structs.replace(prompt, continues=False, add_generation_prompt=False),
        expires_ms,
    )


def parse_update(body: bytes, mask: str, now_ms: int) -> CachedContentUpdate:
    """Decode an update. Raises Refusal for a field that cannot change."""
    fields = wire.decode(body, wire.CachedBody, Tolerance())
    for name in filter(None, mask.split(",")):
        if name.strip() not in ("ttl", "expireTime", "expire_time"):
            problem = f"{name[:64]!r} cannot change; expected ttl or expireTime."
            raise invalid_field("updateMask", problem)
    for name in wire.PromptFields.__struct_fields__:
        if getattr(fields, name):
            raise _immutable_field(wire.to_camel_case(name))
    expires_ms = _expiry(fields, now_ms)
    if expires_ms is None:
        problem = "the update names no expiry; expected ttl or expireTime."
        raise invalid_field("ttl", problem, "missing_required_parameter")
    return CachedContentUpdate(
        expires_ms, fields.model.removeprefix("models/"), fields.display_name
    )


def _immutable_field(param: str) -> Refusal:
    problem = "this field cannot change; only ttl or expireTime of a cached content can."
    return invalid_field(param, problem)


def parse_page(size: str, token: str) -> tuple[int, str]:
    """Return the page's size and the id that it follows. Raises Refusal."""
    wanted = parse_int(size, "pageSize", 0) if size else 0
    if not re.fullmatch(r"[a-z0-9]{0,64}", token):
        message = "pageToken: invalid token; expected the nextPageToken of an earlier page."
        raise Refusal(Kind.BAD, "invalid_value", message)
    return min(wanted or PAGE_DEFAULT, PAGE_MAX), token


def _expiry(fields: wire.CachedBody, now_ms: int) -> int | None:
    if fields.ttl is not None and fields.expire_time is not None:
        raise invalid_field("ttl", "both ttl and expireTime are set; expected only one.")
    if fields.ttl is not None:
        match = _TTL.fullmatch(fields.ttl)
        if match is None:
            problem = f"invalid duration {fields.ttl[:32]!r}; expected seconds such as '300s'."
            raise invalid_field("ttl", problem)
        return _check_expiry(now_ms + int(Decimal(match[1]) * 1000), now_ms, "ttl")
    if fields.expire_time is not None:
        try:
            at = datetime.fromisoformat(fields.expire_time)
        except ValueError:
            at = None
        if at is None or at.tzinfo is None:
            problem = (
                f"invalid time {fields.expire_time[:40]!r}; expected ISO 8601 with a time zone,"
                " such as '2026-01-31T12:00:00Z'."
            )
            raise invalid_field("expireTime", problem)
        return _check_expiry(int(at.timestamp() * 1000), now_ms, "expireTime")
    return None


def _check_expiry(expires_ms: int, now_ms: int, param: str) -> int:
    if not now_ms < expires_ms <= now_ms + int(TTL_MAX_S * 1000):
        seconds = (expires_ms - now_ms) // 1000
        problem = (
            f"the content would expire in {seconds} s; expected a time in the future, at most"
            f" {int(TTL_MAX_S)} s from now."
        )
        raise invalid_field(param, problem)
    return expires_ms


def resource(shown: CachedContentView) -> bytes:
    """Encode one resource as JSON."""
    return msgspec.json.encode(_object(shown))


def page(found: Sequence[CachedContentView], next_token: str) -> bytes:
    """Encode a page of resources as JSON; an empty page is `{}`."""
    body: dict[str, Any] = {}
    if found:
        body["cachedContents"] = [_object(shown) for shown in found]
    if next_token:
        body["nextPageToken"] = next_token
    return msgspec.json.encode(body)


def _object(shown: CachedContentView) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": f"cachedContents/{shown.resource_id}",
        "model": f"models/{shown.model}",
        "createTime": _time(shown.created_ms),
        "updateTime": _time(shown.updated_ms),
        "expireTime": _time(shown.expires_ms),
        "usageMetadata": {"totalTokenCount": shown.tokens},
    }
    if shown.display_name:
        found["displayName"] = shown.display_name
    return found


def _time(at_ms: int) -> str:
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at_ms % 1000:03d}Z"
