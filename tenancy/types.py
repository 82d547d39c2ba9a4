"""Tenancy's values: tenants, workspaces, keys, policies, usage. All frozen, all plain.

It knows nothing of the engine, of HTTP or of dialects. Money is whole numbers: prices in micro-
dollars per million tokens, charges in pico-dollars. Times are wall-clock milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

from msgspec import Struct

WallClock = Callable[[], int]
"""Milliseconds since the epoch, UTC."""


def format_utc(at_ms: object) -> str:
    """ISO 8601 in UTC, to the millisecond."""
    assert isinstance(at_ms, int), "times are whole milliseconds"
    at = datetime.fromtimestamp(at_ms // 1000, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at_ms % 1000:03}Z"


Status = Literal["active", "suspended"]


class Tenant(Struct, frozen=True, forbid_unknown_fields=True):
    """A paying party. `name` is unique, printable, at most 64 signs of [a-z0-9-_.].

    `tier`: which rate cards and defaults apply to it; a name like a tenant's. `is_declared`: the
    configuration file says what it is.
    """

    tenant_id: int
    name: str
    status: Status
    created_ms: int
    tier: str = "standard"
    is_declared: bool = False


class CachePolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant's share of the cache and of service, in the engine's terms but without its types.

    `classes`: the retention classes it may ask for; None is all there are. `promised_blocks_max`:
    how many blocks may be promised to it at once; None is as many as the engine grants.
    """

    floor_blocks: int = 0
    ceiling_blocks: int | None = None
    weight: float = 1.0
    priority: int = 0
    classes: tuple[str, ...] | None = None
    promised_blocks_max: int | None = None


class Limits(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How much a tenant or a key may ask for in a minute, and at once. None is no limit.

    `input_tokens_per_minute` counts prompt tokens that are not read from the cache,
    `tokens_per_minute` these and the output.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    requests_at_once: int | None = None


class TenantSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that can be set of a tenant: its tier, its `CachePolicy` and its `Limits`, in one level,
    as the configuration file, the admin API and the command line say them."""

    tier: str = "standard"
    floor_blocks: int = 0
    ceiling_blocks: int | None = None
    weight: float = 1.0
    priority: int = 0
    classes: tuple[str, ...] | None = None
    promised_blocks_max: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    requests_at_once: int | None = None

    @property
    def policy(self) -> CachePolicy:
        """Its share of the cache and of service."""
        return CachePolicy(
            floor_blocks=self.floor_blocks,
            ceiling_blocks=self.ceiling_blocks,
            weight=self.weight,
            priority=self.priority,
            classes=self.classes,
            promised_blocks_max=self.promised_blocks_max,
        )

    @property
    def limits(self) -> Limits:
        """How much it may ask for."""
        return Limits(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            input_tokens_per_minute=self.input_tokens_per_minute,
            output_tokens_per_minute=self.output_tokens_per_minute,
            requests_at_once=self.requests_at_once,
        )


class SharedScope(Struct, frozen=True, forbid_unknown_fields=True):
    """A cache that several tenants share. `owner_id`: the tenant that pays for its storage, and by
    whose `policy` its blocks are bounded."""

    scope_id: int
    name: str
    owner_id: int
    policy: CachePolicy


class Identity(Struct, frozen=True, forbid_unknown_fields=True):
    """Who is asking, as far as a valid key proves it. `line_id`: the first key of those that it was
    rotated from, or its own; they share what is counted by key. `limits` are the tenant's. `scope`:
    where the workspace's cache is, if others share it."""

    tenant: Tenant
    workspace: str
    key_id: int
    line_id: int
    policy: CachePolicy
    scopes: frozenset[str] = frozenset({"inference"})
    limits: Limits = Limits()
    key_limits: Limits = Limits()
    scope: SharedScope | None = None

    @property
    def blocks_policy(self) -> CachePolicy:
        """What bounds the blocks of its cache: its own, or that of the owner of a shared one."""
        return self.policy if self.scope is None else self.scope.policy


FREE = "free"
"""The rate card that holds where none is set: everything costs nothing."""


class UsageEntry(Struct, frozen=True, forbid_unknown_fields=True, tag="entry"):
    """One ledger entry: what one request used, for ever, exactly once per request id.

    `read` and `write` are the cache's tokens by retention class; where one is empty only its sum is
    known. `epoch`: the engine's life in which it ran. `recomputed_promised_tokens`: read by
    contract, but computed again. `ttft_ms`: to the first token. The ledger itself fills in
    `rate_card_id` and the two sums of money: `charge_pico`, and `saved_pico`, by which the prompt
    was cheaper than if nothing of it had been cached (below zero where writing cost more).
    """

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
    read: dict[str, int] = {}
    write: dict[str, int] = {}
    workspace: str = "default"
    tier: str = "standard"
    dialect: str = ""
    recomputed_promised_tokens: int = 0
    ttft_ms: int | None = None
    epoch: str = ""
    rate_card_id: str = FREE
    charge_pico: int = 0
    saved_pico: int = 0


DAY_MS = 86_400_000
