"""Cached content before the prompt that names it.

The stored part is loaded for its owner alone, put before what was sent, and held by an absolute,
pinned lease until it expires. `prepare` calls it.
"""

from __future__ import annotations

import asyncio

import msgspec
from msgspec.structs import replace

from engine.api import Retention
from gateway.context import Context
from gateway.dialects.canonical import Prompt, Segment
from gateway.errors import Kind, Refusal
from gateway.retention_classes import RESOURCE
from tenancy.accounts.cached_contents import Resource, find_resource
from tenancy.types import Identity

PREFIX = "cachedContents/"


def retention(expires_ms: int, now_ms: int) -> Retention:
    """Promised until then, whatever is read meanwhile."""
    left_s = max(0.0, (expires_ms - now_ms) / 1000)
    return Retention(RESOURCE, left_s, left_s, "absolute", renewed_on_read=False, pinned=True)


async def load(gateway: Context, name: str, identity: Identity) -> tuple[Resource, Prompt]:
    """A live resource of this identity's workspace. In a thread: the database may be far and the
    content long. Raises Refusal: there is none to be seen; StoreError."""
    found = await asyncio.to_thread(
        find_resource,
        gateway.store,
        identity.tenant.tenant_id,
        identity.workspace,
        name.removeprefix(PREFIX),
        gateway.wall(),
    )
    if found is None:
        message = "There is no such cached content, or it is not yours."
        raise Refusal(Kind.PERMISSION, "cached_content_not_found", message, param="cachedContent")
    return found[0], msgspec.msgpack.decode(found[1], type=Prompt)


async def expand(gateway: Context, prompt: Prompt, identity: Identity) -> tuple[Prompt, Retention]:
    """The whole prompt, and the class its stored part is held in. Raises Refusal."""
    resource, stored = await load(gateway, prompt.resource, identity)
    if resource.model not in gateway.model_names:
        message = f"The cached content belongs to the model {resource.model}, which is not here."
        raise Refusal(Kind.BAD, "invalid_value", message, param="cachedContent")
    return joined(stored, prompt), retention(resource.expires_ms, gateway.wall())


def joined(stored: Prompt, sent: Prompt) -> Prompt:
    """The stored part, marked at its end, and what was sent after it, as one prompt."""
    start = marked(stored)
    after = 1 + max((part.message for part in start.segments), default=-1)
    rest = tuple(_moved(part, after) for part in sent.segments)
    return replace(
        sent,
        segments=start.segments + rest,
        tools=start.tools,
        tool_choice=start.tool_choice,
        resource="",
    )


def marked(stored: Prompt) -> Prompt:
    """With the breakpoint that holds it: after its last segment, or its last tool."""
    if stored.segments:
        last = replace(stored.segments[-1], retention=RESOURCE)
        return replace(stored, segments=(*stored.segments[:-1], last))
    tool = replace(stored.tools[-1], retention=RESOURCE)
    return replace(stored, tools=(*stored.tools[:-1], tool))


def _moved(part: Segment, by: int) -> Segment:
    return replace(part, message=part.message + by)
