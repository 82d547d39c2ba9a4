"""Findings: why prompts of a tenant were computed, or paid for, again; counted by hour and place.

Each finished prompt is compared with the tenant's earlier ones (`tenancy.reuse.prompt_changes`).
What it adds to a cause is counted until `take` hands the counts over to the gateway, which stores
them. The counts hold names of causes and fields, numbers and request ids; never tokens or text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from gateway.caching.namespaces import parts_of as namespace_parts
from gateway.dialects.canonical import Boundary, UsageRecord
from gateway.retention_classes import BEST_EFFORT
from tenancy.history.request_causes import RequestCause
from tenancy.reuse.advice import ClassTerms
from tenancy.reuse.finding_counts import FindingCount
from tenancy.reuse.prefix_statistics import fold_indexes
from tenancy.reuse.prompt_changes import (
    LOST_TOKENS_MIN,
    ObservedPrompt,
    PromptChanges,
    PromptPart,
    PromptReuse,
    Tier,
    ToolDigest,
    parts_of,
)
from tenancy.types import HOUR_MS

COUNTS_MAX = 4_096
"""Counts that wait to be taken; further places are not counted."""

CAUSES_MAX = 16_384
"""Causes of single requests that wait to be taken; further ones are not kept."""

LOST_PREFIXES_MAX = 1_024
"""Lost prefixes of one tenant and hour that are told apart."""
WORKING_SET = "working_set_tokens"
"""The fact that counts the tokens of different lost prefixes in one hour."""

HEAD = "head:"
"""Prefix of the facts of `FIRST_USE` that name a beginning by its digest, with the tokens that were
computed for it and that no other cause counts."""

OTHER_TOOLS = "other_tools"
"""The fact that counts changes of the tools by which some were added, left out or replaced."""

KEPT_BY = "kept_by:"
"""Prefix of the facts that name a retention class which would have kept a lost prefix."""

NEW_CONVERSATION, FIRST_USE = "new_conversation", "first_use"

WRITTEN_NEVER_READ = "written_never_read"
WRITE, READ_BACK = "write:", "read_back_tokens"
"""`WRITE`: prefix of the facts that say how many of the wasted tokens were charged as written, by
class. `READ_BACK`: the tokens that were read of what had been written."""

_NOT_OF_A_REQUEST = frozenset({FIRST_USE, WRITTEN_NEVER_READ})
"""Causes that only the sums of several requests show."""

CONTRACT_CAUSES = {
    "expired": "expired",
    "evicted_own_quota": "evicted",
    "evicted_pressure": "evicted",
    "restarted": "restarted",
    "damaged": "damaged",
    "level_failed": "level_failed",
    "below_minimum": "below_minimum",
    "model": "model_changed",
    "template": "template_changed",
}
"""Causes of findings by the cause that a contract gives for a miss."""


LEVEL_FAULTS = frozenset({"damaged", "level_failed"})
"""Causes by which a level below the device failed to bring what it had."""


class PromptContext(Struct, frozen=True, array_like=True, gc=False):
    """Where and when a prompt ran. `is_unmarked`: its dialect reads nothing without breakpoints,
    and it has none. `min_tokens`: shorter prefixes are not read. `losses`: blocks that the
    namespace has lost, by cause; None for a prompt that was cached. `started_s`: when the engine
    took it, on the gateway's clock. `model`: the name that findings give its model. `level_miss`:
    why a level below the device did not bring what it had. `tools`: digests of its tools. `head`:
    of what it begins with, the same under every model."""

    tenant_id: int
    request_id: str
    namespace: bytes
    epoch: str
    started_s: float
    is_unmarked: bool
    min_tokens: int
    losses: dict[str, int] | None
    model: str = ""
    level_miss: str = ""
    tools: tuple[ToolDigest, ...] = ()
    head: int = 0


class _Waste(Struct, frozen=True):
    """One prompt's part in a finding."""

    cause: str
    place: str
    tokens: int
    facts: dict[str, int] = {}
    requests: int = 1


