"""Explain why a prompt was computed, or paid for, again: once, for all that show it.

A prompt is compared with the tenant's earlier ones (`tenancy.reuse.prompt_changes`). Its miss cause
is what the comparison, the contract and the levels say together, with the place, and the tokens
that cost (`tenancy.reuse.miss_causes`). Causes hold names of fields, numbers and request ids; never
tokens or text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from msgspec import structs

from gateway.analytics.completed_prompt import CompletedPrompt, PromptContext
from gateway.caching.namespaces import parts_of as namespace_parts
from gateway.dialects.canonical import Boundary, UsageRecord
from gateway.retention_classes import BEST_EFFORT
from tenancy.reuse.advice import ClassTerms
from tenancy.reuse.finding_counts import WORKING_SET
from tenancy.reuse.miss_causes import FIRST_USE, WRITE, WRITTEN_NEVER_READ, MissCause
from tenancy.reuse.prompt_changes import (
    LOST_TOKENS_MIN,
    PromptPart,
    PromptReuse,
    Tier,
    fold_indexes,
    parts_of,
)
from tenancy.types import HOUR_MS

LOST_PREFIXES_MAX = 1_024
"""Lost prefixes of one tenant and hour that are counted, each once."""

HEAD = "head:"
"""Prefix of the facts of `FIRST_USE` that name a beginning by its digest, with the tokens that were
computed for it and that no other cause counts."""

OTHER_TOOLS = "other_tools"
"""The fact that counts changes of the tools by which some were added, left out or replaced."""

KEPT_BY = "kept_by:"
"""Prefix of the facts that name a retention class which would have kept a lost prefix."""

NEW_CONVERSATION = "new_conversation"

EVICTED = "evicted_"
"""Prefix of the facts that say by which rule a prefix was evicted, as the engine names it."""

READ_BACK = "read_back_tokens"
"""The fact of `WRITTEN_NEVER_READ` that counts the tokens that were read of what had been
written."""

CONTRACT_CAUSES = {
    "expired": "expired",
    "evicted_own_quota": "evicted",
    "evicted_pressure": "evicted",
    "restarted": "restarted",
    "damaged": "damaged",
    "level_failed": "level_failed",
    "below_minimum": "below_minimum",
    "state_gap": "state_gap",
    "model": "model_changed",
    "template": "template_changed",
}
"""Causes by the cause that a contract gives for a miss."""

LEVEL_FAULTS = frozenset({"damaged", "level_failed"})
"""Causes by which a level below the device failed to bring what it had."""


Make = Callable[..., MissCause]
"""Makes a cause of the prompt at hand: of its name, place, wasted tokens and facts."""


class PromptFindings:
    """Explains the misses of all tenants of a gateway. Belongs to one thread."""

    def __init__(self, classes: Mapping[str, ClassTerms]) -> None:
        self._classes = [
            (terms.seconds, name) for name, terms in classes.items() if terms.held_as == name
        ]
        self._lost_at, self._lost = 0, dict[tuple[int, str], set[int]]()
        """The hour, and the lost prefixes of each tenant and model in it."""

    def explain(
        self, completed: CompletedPrompt, context: PromptContext, reuse: PromptReuse, at_ms: int
    ) -> list[MissCause]:
        """Return the causes that a prompt adds to: first the one that costs, if any, which is that
        of the request; then the legitimate ones, and those of sums.

        A promise that a death broke comes first, since the operator pays for it. What the request
        shows comes before what the contract says, and that before what only the comparison with
        earlier prompts (`reuse`) shows.
        """
        record = completed.record
        make = partial(
            MissCause, context.request_id, completed.tenant_id, completed.model, at_ms=at_ms
        )
        waste = (
            _broken_promise(make, record, context)
            or _change(make, record, reuse)
            or _contract_waste(make, completed, reuse)
            or _other_key(make, record, reuse)
        )
        # A cause of the request's own explains what is new.
        is_new = waste is None and reuse.is_new_conversation
        waste = waste or _past_waste(make, record, context, reuse)
        found = [] if waste is None else [self._with_facts(waste, record, context, reuse)]
        found += [make(NEW_CONVERSATION, "", 0)] if is_new else []
        found += _writes(make, record, waste)
        found += _first_use(make, context, record, reuse, is_counted=waste is not None)
        return found

    def _with_facts(
        self, waste: MissCause, record: UsageRecord, context: PromptContext, reuse: PromptReuse
    ) -> MissCause:
        """Return a cause that costs with the facts that its words and its price need."""
        place, facts = waste.place, dict(waste.facts)
        match waste.cause:
            case "expired":
                place, idle_s = next(iter(record.write), ""), reuse.idle_s
                if idle_s:
                    facts = {f"{KEPT_BY}{name}": 1 for s, name in self._classes if s >= idle_s}
                    facts["idle_s"] = round(idle_s)
            case "evicted":
                facts |= self._working_set(waste, reuse, context.quota_scale)
            case "below_minimum":
                facts["min_tokens"] = context.min_tokens
            case "promise_broken":
                return waste  # its tokens were charged as read
            case _:
                pass
        facts |= _charged_as_written(record, waste.wasted_tokens)
        return structs.replace(waste, place=place, facts=facts)

    def _working_set(self, waste: MissCause, reuse: PromptReuse, scale: float) -> dict[str, int]:
        """Return the tokens of a lost prefix that is the first loss of it in this hour: their sum
        is what a floor must hold before it is multiplied by `scale`. Each model has a cache of its
        own, so each counts its own."""
        if self._lost_at != waste.at_ms // HOUR_MS:
            self._lost, self._lost_at = {}, waste.at_ms // HOUR_MS
        lost = self._lost.setdefault((waste.tenant_id, waste.model), set())
        if reuse.known_digest in lost or len(lost) >= LOST_PREFIXES_MAX:
            return {}
        lost.add(reuse.known_digest)
        return {WORKING_SET: math.ceil(reuse.known / scale)}


def _broken_promise(make: Make, record: UsageRecord, context: PromptContext) -> MissCause | None:
    """Return the promised tokens that went with an engine, or None. The place is their class."""
    if not context.is_broken_by_death:
        return None
    return make("promise_broken", next(iter(record.read), ""), record.recomputed_promised)


def _contract_waste(make: Make, completed: CompletedPrompt, reuse: PromptReuse) -> MissCause | None:
    """Return what the contract says, or None."""
    record, tokens = completed.record, completed.missed_tokens
    cause = CONTRACT_CAUSES.get(completed.missed)
    if cause is None:
        return None
    if cause == "below_minimum":
        tokens = reuse.known
    elif cause in ("model_changed", "template_changed"):
        tokens = record.total_in - record.physical_cached
    return make(cause, "", tokens, _evictions([completed.missed]))


def _past_waste(
    make: Make, record: UsageRecord, context: PromptContext, reuse: PromptReuse
) -> MissCause | None:
    """Return what only the comparison with earlier prompts shows, or None."""
    unread = min(reuse.known, record.total_in - 1) - record.read_tokens()
    if context.is_unmarked and unread >= max(LOST_TOKENS_MIN, context.min_tokens):
        return make("unmarked", "", unread)
    if reuse.lost and "erased" not in reuse.lost_by:
        cause = "expired" if set(reuse.lost_by) == {"expired"} else "evicted"
        cause = "restarted" if "restarted" in reuse.lost_by else cause
        cause = context.level_miss if context.level_miss in LEVEL_FAULTS else cause
        facts = _evictions(reuse.lost_by) if cause == "evicted" else {}
        return make(cause, "", reuse.lost, facts)
    if LOST_TOKENS_MIN <= reuse.known < context.min_tokens and not record.read_tokens():
        return make("below_minimum", "", reuse.known)
    return None


def _evictions(lost_by: Iterable[str]) -> dict[str, int]:
    return {name: 1 for name in lost_by if name.startswith(EVICTED)}


def _change(make: Make, record: UsageRecord, reuse: PromptReuse) -> MissCause | None:
    """Return the tokens that a change in the prompt cost; None for a prompt that only differs.

    A change of the tools or the system text also costs what comes before it, if breakpoints come
    only behind it: the prefix is written again and again, and never read.
    """
    change = reuse.divergence
    if change is None:
        return None
    computed = record.total_in - record.physical_cached
    tokens = min(change.repeated, computed) if change.is_repetition else 0
    if record.write and not change.cause.startswith(("history", "prompt")):
        unread = change.shared - record.read_tokens()
        if unread >= LOST_TOKENS_MIN:
            tokens = min(tokens + unread, record.total_in - record.read_tokens())
    if tokens < LOST_TOKENS_MIN:
        return None
    facts = {
        "at": change.at,
        "part_tokens": change.part_tokens,
        "changed": change.changed,
        "shortened": int(change.is_shortened),
        "behind": int(change.is_repetition),
        OTHER_TOOLS: int(change.has_other_tools),
    }
    return make(change.cause, fold_indexes(change.path), tokens, facts)


def _charged_as_written(record: UsageRecord, tokens: int) -> dict[str, int]:
    """Return the facts that say how many of a prompt's wasted tokens were charged as written, by
    class: what is written comes before what is fresh."""
    found = {}
    for name, written in record.write.items():
        if charged := min(written, tokens):
            found[f"{WRITE}{name}"] = charged
        tokens -= charged
    return found


def _writes(make: Make, record: UsageRecord, waste: MissCause | None) -> list[MissCause]:
    """Return what a prompt wrote, unless another cause explains why it was written again, and what
    it read of what had been written."""
    written, kept = record.write_tokens(), record.read_tokens() - record.read.get(BEST_EFFORT, 0)
    if waste is not None or written < LOST_TOKENS_MIN:
        written = 0
    if not written and not kept:
        return []
    facts = {READ_BACK: kept, **_charged_as_written(record, written)}
    requests = 1 if written else 0
    return [make(WRITTEN_NEVER_READ, "", written, facts, requests=requests)]


def _other_key(make: Make, record: UsageRecord, reuse: PromptReuse) -> MissCause | None:
    """Return the tokens that were computed again because the request's key for its cache is another
    one than that of earlier prompts with the same beginning."""
    unread = min(reuse.known_elsewhere, record.total_in - 1)
    tokens = unread - max(reuse.known, record.physical_cached)
    return make("cache_key_changes", "", tokens) if tokens >= LOST_TOKENS_MIN else None


def _first_use(
    make: Make,
    context: PromptContext,
    record: UsageRecord,
    reuse: PromptReuse,
    *,
    is_counted: bool,
) -> list[MissCause]:
    """Return the first use of a beginning under a model and a template: a finding if the tenant had
    another one before, which only the finding store knows. `is_counted`: as another cause."""
    if not reuse.is_new_head and not (reuse.is_new_conversation and not reuse.known):
        return []
    _, _, model, template, *_ = (*namespace_parts(context.namespace), "", "", "", "")
    computed = 0 if is_counted else record.total_in - record.physical_cached
    facts = {f"{HEAD}{context.head:x}": computed}
    return [make(FIRST_USE, f"{model}/{template}", 0, facts)]


def siblings_of(namespace: bytes) -> bytes:
    """Return what namespaces share that differ in nothing but the partition."""
    return "/".join(namespace_parts(namespace)[:-1]).encode()


def prompt_parts(boundaries: Sequence[Boundary], tokens: int) -> tuple[PromptPart, ...]:
    """Return the parts of a rendered prompt, in the order in which its template wrote them."""
    return parts_of([_mark(one) for one in boundaries], tokens)


def _mark(boundary: Boundary) -> tuple[int, str, Tier, bool]:
    is_answer = boundary.role in ("assistant", "tool") or bool(boundary.run)
    return boundary.end, boundary.path, boundary.tier, is_answer
