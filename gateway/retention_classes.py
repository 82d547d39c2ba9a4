"""Settings of caching contracts: retention classes and cache profiles.

A retention class says how long a prefix is promised and when it may no longer be matched. A cache
profile says how a dialect's answers count reads. Dialects name classes; `gateway.caching` applies
both. The module knows no dialect and no engine state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta, Struct

from engine.api import Retention
from tenancy.errors import BadName, BadPrice
from tenancy.pricing.charges import ANY, RateCard
from tenancy.reuse.advice import ClassTerms
from tenancy.types import CacheKeyMode, TenantSettings

RESOURCE = "resource"
"""The class of cached contents: it expires with its content and cannot be requested by name."""

BEST_EFFORT = "best_effort"
"""The class of blocks that are kept without a promise, where storage is counted by class."""

Seconds = Annotated[float, Meta(ge=0, le=366 * 86_400)]


class RetentionClass(Struct, frozen=True, forbid_unknown_fields=True):
    """A retention class; see `engine.api.Retention` for the meaning of the fields."""

    promise_s: Seconds = 0.0
    limit_s: Seconds | None = None
    clock: Literal["request_start", "last_use", "absolute"] = "last_use"
    renewed_on_read: bool = True
    pinned: bool = False

    def retention(self, name: str) -> Retention:
        """Return the engine's form of this class."""
        return Retention(
            name, self.promise_s, self.limit_s, self.clock, self.renewed_on_read, self.pinned
        )


class CacheProfile(Struct, frozen=True, forbid_unknown_fields=True):
    """How one dialect's answers count."""

    lookup: Literal["longest", "written"] = "longest"
    """What a call without its own setting reads: "longest": everything cached; "written": prefixes
    that an earlier call wrote at a breakpoint."""
    min_tokens: Annotated[int, Meta(ge=0, le=2**31)] = 0
    """Shorter prefixes are neither read nor written."""
    granularity: Annotated[int, Meta(ge=1, le=2**20)] = 1
    """Reads are reported in multiples of it."""
    reports_writes: bool = True
    """False counts writes as computed tokens."""


def default_classes() -> dict[str, RetentionClass]:
    """Return the hosted APIs' classes: four promises and two limits."""
    return {
        "5m": RetentionClass(300, 300, "request_start"),
        "1h": RetentionClass(3_600, 3_600, "request_start"),
        "30m": RetentionClass(1_800),
        "12h": RetentionClass(43_200),
        "in_memory": RetentionClass(0, 600),
        "24h": RetentionClass(0, 86_400),
    }


_CLASSES = default_classes()


class CachingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Caching settings. `classes` and `profiles` (by family) extend or replace the built-in ones.

    A hint separates nothing: agents send their session's id, and their sessions begin alike.

    `fingerprints_max` and `fingerprint_life_s`: prompts kept (as digests) to explain misses of
    later ones. `resources_per_tenant_max`, `resource_bytes_per_tenant_max`: number and total size
    of a tenant's cached contents.
    """

    classes: dict[str, RetentionClass] = {}
    profiles: dict[str, CacheProfile] = {}
    cache_key: CacheKeyMode = "hint"
    """What the field `prompt_cache_key` means, unless the request's key says otherwise."""
    honour_broken_promises: bool = True
    """A promised prefix that was lost is still billed as read; the operator pays for the
    recomputation."""
    promised_share_default: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """The share of the promisable blocks that a tenant without `promised_blocks_max` may promise
    itself beside other tenants."""
    promised_together_default: Annotated[float, Meta(gt=0, le=1)] = 0.75
    """The share up to which all promises together leave room for those of such tenants."""
    entries_max: Annotated[int, Meta(ge=1, le=2**24)] = 200_000
    """Written prefixes indexed."""
    entries_per_tenant_max: Annotated[int, Meta(ge=1, le=2**24)] = 20_000
    """Entries of one tenant."""
    fingerprints_max: Annotated[int, Meta(ge=0, le=2**24)] = 20_000
    fingerprint_life_s: Seconds = 3_600.0
    resources_per_tenant_max: Annotated[int, Meta(ge=0, le=2**20)] = 1_000
    resource_bytes_per_tenant_max: Annotated[int, Meta(ge=0, le=2**40)] = 256 * 2**20

    def all_classes(self) -> dict[str, RetentionClass]:
        """Return all classes by name."""
        return {**default_classes(), **self.classes}

    def kept(self) -> dict[str, ClassTerms]:
        """Return how long each class keeps unused blocks, and the class of their storage."""
        return {
            name: ClassTerms(
                terms.promise_s if terms.limit_s is None else terms.limit_s,
                name if terms.promise_s > 0 else BEST_EFFORT,
            )
            for name, terms in self.all_classes().items()
        }

    def check_classes(self, names: Iterable[str]) -> None:
        """Check class names. Raises BadName for an unknown class: a typo would silently promise
        nothing."""
        if message := self._unknown(names, ()):
            raise BadName("retention_unknown", message)

    def check_settings(self, settings: TenantSettings) -> None:
        """Check the classes of a tenant's settings. Raises BadName."""
        default = settings.default_class
        self.check_classes([*(settings.classes or ()), *([] if default is None else [default])])

    def check_card(self, card: RateCard) -> None:
        """Check a rate card. Raises BadPrice for a price of an unknown class: no usage would match
        it."""
        message = self._unknown(card.cache_write, (ANY, RESOURCE))
        message = message or self._unknown(card.storage, (ANY, RESOURCE, BEST_EFFORT))
        if message:
            raise BadPrice("retention_unknown", message)

    def _unknown(self, names: Iterable[str], more: Iterable[str]) -> str:
        known = sorted({*self.all_classes(), *more})
        for name in names:
            if name not in known:
                return f"unknown retention class {name[:80]!r}; expected one of: {', '.join(known)}"
        return ""

    def retention(self, name: str) -> Retention | None:
        """Return the class of that name, or None."""
        found = self.classes.get(name) or _CLASSES.get(name)
        return None if found is None else found.retention(name)