class PromptFindings:
    """Counts of all tenants of a gateway. Belongs to one thread."""

    def __init__(self, key: int, tenants_max: int, classes: Mapping[str, ClassTerms]) -> None:
        """`key`: see `PromptChanges`. `tenants_max`: tenants whose prompts are kept."""
        self._key = key
        self._tenants_max = tenants_max
        self._classes = [
            (terms.seconds, name) for name, terms in classes.items() if terms.held_as == name
        ]
        self._tenants: OrderedDict[int, PromptChanges] = OrderedDict()
        self._counts: dict[tuple[int, int, str, str, str], FindingCount] = {}
        self._causes: list[RequestCause] = []
        self._lost_at, self._lost = 0, dict[int, set[int]]()
        """The hour, and the lost prefixes of each tenant in it."""

    def note(
        self,
        context: PromptContext,
        record: UsageRecord,
        boundaries: tuple[Boundary, ...],
        data: bytes,
        missed: str,
        missed_tokens: int,
        ended_s: float,
        ended_ms: int,
    ) -> None:
        """Count a prompt that was computed. `data`: its first token ids, four bytes each. Cost: see
        `PromptChanges.note`."""
        changes = self._tenants.get(context.tenant_id)
        if changes is None:
            changes = self._tenants[context.tenant_id] = PromptChanges(self._key)
        self._tenants.move_to_end(context.tenant_id)
        if len(self._tenants) > self._tenants_max:
            self._tenants.popitem(last=False)
        observed = ObservedPrompt(
            data=data,
            parts=prompt_parts(boundaries, len(data) // 4),
            total=record.total_in,
            cached=record.physical_cached,
            started_s=context.started_s,
            ended_s=ended_s,
            epoch=context.epoch,
            losses=context.losses,
            tools=context.tools,
        )
        reuse = changes.note(context.namespace, observed, _siblings(context.namespace))
        for waste in self._wastes(context, record, reuse, missed, missed_tokens, ended_ms):
            self._add(context, waste, ended_ms)
            if waste.cause not in _NOT_OF_A_REQUEST and len(self._causes) < CAUSES_MAX:
                said = context.model, waste.cause, waste.place, waste.tokens, waste.facts
                self._causes.append(RequestCause(context.request_id, context.tenant_id, *said))

    def take_causes(self) -> list[RequestCause]:
        """Return the causes of single requests since the last call."""
        causes, self._causes = self._causes, []
        return causes

    def take(self) -> list[FindingCount]:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, {}
        return list(counts.values())

    def _add(self, context: PromptContext, waste: _Waste, at_ms: int) -> None:
        hour_ms, ids = at_ms // HOUR_MS * HOUR_MS, (context.request_id,)
        place = context.tenant_id, hour_ms, waste.cause, waste.place
        sums = waste.requests, waste.tokens, at_ms, at_ms
        count = FindingCount(*place, *sums, ids, waste.facts, context.model)
        key = count.key
        before = self._counts.get(key)
        if before is not None:
            self._counts[key] = before.plus(count)
        elif len(self._counts) < COUNTS_MAX:
            self._counts[key] = count

    def _wastes(
        self,
        context: PromptContext,
        record: UsageRecord,
        reuse: PromptReuse,
        missed: str,
        missed_tokens: int,
        at_ms: int,
    ) -> list[_Waste]:
        """Return the causes that a prompt adds to: at most one that costs, and the legitimate ones.

        What the request shows comes before what the contract says, and that before what only the
        comparison with earlier prompts shows.
        """
        waste = _change(record, reuse)
        if waste is None and (cause := CONTRACT_CAUSES.get(missed)) is not None:
            waste = self._contract_waste(
                context, cause, missed, missed_tokens, record, reuse, at_ms
            )
        waste = waste or _other_key(record, reuse)
        # A cause of the request's own explains what is new.
        is_new = waste is None and reuse.is_new_conversation
        waste = waste or self._past_waste(context, record, reuse, at_ms)
        found = [_Waste(NEW_CONVERSATION, "", 0)] if is_new else []
        found += _writes(record, waste)
        found += _first_use(context, record, reuse, is_counted=waste is not None)
        if waste is not None:
            written = _charged_as_written(record, waste.tokens)
            facts = {f"{WRITE}{name}": tokens for name, tokens in written.items()}
            found.append(structs.replace(waste, facts={**waste.facts, **facts}))
        return found

    def _past_waste(
        self, context: PromptContext, record: UsageRecord, reuse: PromptReuse, at_ms: int
    ) -> _Waste | None:
        """Return what only the comparison with earlier prompts shows, or None."""
        unread = min(reuse.known, record.total_in - 1) - record.read_tokens()
        if context.is_unmarked and unread >= max(LOST_TOKENS_MIN, context.min_tokens):
            return _Waste("unmarked", "", unread)
        if reuse.lost and "erased" not in reuse.lost_by:
            return self._loss(context, reuse, at_ms)
        if LOST_TOKENS_MIN <= reuse.known < context.min_tokens and not record.read_tokens():
            return _Waste("below_minimum", "", reuse.known, _shortfall(context))
        return None

    def _contract_waste(
        self,
        context: PromptContext,
        cause: str,
        missed: str,
        missed_tokens: int,
        record: UsageRecord,
        reuse: PromptReuse,
        at_ms: int,
    ) -> _Waste:
        match cause:
            case "expired":
                written = next(iter(record.write), "")
                return _Waste(cause, written, missed_tokens, self._kept_by(reuse.idle_s))
            case "evicted":
                facts = {missed: 1, **self._working_set(context, reuse, at_ms)}
                return _Waste(cause, "", missed_tokens, facts)
            case "below_minimum":
                return _Waste(cause, "", reuse.known, _shortfall(context))
            case "model_changed" | "template_changed":
                return _Waste(cause, "", record.total_in - record.physical_cached)
            case _:
                return _Waste(cause, "", missed_tokens)

    def _loss(self, context: PromptContext, reuse: PromptReuse, at_ms: int) -> _Waste:
        if context.level_miss in LEVEL_FAULTS:
            return _Waste(context.level_miss, "", reuse.lost)
        if "restarted" in reuse.lost_by:
            return _Waste("restarted", "", reuse.lost)
        if set(reuse.lost_by) == {"expired"}:
            return _Waste("expired", "", reuse.lost, self._kept_by(reuse.idle_s))
        evictions = {name: 1 for name in reuse.lost_by if name.startswith("evicted")}
        facts = {**evictions, **self._working_set(context, reuse, at_ms)}
        return _Waste("evicted", "", reuse.lost, facts)

    def _working_set(
        self, context: PromptContext, reuse: PromptReuse, at_ms: int
    ) -> dict[str, int]:
        """Return the tokens of a lost prefix that is the first loss of it in this hour: their sum
        is what a floor must hold."""
        if self._lost_at != at_ms // HOUR_MS:
            self._lost, self._lost_at = {}, at_ms // HOUR_MS
        lost = self._lost.setdefault(context.tenant_id, set())
        if reuse.known_digest in lost or len(lost) >= LOST_PREFIXES_MAX:
            return {}
        lost.add(reuse.known_digest)
        return {WORKING_SET: reuse.known}

    def _kept_by(self, idle_s: float) -> dict[str, int]:
        """Return the classes that promise to keep a prefix for this long; none, if the time is
        unknown."""
        if not idle_s:
            return {}
        kept = {f"{KEPT_BY}{name}": 1 for seconds, name in self._classes if seconds >= idle_s}
        return {**kept, "idle_s": round(idle_s)}


def _change(record: UsageRecord, reuse: PromptReuse) -> _Waste | None:
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
    return _Waste(change.cause, fold_indexes(change.path), tokens, facts)


def _charged_as_written(record: UsageRecord, tokens: int) -> dict[str, int]:
    """Return how many of a prompt's wasted tokens were charged as written, by class: what is
    written comes before what is fresh."""
    found = {}
    for name, written in record.write.items():
        found[name] = min(written, tokens)
        tokens -= found[name]
    return {name: number for name, number in found.items() if number}


def _writes(record: UsageRecord, waste: _Waste | None) -> list[_Waste]:
    """Return what a prompt wrote, unless another cause explains why it was written again, and what
    it read of what had been written."""
    written, kept = record.write_tokens(), record.read_tokens() - record.read.get(BEST_EFFORT, 0)
    if waste is not None or written < LOST_TOKENS_MIN:
        written = 0
    if not written and not kept:
        return []
    own = _charged_as_written(record, written)
    facts = {READ_BACK: kept} | {f"{WRITE}{name}": tokens for name, tokens in own.items()}
    return [_Waste(WRITTEN_NEVER_READ, "", written, facts, requests=1 if written else 0)]


def _other_key(record: UsageRecord, reuse: PromptReuse) -> _Waste | None:
    """Return the tokens that were computed again because the request's key for its cache is another
    one than that of earlier prompts with the same beginning."""
    unread = min(reuse.known_elsewhere, record.total_in - 1)
    tokens = unread - max(reuse.known, record.physical_cached)
    return _Waste("cache_key_changes", "", tokens) if tokens >= LOST_TOKENS_MIN else None


def _siblings(namespace: bytes) -> bytes:
    """Return what namespaces share that differ in nothing but the partition."""
    return "/".join(namespace_parts(namespace)[:-1]).encode()


def _first_use(
    context: PromptContext, record: UsageRecord, reuse: PromptReuse, *, is_counted: bool
) -> list[_Waste]:
    """Return the first use of a beginning under a model and a template: a finding if the tenant had
    another one before, which only the finding store knows. `is_counted`: as another cause."""
    if not reuse.is_new_head and not (reuse.is_new_conversation and not reuse.known):
        return []
    _, _, model, template, *_ = (*namespace_parts(context.namespace), "", "", "", "")
    computed = 0 if is_counted else record.total_in - record.physical_cached
    return [_Waste(FIRST_USE, f"{model}/{template}", 0, {f"{HEAD}{context.head:x}": computed})]


def _shortfall(context: PromptContext) -> dict[str, int]:
    return {"min_tokens": context.min_tokens}


def prompt_parts(boundaries: Sequence[Boundary], tokens: int) -> tuple[PromptPart, ...]:
    """Return the parts of a rendered prompt, in the order in which its template wrote them."""
    return parts_of([_mark(one) for one in boundaries], tokens)


def _mark(boundary: Boundary) -> tuple[int, str, Tier, bool]:
    is_answer = boundary.role in ("assistant", "tool") or bool(boundary.run)
    return boundary.end, boundary.path, boundary.tier, is_answer
