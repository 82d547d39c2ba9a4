"""The answers about the levels of the cache, for the OpenAPI documents."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from tenancy.types import Fidelity


class LevelWorthAnswer(Struct, frozen=True):
    """Microseconds to load a token and to compute it, by measured rates. `tokens_min`: from how
    many tokens on loading is faster; null if it never is."""

    load_us_per_token: float
    compute_us_per_token: float
    tokens_min: int | None


class CopiesAnswer(Struct, frozen=True):
    """The copies of one fidelity on a level: blocks, and their bytes."""

    fidelity: Fidelity
    blocks: int
    bytes: int


class LevelAnswer(Struct, frozen=True, omit_defaults=True):
    """A level. Totals count blocks unless they say otherwise, since the engine's start. The device
    has none of the fields from `since_ms` on. `not_loaded`: prompts of which the level had more
    than was loaded, by why; `uncopied_total`: blocks that the device has evicted without a copy."""

    name: Literal["device", "host", "disk", "remote"]
    state: Literal["open", "full", "off"]
    reason: str
    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    promised_bytes: int
    blocks: int
    loaded_tokens_total: int
    since_ms: int | None = None
    worth: LevelWorthAnswer | None = None
    offloaded_total: int = 0
    loaded_total: int = 0
    stored_total: int = 0
    fetched_total: int = 0
    failed_total: int = 0
    damaged_total: int = 0
    dropped_total: int = 0
    expired_total: int = 0
    regret_s_total: float = 0.0
    bytes_per_s: float = 0.0
    written_bytes_today: int = 0
    written_bytes_total: int = 0
    chosen_total: int = 0
    declined_total: int = 0
    not_loaded: dict[str, int] = {}
    uncopied_total: int = 0
    pending_erasures: int = 0
    copies: list[CopiesAnswer] = []
    recovered_total: int = 0
    torn_total: int = 0
    orphaned_total: int = 0
    lapsed_total: int = 0
    unnoted_total: int = 0


class LevelsAnswer(Struct, frozen=True):
    """All levels. `switch_on`: the lines of the configuration that give the cache a disk, while
    there is no level below the device. `config_file`: the file that the server read at its start.
    `is_sealed`: what the disk keeps is encrypted; `remote`: the address of the store below it.
    `minutes`: by name, one value for each of the last minutes: `minute` since the epoch, tokens
    found by level, blocks moved by flow."""

    is_on: bool
    switch_on: str | None
    config_file: str | None
    folder: str | None
    is_sealed: bool
    remote: str | None
    write_bytes_per_day_max: int
    loading: int
    levels: list[LevelAnswer]
    minutes: dict[str, list[int]]
    at_ms: int


class LevelBytes(Struct, frozen=True):
    """Bytes of one tenant on one level, and the promised part of them."""

    used_bytes: int
    promised_bytes: int


class LevelTenant(Struct, frozen=True):
    """A tenant's bytes, by level."""

    tenant: str
    bytes: int
    levels: dict[str, LevelBytes]


class LevelTenants(Struct, frozen=True):
    """Tenants by their bytes, most first."""

    tenants: list[LevelTenant]
