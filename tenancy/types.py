"""Values of tenancy: tenants, workspaces, keys, policies and usage entries, all frozen.

The module does not know the engine, HTTP or a dialect. Money is in integers: prices in
micro-dollars per million tokens, charges in pico-dollars. Times are wall-clock milliseconds. All
other modules of `tenancy`, and the gateway, use these types.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict

WallClock = Callable[[], int]
"""A function that returns milliseconds since the epoch, UTC."""


def wall_ms() -> int:
    """Return Unix milliseconds, the ledger's clock. Only what starts a program calls it; everything
    else takes a clock."""
    return time.time_ns() // 1_000_000


def format_utc(at_ms: object) -> str:
    """Format milliseconds since the epoch as ISO 8601 in UTC, to the millisecond."""
    assert isinstance(at_ms, int), "times are whole milliseconds"
    at = datetime.fromtimestamp(at_ms // 1000, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at_ms % 1000:03}Z"


Status = Literal["active", "suspended"]


ToleranceMode = Literal["standard", "strict", "lenient"]
"""How the gateway treats request fields that it does not honour."""

TOLERANCE_MODES: tuple[ToleranceMode, ...] = get_args(ToleranceMode)

CacheKeyMode = Literal["hint", "namespace"]
"""What `prompt_cache_key` means: a hint, which separates nothing, or a part of the namespace."""

CACHE_KEY_MODES: tuple[CacheKeyMode, ...] = get_args(CacheKeyMode)

Fidelity = Literal["exact", "near", "rough"]
"""How far a copy of a tenant's KV may be from what the model computed; strictest first."""

FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)

AtRest = Literal["local", "remote", "never"]
"""Where a tenant's KV may rest: on the server's disk, in its remote store too, or nowhere."""

AT_REST: tuple[AtRest, ...] = get_args(AtRest)


ATTENTION_WORDS = ("allowed", "never")
"""What a tenant's `attention` may be beside a window: its requests may ask for one, or may not."""
WINDOW_TOKENS_MIN, WINDOW_TOKENS_MAX = 64, 2**20
"""The least and the most tokens of an attention window."""
SINK_TOKENS_MAX = 2**16
"""The most sink tokens of an attention window."""


