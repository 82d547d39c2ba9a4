"""Tenancy's values: tenants, workspaces, keys, policies, usage. All frozen, all plain.

It knows nothing of the engine, of HTTP or of dialects. Money is whole numbers: prices in micro-
dollars per million tokens, charges in pico-dollars. Times are wall-clock milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

WallClock = Callable[[], int]
"""Milliseconds since the epoch, UTC."""


class Tenant(Struct, frozen=True, forbid_unknown_fields=True):
    """A paying party. `name` is unique, printable, at most 64 signs of [a-z0-9-_.]."""

    tenant_id: int
    name: str
    status: Literal["active", "suspended"]
    created_ms: int


class CachePolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant's share of the cache and of service, in the engine's terms but without its types."""

    floor_blocks: int = 0
    ceiling_blocks: int | None = None
    weight: float = 1.0
    priority: int = 0


class Identity(Struct, frozen=True, forbid_unknown_fields=True):
    """Who is asking, as far as a valid key proves it."""

    tenant: Tenant
    workspace: str
    key_id: int
    policy: CachePolicy
    scopes: frozenset[str] = frozenset({"inference"})


class UsageEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One ledger entry: what one request used, for ever, exactly once per request id."""

    request_id: str
    tenant_id: int
    key_id: int
    model: str
    ending: str
    started_ms: int
    ended_ms: int
    prompt_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    fresh_tokens: int
    output_tokens: int
    physical_cached_tokens: int
