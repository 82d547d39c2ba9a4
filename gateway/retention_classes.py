"""What a caching contract is made of: retention classes and profiles, as settings.

A retention class says how long a prefix is promised and when it may no longer be matched; a profile
says how a dialect's answers count what was read. Dialects name classes, `gateway.retention` applies
both. It knows no dialect and no engine state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta, Struct

from engine.api import Retention
from tenancy.errors import BadName, BadPrice
from tenancy.pricing.charges import ANY, RateCard
from tenancy.reuse.advice import Kept

RESOURCE = "resource"
"""What cached contents are held in: of their own expiry, and not to be asked for by name."""

BEST_EFFORT = "best_effort"
"""What is held without a promise, where storage is counted by class."""

Seconds = Annotated[float, Meta(ge=0, le=366 * 86_400)]


class RetentionClass(Struct, frozen=True, forbid_unknown_fields=True):
    """A row of the table of classes; see `engine.api.Retention` for what the fields mean."""

    promise_s: Seconds = 0.0
    limit_s: Seconds | None = None
    clock: Literal["request_start", "last_use", "absolute"] = "last_use"
    renewed_on_read: bool = True
    pinned: bool = False

    def retention(self, name: str) -> Retention:
        """In the engine's terms."""
        return Retention(
            name, self.promise_s, self.limit_s, self.clock, self.renewed_on_read, self.pinned
        )


class CacheProfile(Struct, frozen=True, forbid_unknown_fields=True):
    """How one dialect's answers count.

    `lookup`: what is read where a call does not say: "longest" whatever is there, "written" what an
    earlier call wrote at a breakpoint. `min_tokens`: shorter prefixes are neither read nor written.
    `granularity`: what was read is reported in multiples of it. `reports_writes`: false folds
    writes into the tokens that were simply computed.
    """

    lookup: Literal["longest", "written"] = "longest"
    min_tokens: Annotated[int, Meta(ge=0, le=2**31)] = 0
    granularity: Annotated[int, Meta(ge=1, le=2**20)] = 1
    reports_writes: bool = True


def default_classes() -> dict[str, RetentionClass]:
    """The hosted APIs' classes: Anthropic's two, OpenAI's two promises and two limits."""
    return {
        "5m": RetentionClass(300, 300, "request_start"),
        "1h": RetentionClass(3_600, 3_600, "request_start"),
        "30m": RetentionClass(1_800),
        "12h": RetentionClass(43_200),
        "in_memory": RetentionClass(0, 600),
        "24h": RetentionClass(0, 86_400),
    }


def default_profiles() -> dict[str, CacheProfile]:
    """Token-exact reporting and no minimum: what is read is what is said."""
    return {
        "openai": CacheProfile(),
        "anthropic": CacheProfile(lookup="written"),
        "gemini": CacheProfile(),
    }


_CLASSES, _PROFILES = default_classes(), default_profiles()


class CachingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`classes` and `profiles` given in a file are added to the built-in ones, or replace them.

    `honour_broken_promises`: a prefix that was promised and lost is still billed as read, and what
    it cost to compute again is the operator's. `entries_max`: written prefixes remembered;
    `entries_per_tenant_max`: of one tenant. `fingerprints_max` and `fingerprint_life_s`: prompts
    remembered (as digests) to explain the misses of later ones. `resources_per_tenant_max`,
    `resource_bytes_per_tenant_max`: cached contents kept at once, and the size of what is stored.
    """

    classes: dict[str, RetentionClass] = {}
    profiles: dict[str, CacheProfile] = {}
    honour_broken_promises: bool = True
    entries_max: Annotated[int, Meta(ge=1, le=2**24)] = 200_000
    entries_per_tenant_max: Annotated[int, Meta(ge=1, le=2**24)] = 20_000
    fingerprints_max: Annotated[int, Meta(ge=0, le=2**24)] = 20_000
    fingerprint_life_s: Seconds = 3_600.0
    resources_per_tenant_max: Annotated[int, Meta(ge=0, le=2**20)] = 1_000
    resource_bytes_per_tenant_max: Annotated[int, Meta(ge=0, le=2**40)] = 256 * 2**20

    def all_classes(self) -> dict[str, RetentionClass]:
        """By name."""
        return {**default_classes(), **self.classes}

    def kept(self) -> dict[str, Kept]:
        """For how long each class keeps what is not used again, and what its storage counts as."""
        return {
            name: Kept(
                terms.promise_s if terms.limit_s is None else terms.limit_s,
                name if terms.promise_s > 0 else BEST_EFFORT,
            )
            for name, terms in self.all_classes().items()
        }

    def check_classes(self, names: Iterable[str]) -> None:
        """Raises BadName for one that is no class here: a slip of the pen would promise nothing,
        without a word."""
        if message := self._unknown(names, ()):
            raise BadName("retention_unknown", message)

    def check_card(self, card: RateCard) -> None:
        """Raises BadPrice for a price of a class that there is not: nobody would pay it."""
        message = self._unknown(card.cache_write, (ANY, RESOURCE))
        message = message or self._unknown(card.storage, (ANY, RESOURCE, BEST_EFFORT))
        if message:
            raise BadPrice("retention_unknown", message)

    def _unknown(self, names: Iterable[str], more: Iterable[str]) -> str:
        known = sorted({*self.all_classes(), *more})
        for name in names:
            if name not in known:
                return f"there is no retention class {name[:80]!r} (there are: {', '.join(known)})"
        return ""

    def retention(self, name: str) -> Retention | None:
        """The class of that name."""
        found = self.classes.get(name) or _CLASSES.get(name)
        return None if found is None else found.retention(name)

    def profile(self, name: str) -> CacheProfile:
        """The profile of that name; dialects name only built-in ones."""
        return self.profiles.get(name) or _PROFILES[name]