class Tenant(Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant: the paying party. `name` is unique and has 1 to 64 characters of [a-z0-9-_.].

    `tier` selects rate cards and has the form of a name.
    """

    tenant_id: int
    name: str
    status: Status
    created_ms: int
    tier: str = "standard"
    is_declared: bool = False
    """The configuration file declares the tenant and its settings."""


class CachePolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant's share of the cache and of the engine's time, without the engine's types."""

    floor_blocks: int = 0
    ceiling_blocks: int | None = None
    weight: float = 1.0
    priority: int = 0
    classes: tuple[str, ...] | None = None
    """The retention classes that the tenant may use; None allows all."""
    promised_blocks_max: int | None = None
    """How many blocks may be promised to the tenant at a time; None leaves the bound to the
    engine."""
    default_class: str | None = None
    """The class of requests that name none; None leaves it to their API."""
    fidelity: Fidelity = "exact"
    """The least strict that the tenant's requests may ask for, and what they get if they ask for
    none."""
    at_rest: AtRest = "local"
    """"local" keeps the tenant's KV on the server, "never" off its disk, too."""
    attention: str = "allowed"
    """"allowed" lets its requests ask for attention windows, "never" does not; "window=W;sinks=S"
    is the window of those that ask for nothing."""


class Limits(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rate limits of a tenant or a key per minute, and a concurrency limit. None means no limit.

    `input_tokens_per_minute` counts prompt tokens that are not read from the cache.
    `tokens_per_minute` counts these and the output tokens. `requests_at_once` is the concurrency
    limit.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    requests_at_once: int | None = None


class TenantSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of a tenant in one flat struct: tier, `CachePolicy` and `Limits`.

    The configuration file, the admin API and the command line use this form.
    """

    tier: str = "standard"
    floor_blocks: int = 0
    ceiling_blocks: int | None = None
    weight: float = 1.0
    priority: int = 0
    classes: tuple[str, ...] | None = None
    promised_blocks_max: int | None = None
    default_class: str | None = None
    fidelity: Fidelity = "exact"
    at_rest: AtRest = "local"
    attention: str = "allowed"
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    requests_at_once: int | None = None

    @property
    def policy(self) -> CachePolicy:
        """The fields of `CachePolicy`."""
        return msgspec.convert(self, CachePolicy, from_attributes=True)

    @property
    def limits(self) -> Limits:
        """The fields of `Limits`."""
        return msgspec.convert(self, Limits, from_attributes=True)


class SharedScope(Struct, frozen=True, forbid_unknown_fields=True):
    """A cache that workspaces of several tenants share.

    The tenant `owner_id` pays for the scope's storage, and its `policy` bounds the scope's blocks.
    """

    scope_id: int
    name: str
    owner_id: int
    policy: CachePolicy


class Identity(Struct, frozen=True, forbid_unknown_fields=True):
    """The tenant, workspace and rights that a valid key proves.

    `tolerance`, `cache_key`: the key's; None leaves it to the server.
    """

    tenant: Tenant
    workspace: str
    key_id: int
    line_id: int
    """The id of the first key in the rotation chain of `key_id` (or `key_id` itself); keys of one
    line share their rate limits and budgets."""
    policy: CachePolicy
    scopes: frozenset[str] = frozenset({"inference"})
    """The scopes of the key."""
    limits: Limits = Limits()
    """The tenant's."""
    key_limits: Limits = Limits()
    """The key's."""
    scope: SharedScope | None = None
    """The shared scope that holds the workspace's cache; None when the workspace shares nothing."""
    tolerance: ToleranceMode | None = None
    cache_key: CacheKeyMode | None = None

    @property
    def blocks_policy(self) -> CachePolicy:
        """The policy that bounds the blocks: the scope owner's, or the tenant's own."""
        return self.policy if self.scope is None else self.scope.policy


class TokenSums(Struct, frozen=True, kw_only=True):
    """Tokens of one request or of many, as the ledger's columns have them."""

    prompt_tokens: int = 0
    cache_read_tokens: int = 0
    """Read by contract, and charged so."""
    cache_write_tokens: int = 0
    fresh_tokens: int = 0
    """The rest of the prompt tokens."""
    output_tokens: int = 0
    physical_cached_tokens: int = 0
    """Prompt tokens that were not computed."""
    recomputed_promised_tokens: int = 0
    """Read by contract, but computed again: a broken promise."""
    host_cached_tokens: int = 0
    """The part of the cached tokens that was loaded from host memory."""
    disk_cached_tokens: int = 0
    remote_cached_tokens: int = 0


TOKEN_COLUMNS = TokenSums.__struct_fields__
LEVEL_COLUMNS = TOKEN_COLUMNS[-3:]
Count = Annotated[int, Meta(ge=0)]
"""A count of tokens, at least 0."""


class TokenCounts(Struct, frozen=True, array_like=True):
    """The tokens of one request, so far or at its end. A hold keeps them in this order."""

    read: dict[str, Count] = {}
    """Tokens by retention class, and so is `write`."""
    write: dict[str, Count] = {}
    fresh_tokens: Count = 0
    output_tokens: Count = 0
    physical_cached_tokens: Count = 0
    recomputed_promised_tokens: Count = 0
    host_cached_tokens: Count = 0
    disk_cached_tokens: Count = 0
    remote_cached_tokens: Count = 0

    def fields(self) -> dict[str, Any]:
        """Return the fields of a `UsageEntry` that count tokens."""
        read, write = sum(self.read.values()), sum(self.write.values())
        sums = {"cache_read_tokens": read, "cache_write_tokens": write}
        return {"prompt_tokens": read + write + self.fresh_tokens, **sums, **asdict(self)}


FREE = "free"
"""The id of the rate card that applies when no card matches: all usage is free."""


class UsageEntry(Struct, frozen=True, forbid_unknown_fields=True, tag="entry"):
    """One ledger entry: the usage of one request, unique by request id.

    It is a row of the ledger, with the columns of `TokenSums` in the ledger's order. The ledger
    fills in `rate_card_id`, `charge_pico` and `saved_pico`.
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
    """Tokens by retention class; empty if only the sum is known."""
    write: dict[str, int] = {}
    workspace: str = "default"
    tier: str = "standard"
    dialect: str = ""
    recomputed_promised_tokens: int = 0
    ttft_ms: int | None = None
    """Time to the first token."""
    epoch: str = ""
    """The engine process that ran the request."""
    rate_card_id: str = FREE
    charge_pico: int = 0
    saved_pico: int = 0
    """By how much caching made the prompt cheaper than plain input: below zero when writes cost
    more than reads saved."""
    host_cached_tokens: int = 0
    disk_cached_tokens: int = 0
    remote_cached_tokens: int = 0


MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000
"""Milliseconds in a minute, an hour and a day."""
LATEST_MS = 253_370_764_800_000
"""The year 9999, where the standard library's calendar ends: also the end of a promise that has
none."""
