"""Gemini's cachedContents on the wire: what creates, changes, lists and shows one. Pure.

`handlers.cached_contents` calls it; the content itself is never shown again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import Struct

from gateway.dialects.canonical import Prompt
from gateway.dialects.gemini import wire
from gateway.dialects.gemini.prompt import prompt_of
from gateway.errors import Kind, Refusal

TTL_DEFAULT_S = 3_600.0
TTL_MAX_S = 366 * 86_400.0
PAGE_DEFAULT, PAGE_MAX = 100, 1_000
_TTL = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)s")


class CachedContentCreate(Struct, frozen=True):
    """What is asked for; times in milliseconds since the epoch."""

    model: str
    display_name: str
    prompt: Prompt
    expires_ms: int


class CachedContentUpdate(Struct, frozen=True):
    """A new expiry, the only thing that can change; model and name as far as they were sent."""

    expires_ms: int
    model: str = ""
    display_name: str = ""

    def check(self, model: str, display_name: str) -> None:
        """Raises Refusal where it says another model or name than the resource has."""
        for param, sent, kept in (
            ("model", self.model, model),
            ("displayName", self.display_name, display_name),
        ):
            if sent and sent != kept:
                raise _fixed(param)


class CachedContentView(Struct, frozen=True):
    """What is told of a resource."""

    resource_id: str
    model: str
    display_name: str
    tokens: int
    created_ms: int
    updated_ms: int
    expires_ms: int


def parse_create(body: bytes, now_ms: int) -> CachedContentCreate:
    """Raises Refusal."""
    fields = wire.decode(body, wire.CACHED, wire.CachedBody)
    if not fields.model:
        message = "model: a cached content belongs to one model; name it."
        raise Refusal(Kind.BAD, "missing_required_parameter", message, param="model")
    prompt = prompt_of(fields, needs_contents=False)
    if not prompt.segments and not prompt.tools:
        message = "contents: there is nothing to cache."
        raise Refusal(Kind.BAD, "missing_required_parameter", message, param="contents")
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
    """What is to change. Raises Refusal for what cannot."""
    fields = wire.decode(body, wire.CACHED, wire.CachedBody)
    for name in filter(None, mask.split(",")):
        if name.strip() not in ("ttl", "expireTime", "expire_time"):
            message = f"updateMask: only ttl and expireTime can change (it names {name[:64]!r})."
            raise Refusal(Kind.BAD, "invalid_value", message, param="updateMask")
    for name in wire.PromptFields.__struct_fields__:
        if getattr(fields, name):
            raise _fixed(wire.to_camel_case(name))
    expires_ms = _expiry(fields, now_ms)
    if expires_ms is None:
        message = "ttl: give ttl or expireTime."
        raise Refusal(Kind.BAD, "missing_required_parameter", message, param="ttl")
    return CachedContentUpdate(
        expires_ms, fields.model.removeprefix("models/"), fields.display_name
    )


def _fixed(param: str) -> Refusal:
    message = f"{param}: only the time of expiry of a cached content can change."
    return Refusal(Kind.BAD, "invalid_value", message, param=param)


def parse_page(size: str, token: str) -> tuple[int, str]:
    """(how many, after which id). Raises Refusal."""
    if size and not (size.isascii() and size.isdigit() and len(size) <= 9):
        message = f"pageSize: it has to be a whole number (it is {size[:32]!r})."
        raise Refusal(Kind.BAD, "invalid_value", message, param="pageSize")
    if not re.fullmatch(r"[a-z0-9]{0,64}", token):
        raise Refusal(Kind.BAD, "invalid_value", "pageToken: it is not one of ours.")
    return min(int(size or 0) or PAGE_DEFAULT, PAGE_MAX), token


def _expiry(fields: wire.CachedBody, now_ms: int) -> int | None:
    if fields.ttl is not None and fields.expire_time is not None:
        message = "Set ttl or expireTime, not both."
        raise Refusal(Kind.BAD, "invalid_value", message, param="ttl")
    if fields.ttl is not None:
        match = _TTL.fullmatch(fields.ttl)
        if match is None:
            message = f'ttl: seconds with an s, like "300s" (it is {fields.ttl[:32]!r}).'
            raise Refusal(Kind.BAD, "invalid_value", message, param="ttl")
        return _within(now_ms + int(Decimal(match[1]) * 1000), now_ms, "ttl")
    if fields.expire_time is not None:
        try:
            at = datetime.fromisoformat(fields.expire_time)
        except ValueError:
            at = None
        if at is None or at.tzinfo is None:
            message = f"expireTime: a time with its zone (it is {fields.expire_time[:40]!r})."
            raise Refusal(Kind.BAD, "invalid_value", message, param="expireTime")
        return _within(int(at.timestamp() * 1000), now_ms, "expireTime")
    return None


def _within(expires_ms: int, now_ms: int, param: str) -> int:
    if not now_ms < expires_ms <= now_ms + int(TTL_MAX_S * 1000):
        message = f"{param}: it has to end in the future, within {int(TTL_MAX_S)} s."
        raise Refusal(Kind.BAD, "invalid_value", message, param=param)
    return expires_ms


def resource(shown: CachedContentView) -> bytes:
    """One resource as JSON."""
    return msgspec.json.encode(_object(shown))


def page(found: Sequence[CachedContentView], next_token: str) -> bytes:
    """A list as JSON; `{}` for none."""
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
