"""Shapes of responses that no handler has as a struct, for the OpenAPI documents.

Handlers build these bodies as dictionaries. Tests hold what the handlers answer against the
documents, so a field that changes there has to change here. Answers may have more fields.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from tenancy.types import AtRest, Fidelity, Limits


class TenantAnswer(Struct, frozen=True):
    """A tenant. Limits in blocks, requests or tokens; null for no limit. `created`: RFC 3339.

    `floor_blocks_kept`: the guaranteed part of `floor_blocks`; null without an engine.
    """

    name: str
    tenant_id: int
    status: Literal["active", "suspended"]
    declared: bool
    created: str
    tier: str
    floor_blocks: int
    floor_blocks_kept: int | None
    ceiling_blocks: int | None
    weight: float
    priority: int
    classes: tuple[str, ...] | None
    default_class: str | None
    fidelity: Fidelity
    at_rest: AtRest
    attention: str
    promised_blocks_max: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    input_tokens_per_minute: int | None
    output_tokens_per_minute: int | None
    requests_at_once: int | None


class TenantSummary(Struct, frozen=True):
    """What a tenant may do now, and why not, as its state says in full. `reasons`: sentences.
    `top_code`: the most frequent error of the refused requests; null without one."""

    status: Literal["ok", "limited", "over_budget", "suspended"]
    reasons: list[str]
    refused_last_hour: int
    top_code: str | None


class ListedTenant(TenantAnswer, frozen=True, kw_only=True):
    """A tenant of a list."""

    state: TenantSummary


class TenantPage(Struct, frozen=True):
    """Tenants by name. `has_more`: ask again with `after`, the last name."""

    tenants: list[ListedTenant]
    has_more: bool


class TenantDeleted(Struct, frozen=True):
    """A deleted tenant and the pseudonym of its ledger entries."""

    name: str
    deleted: Literal[True]
    pseudonym: str | None


class KeyAnswer(Struct, frozen=True):
    """A key without its secret. `shown`: its prefix. Times: RFC 3339."""

    key_id: int
    shown: str
    tenant: str | None
    workspace: str | None
    label: str
    scopes: tuple[str, ...]
    limits: Limits
    tolerance: str | None
    cache_key: str | None
    replaced_by: int | None
    declared: bool
    created: str | None
    expires: str | None
    revoked: str | None


class NewKeyAnswer(KeyAnswer, frozen=True, kw_only=True):
    """A created key. `key`: the secret, which no later response shows."""

    key: str
    replaces: KeyAnswer | None = None


class KeyPage(Struct, frozen=True):
    """Keys by number. `has_more`: ask again with `after`, the last number."""

    keys: list[KeyAnswer]
    has_more: bool


class ScopeAnswer(Struct, frozen=True):
    """A cache that tenants share. `created`: RFC 3339."""

    name: str
    scope_id: int
    owner: str
    members: tuple[str, ...]
    declared: bool
    created: str


class ScopeList(Struct, frozen=True):
    """All shared scopes."""

    shared_scopes: list[ScopeAnswer]


class ScopeRemoved(Struct, frozen=True):
    """A removed shared scope."""

    name: str
    removed: Literal[True]


class WindowAnswer(Struct, frozen=True):
    """The time window [since, until), RFC 3339."""

    since: str
    until: str


class UsageCounts(Struct, frozen=True):
    """Sums of ledger entries. Money: exact decimal dollars, as strings. `host_cached_tokens`,
    `disk_cached_tokens`, `remote_cached_tokens`: the parts of `physical_cached_tokens` that were
    loaded from there."""

    requests: int
    prompt_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    fresh_tokens: int
    output_tokens: int
    physical_cached_tokens: int
    host_cached_tokens: int
    disk_cached_tokens: int
    remote_cached_tokens: int
    hit_ratio: float | None
    charge_usd: str
    saved_usd: str
    adjusted_usd: str


class UsageAnswer(Struct, frozen=True, omit_defaults=True):
    """A usage report. `rows`: one per group; they have the group's values and the counts.

    `storage`: of one tenant, by retention class. `tenant`, `budgets`: of the tenant that asks.
    """

    ledger_epoch: int
    window: WindowAnswer
    group_by: tuple[str, ...]
    totals: UsageCounts
    rows: list[dict[str, Any]]
    storage: list[dict[str, Any]] | None = None
    tenant: str | None = None
    budgets: list[dict[str, Any]] | None = None


class ErasedLevelAnswer(Struct, frozen=True):
    """What an erasure took from a level. `shredded`: gone, and the key with which it was sealed is
    destroyed. `pending`: the level has not confirmed it yet; the server tries again each minute."""

    blocks: int
    bytes: int
    state: Literal["gone", "shredded", "pending"]


class ReceiptAnswer(Struct, frozen=True):
    """The receipt of an erasure. `at`: RFC 3339. `levels`: by name; null in old receipts."""

    receipt_id: str
    at: str
    what: str
    blocks: int
    levels: dict[str, ErasedLevelAnswer] | None
    embeddings: int
    namespaces: int
    namespace_digest: str
    key_id: int | None


class ErasureAnswer(ReceiptAnswer, frozen=True, kw_only=True, omit_defaults=True):
    """The receipt of an administrator's erasure, and whose cache it was."""

    tenant: str
    shared_scope: str | None = None


