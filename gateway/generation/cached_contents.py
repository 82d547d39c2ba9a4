"""Put stored cached content before the prompt that references it.

The content is loaded only for its owner and kept in the cache by an absolute, pinned lease until it
expires. `gateway.generation.preparation` and the cached-contents handlers call it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from engine.api import Retention
from gateway.context import Context
from gateway.dialects.canonical import Prompt, Segment
from gateway.engines.served_models import ServedModel
from gateway.errors import Kind, Refusal
from gateway.http.request_body import BodyShare
from gateway.retention_classes import RESOURCE
from tenancy.accounts.cached_contents import CachedContentRecord, find_cached_content
from tenancy.types import Identity

PREFIX = "cachedContents/"


def retention_until(expires_ms: int, now_ms: int) -> Retention:
    """Return the retention of stored content: promised until it expires, reads do not extend it."""
    left_s = max(0.0, (expires_ms - now_ms) / 1000)
    return Retention(RESOURCE, left_s, left_s, "absolute", renewed_on_read=False, pinned=True)


async def load_cached_content(
    gateway: Context, name: str, identity: Identity, share: BodyShare
) -> tuple[CachedContentRecord, Prompt]:
    """Load a live resource of this identity's workspace and its stored prompt.

    Runs in threads, because the database may be remote and the content large; its bytes are taken
    from `share` before they are decoded. Raises Refusal if the resource does not exist or belongs
    to another workspace, and without room; StoreError.
    """
    tenant_id = identity.tenant.tenant_id
    asked = tenant_id, identity.workspace, name.removeprefix(PREFIX), gateway.wall()
    found = await gateway.contents.ask(lambda store: find_cached_content(store, *asked), tenant_id)
    if found is None:
        message = f"Cached content not found: {name[:80]}."
        raise Refusal(Kind.PERMISSION, "cached_content_not_found", message, param="cachedContent")
    record, content = found
    share.take(len(content))

    def decode(_is_abandoned: Callable[[], bool]) -> Prompt:
        return msgspec.msgpack.decode(content, type=Prompt)

    return record, await gateway.preparations.run(tenant_id, decode)


async def expand_cached_content(
    gateway: Context, model: ServedModel, prompt: Prompt, identity: Identity, share: BodyShare
) -> tuple[Prompt, Retention]:
    """Return the full prompt and the retention of its stored part.

    Raises Refusal for content of another model than `model`: its tokens differ.
    """
    resource, stored = await load_cached_content(gateway, prompt.resource, identity, share)
    owner = gateway.models.by_name.get(resource.model)
    if owner is not model:
        fact = "which is not served" if owner is None else f"not to {model.name}"
        message = f"The cached content belongs to the model {resource.model}, {fact}."
        raise Refusal(Kind.BAD, "invalid_value", message, param="cachedContent")
    return join_prompts(stored, prompt), retention_until(resource.expires_ms, gateway.wall())


def join_prompts(stored: Prompt, sent: Prompt) -> Prompt:
    """Join the stored prompt, with a breakpoint at its end, and the prompt that was sent."""
    start = with_breakpoint(stored)
    after = 1 + max((part.message for part in start.segments), default=-1)
    rest = tuple(_renumber(part, after) for part in sent.segments)
    return replace(
        sent,
        segments=start.segments + rest,
        tools=start.tools,
        tool_choice=start.tool_choice,
        resource="",
    )


def with_breakpoint(stored: Prompt) -> Prompt:
    """Add the breakpoint that keeps the content: after its last segment, or its last tool."""
    if stored.segments:
        last = replace(stored.segments[-1], retention=RESOURCE)
        return replace(stored, segments=(*stored.segments[:-1], last))
    tool = replace(stored.tools[-1], retention=RESOURCE)
    return replace(stored, tools=(*stored.tools[:-1], tool))


def _renumber(part: Segment, by: int) -> Segment:
    return replace(part, message=part.message + by)