class ReceiptList(Struct, frozen=True):
    """Receipts, newest first."""

    erasures: list[ReceiptAnswer]


class RateCardAnswer(Struct, frozen=True):
    """A version of a rate card. Prices: micro-dollars per million tokens."""

    rate_card_id: str
    name: str
    model: str
    tier: str
    input: int
    output: int
    cache_read: int
    cache_write: dict[str, int]
    storage: dict[str, int]
    minimum_charge: int
    currency: str
    valid_from_ms: int
    valid_until_ms: int | None
    version: int
    breach_credit: str


class RateCardList(Struct, frozen=True):
    """All versions of all rate cards."""

    rate_cards: list[RateCardAnswer]


class BudgetList(Struct, frozen=True):
    """Budgets, with the spent and reserved amounts of their current windows."""

    budgets: list[dict[str, Any]]


class AuditRow(Struct, frozen=True):
    """A change. `before`, `after`: the values that differ. `at`: RFC 3339."""

    audit_id: int
    at: str
    actor: str
    actor_id: str
    address: str | None
    action: str
    tenant: str | None
    tenant_id: int | None
    target: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class AuditPage(Struct, frozen=True):
    """Changes, newest first. `next_before`: the `before` of the next page; null at the end."""

    changes: list[AuditRow]
    next_before: int | None


class FindingList(Struct, frozen=True):
    """Findings, the most expensive first, and the window that they are of.

    `has_more`: there are more findings than an answer has. `pace`: of what savings in a month are
    computed, in words; `window.observed_ms` is the length of time behind it.
    """

    findings: list[dict[str, Any]]
    has_more: bool
    window: dict[str, int]
    pace: str


class WebhookList(Struct, frozen=True):
    """The configured webhooks and their latest deliveries."""

    webhooks: list[dict[str, Any]]
    deliveries: list[dict[str, Any]]


class WebhookTested(Struct, frozen=True):
    """A test event that is on its way."""

    webhook: str
    event_id: str


class AdministratorAnswer(Struct, frozen=True):
    """The asking administrator, its scopes, and the server."""

    actor: str
    actor_id: str
    label: str
    scopes: list[str]
    server: dict[str, Any]


class HealthAnswer(Struct, frozen=True, omit_defaults=True):
    """A probe's answer. `reason`: why requests are not taken."""

    status: str
    reason: str | None = None
    engine: str | None = None


class QuoteAnswer(Struct, frozen=True):
    """What a request would read, write and compute now. Prices: pico-dollars."""

    object: Literal["cache.quote"]
    model: str
    prompt_tokens: int
    read: dict[str, int]
    write: dict[str, int]
    fresh_tokens: int
    promise: dict[str, Any] | None
    physical: dict[str, Any]
    miss: dict[str, Any] | None
    first_token_s: float | None
    price: dict[str, Any]


class CacheAnswer(Struct, frozen=True):
    """A workspace's blocks, tokens, bytes and leases, and the tenant's usage and bytes by level.

    `levels`: `used_bytes` and `promised_bytes` of all the tenant's workspaces, by level below the
    device; empty if there is none.
    """

    tenant: str
    workspace: str
    shared_scope: str | None
    blocks: int
    pinned_blocks: int
    promised_blocks: int
    tokens: int
    bytes: int
    levels: dict[str, dict[str, int]]
    policy: dict[str, Any]
    leases: list[dict[str, Any]]
    has_more_leases: bool
    usage: dict[str, Any]
    erasures: list[ReceiptAnswer]
