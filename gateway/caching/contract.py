"""Resolve and account for the caching contract of a call: one algorithm for every dialect.

Before a call runs, its contract is resolved: the written prefixes it may read, the prefixes it
writes, and the leases that the engine is asked for. When the engine reports the cached tokens, two
counts differ: logical (read and written by contract, and billed) and physical (not recomputed). A
written prefix can be read once the call that wrote it has its first token. The module knows no
dialect and no HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from engine.api import (
    PREDICTION,
    AttentionWindow,
    Clock,
    LeaseGrant,
    LeaseRequest,
    LevelWait,
    Namespace,
    Retention,
    Started,
    Usage,
)
from gateway.caching.breakpoints import BreakpointPlan, plan_breakpoints
from gateway.caching.miss_diagnosis import (
    Fingerprint,
    FingerprintIndex,
    PromptDigests,
    compare_fingerprints,
)
from gateway.caching.prefix_index import (
    NO_ORIGIN,
    IndexedPrefix,
    Lease,
    PrefixIndex,
    PrefixOrigin,
    digest_prefixes,
)
from gateway.caching.promises import PromiseTally
from gateway.dialects.canonical import UNNAMED, Call, Diagnosis, Rendered, ShortLease, UsageRecord
from gateway.dialects.families import cache_profile
from gateway.errors import Kind, Refusal
from gateway.retention_classes import BEST_EFFORT, CacheProfile, CachingConfig
from tenancy.types import Fidelity

CAUSES_ELSEWHERE = ("other_namespace", "template", "model")
"""Causes of content that was written elsewhere; the first one that applies is reported."""


class CacheScope(Struct, frozen=True):
    """The scope of a call's prefixes: the engine's `namespace`, the tenant that owns the written
    prefixes, and `name`, the tenant and workspace, for fingerprints."""

    namespace: Namespace
    tenant_id: int
    name: str
    classes: tuple[str, ...] | None = None
    """Retention classes that the tenant may use; None: all."""
    origin: PrefixOrigin = NO_ORIGIN
    """The writer, its model and its template."""
    default_class: str | None = None
    """The class of calls and breakpoints that name none; None: the dialect's."""
    fidelity: Fidelity = "exact"
    """The fidelity of the namespace's copies below the device."""
    attention: AttentionWindow | None = None
    """The call's attention window."""
    shared_tokens: int | None = None
    """The tokens of the longest prefix that it may then read or write; None: all."""


class ContractManager:
    """The written prefixes, promises and fingerprints of one gateway. Belongs to one thread."""

    def __init__(
        self,
        config: CachingConfig,
        clock: Clock,
        losses: Callable[[Namespace], dict[str, int]],
        epoch: Callable[[Namespace], str],
        is_alive: Callable[[str], bool],
        *,
        has_past: bool = False,
        tells_leases: bool = True,
        survives: Callable[[Namespace], bool] = lambda _: False,
        unkept_tokens: Callable[[Namespace], int] = lambda _: 0,
        gap_cause: Callable[[Namespace], str] = lambda _: "window_gone",
    ) -> None:
        """`losses`: blocks that a namespace lost, by cause, as of the engine's latest heartbeat.
        `epoch`: the engine epoch that new prefixes of a namespace are written in. `is_alive`:
        whether the engine of an epoch still holds its cache. `has_past`: an earlier gateway process
        may have written prefixes that this index does not contain. `tells_leases`: whether usage
        says which lease was not granted whole, which the hosted APIs' usage cannot. `survives`:
        whether a level now holds what was promised in a namespace by engines that have ended.
        `unkept_tokens`: how many tokens at the end of a promised prefix the engine of a namespace
        may compute again without having broken the promise: levels keep whole blocks. `gap_cause`:
        what a model of a namespace lacks where its blocks are cached and it cannot resume.
        """
        self.config = config
        self.clock = clock
        self.losses = losses
        self.epoch = epoch
        self.is_alive = is_alive
        self.tells_leases = tells_leases
        self.unkept_tokens = unkept_tokens
        self.gap_cause = gap_cause
        self._began_s = clock() if has_past else -math.inf
        self.entries = PrefixIndex(config.entries_max, config.entries_per_tenant_max)
        self.promises = PromiseTally(self.entries, is_alive, survives=survives)
        self.entries.on_drop = self.promises.record_given_up
        self.fingerprints = FingerprintIndex(config.fingerprints_max, config.fingerprint_life_s)

    def resolve(
        self,
        call: Call,
        rendered: Rendered,
        scope: CacheScope,
        classes: Mapping[str, Retention] | None = None,
        prepaid: Collection[str] = (),
    ) -> Contract:
        """Resolve what this prompt may read and what it writes.

        O(tokens) for digests if there are breakpoints, else O(boundaries). `classes`: further
        retention classes of this call only; those in `prepaid` are already written and paid for,
        even if their blocks are lost.

        Raises Refusal for a class that does not exist or that the tenant may not use.
        """
        ask = call.cache
        plan = BreakpointPlan(())
        names = ({mark.retention for mark in rendered.boundaries} | {ask.implicit}) - {None}
        if not names and ask.lookup is None and scope.default_class is not None:
            ask = replace(ask, implicit=scope.default_class)
            names = {scope.default_class}
        profile = cache_profile(self.config, ask.profile)
        if names and call.operation != "count":  # most calls name no class and write nothing
            named = {name: self._class(name, scope, classes) for name in names if name is not None}
            least = max(1, profile.min_tokens)
            plan = plan_breakpoints(rendered.boundaries, ask, named, least)
        now_s = self.clock()
        needs_fingerprint = ask.remember or ask.compare_with
        digests: dict[int, bytes] = {}
        candidates: list[tuple[int, IndexedPrefix]] = []
        writes: tuple[PlannedWrite, ...] = ()
        if plan.candidates or plan.writes or needs_fingerprint:
            ends = {*plan.candidates, *(write.tokens for write in plan.writes)}
            if needs_fingerprint:
                ends |= {mark.end for mark in rendered.boundaries}
            digests = digest_prefixes(rendered.token_ids, ends)
            writes = tuple(
                PlannedWrite(write.tokens, write.retention, digests[write.tokens])
                for write in plan.writes
            )
            candidates = self._candidates(plan, digests, scope)
            candidates += self._prepaid(writes, prepaid, scope, now_s)
            candidates.sort(key=lambda pair: -pair[0])
        terms = ContractTerms(
            profile=profile,
            lookup=ask.lookup or profile.lookup,
            total=len(rendered.token_ids),
            candidates=candidates,
            writes=writes,
            is_below=plan.is_below,
            honours_promises=self.config.honour_broken_promises,
            unkept_tokens=partial(self.unkept_tokens, scope.namespace),
        )
        content = PromptDigests(call.prompts[0], rendered.boundaries, plan.candidates)
        contract = Contract(self, scope, terms, content, now_s)
        if needs_fingerprint:
            contract.fingerprint = own = Fingerprint.of(
                call, rendered.boundaries, digests, terms.total, scope.name, scope.origin
            )
            if ask.compare_with:
                then = self.fingerprints.find(scope.name, ask.compare_with, now_s)
                contract.diagnosis = compare_fingerprints(own, then)
        return contract

    def _candidates(
        self, plan: BreakpointPlan, digests: Mapping[int, bytes], scope: CacheScope
    ) -> list[tuple[int, IndexedPrefix]]:
        """Return the written prefixes that the call may read, with their lengths."""
        longest = math.inf if scope.shared_tokens is None else scope.shared_tokens
        keys = [(tokens, (scope.namespace, digests[tokens])) for tokens in plan.candidates]
        found = [(tokens, self.entries.find(key)) for tokens, key in keys if tokens <= longest]
        return [(tokens, entry) for tokens, entry in found if entry is not None]

    def _prepaid(
        self,
        writes: Sequence[PlannedWrite],
        prepaid: Collection[str],
        scope: CacheScope,
        now_s: float,
    ) -> list[tuple[int, IndexedPrefix]]:
        """Return the prefixes that count as written: those of classes that are paid for already."""
        longest = math.inf if scope.shared_tokens is None else scope.shared_tokens
        found = []
        for write in writes:
            if write.retention.name in prepaid and write.tokens <= longest:
                key, epoch = (scope.namespace, write.digest), self.epoch(scope.namespace)
                entry = IndexedPrefix(key, write.tokens, 0, epoch, {}, scope.origin, b"")
                entry.leases[write.retention.name] = Lease(write.retention, now_s, is_granted=True)
                found.append((write.tokens, entry))
        return found

    def covers_retention(self, terms: ContractTerms, now_s: float) -> bool:
        """Whether the index is older than the retention that these terms ask for."""
        return now_s >= self._began_s + terms.retention_s()

    def _class(
        self, name: str, scope: CacheScope, classes: Mapping[str, Retention] | None
    ) -> Retention:
        if name.endswith(UNNAMED):
            name = scope.default_class or name.removesuffix(UNNAMED)
        own = (classes or {}).get(name)
        if own is not None:
            return own
        found = self.config.retention(name)
        if found is None:
            message = f"Unknown retention class {name!r}."
            raise Refusal(Kind.BAD, "unknown_retention", message, param="ttl")
        if scope.classes is not None and name not in scope.classes:
            allowed = ", ".join(scope.classes) or "none"
            message = f"The retention class {name!r} is not allowed; expected one of: {allowed}."
            raise Refusal(Kind.PERMISSION, "retention_not_allowed", message, param="ttl")
        return found


COMPUTED_TOKENS_MIN = 64
"""Fewer computed tokens of a call without breakpoints need no cause."""


class Contract:
    """The contract of one prompt, from before it runs until it is billed."""

    def __init__(
        self,
        manager: ContractManager,
        scope: CacheScope,
        terms: ContractTerms,
        digests: PromptDigests,
        started_s: float,
    ) -> None:
        self._manager = manager
        self._scope = scope
        self._terms = terms
        self._digests = digests
        self._started_s = started_s
        self._erasures = manager.entries.erasures
        self.is_unmarked = not terms.writes and not terms.is_below and terms.lookup != "longest"
        """Whether the call's dialect reads nothing without breakpoints, and it has none."""
        self.min_tokens = terms.profile.min_tokens
        """Shorter prefixes are neither read nor written."""
        self._granted: dict[int, int] = {}
        self._record: UsageRecord | None = None
        self._read_entry: IndexedPrefix | None = None
        self.epoch = ""
        """Of the engine that computes the call; "" where the model has one."""
        self._is_written = False
        self._missed = ""
        self.is_broken_by_death = False
        """Whether it reads a promise that ended with its engine."""
        self.missed_segment = ""
        self.grants: tuple[LeaseGrant, ...] = ()
        self.fidelity = scope.fidelity
        """Of the copies that the prompt may be read from."""
        self.attention = scope.attention
        """The attention window of the call."""
        self.shared_tokens = scope.shared_tokens
        """The tokens of the longest prefix that the call may read or write; None: all."""
        self.read_fidelity: Fidelity = "exact"
        """How far from exact the tokens are that were found."""
        self.wait: LevelWait | None = None
        """What levels below the device cost this prompt, and what they did not bring."""
        self.missed_tokens = 0
        """Tokens of the longest indexed prefix that were not read."""
        self.fingerprint: Fingerprint | None = None
        self.diagnosis: Diagnosis | None = None

    @property
    def leases(self) -> tuple[LeaseRequest, ...]:
        """The leases that the engine is asked for."""
        if not self._terms.writes:
            return ()
        return tuple(
            LeaseRequest(write.tokens, write.retention, write.digest.hex())
            for write in self._terms.writes
        )

    def expect(self, cached_tokens: int) -> UsageRecord:
        """Return the usage if the engine had this many tokens cached; changes nothing."""
        granted, shared = None, self.shared_tokens
        if shared is not None:
            ends = [write.tokens for write in self._terms.writes]
            granted = {tokens: tokens if tokens <= shared else 0 for tokens in ends}
        return self._terms.split(cached_tokens, granted, self._manager.clock())[0]

    def explain(self, cached_tokens: int, resume_gap_tokens: int = 0) -> str:
        """Return why less than requested would be read with this many cached tokens.

        `resume_gap_tokens`: further tokens that are cached, behind the last point to resume at.
        """
        read = self.expect(cached_tokens).read_tokens()
        reach = cached_tokens + resume_gap_tokens
        return self._why_missed(read, cached_tokens, reach, self._manager.clock())

    def begin(self, started: Started) -> UsageRecord:
        """Settle the read when the engine starts: record usage and grants, renew what was read."""
        now_s = self._manager.clock()
        cached_tokens, grants = started.cached_tokens, started.leases
        self.wait = started.wait
        self.read_fidelity, self.grants = started.fidelity, grants
        terms = self._terms
        if terms.writes:
            self._granted = {w.tokens: w.tokens for w in terms.writes}
            for write, grant in zip(terms.writes, grants, strict=False):
                self._granted[write.tokens] = grant.tokens
        self._record, self._read_entry = terms.split(cached_tokens, self._granted, now_s)
        short = _short_lease(terms.writes, grants) if terms.writes else None
        if short is not None and self._manager.tells_leases:
            self._record = replace(self._record, short_lease=short)
        if started.loaded_tokens:
            self._record = replace(self._record, loaded=dict(started.loaded_tokens))
        if terms.candidates:
            self._adopt(cached_tokens)
        read = self._record.read_tokens()
        reach = cached_tokens + started.resume_gap_tokens
        self._missed = self._why_missed(read, cached_tokens, reach, now_s)
        if self._missed:
            self.missed_segment = self._digests.segment_behind(cached_tokens)
            if terms.candidates:
                self.missed_tokens = max(0, terms.candidates[0][0] - read)
        if grants:
            self._manager.promises.count_grants(self._scope.tenant_id, grants)
        if self._read_entry is not None and self._record.recomputed_promised:
            self._manager.promises.record_broken(self._read_entry, now_s)
            self.is_broken_by_death = not self._manager.is_alive(self._read_entry.epoch)
        for tokens, entry in terms.candidates:
            if tokens <= read and entry.is_live(now_s):
                self._manager.entries.renew(entry, self._started_s)
        return self._record

    def written(self) -> None:
        """Index the written prefixes: the first token is out or the prefill is done.

        A prefix that was erased meanwhile is not indexed: the engine kept none of its blocks.
        """
        if self._is_written or self._record is None:
            return
        self._is_written = True
        manager = self._manager
        namespace, writes = self._scope.namespace, self._terms.writes
        if self.shared_tokens is not None:
            writes = tuple(write for write in writes if write.tokens <= self.shared_tokens)
        if not writes:
            return
        keys = [(namespace, write.digest) for write in writes]
        if manager.entries.was_erased(self._erasures, namespace, keys):
            return
        losses = manager.losses(self._scope.namespace)
        for write in writes:
            granted = self._granted.get(write.tokens, 0)
            key = (self._scope.namespace, write.digest)
            is_new = manager.entries.find(key) is None
            manager.entries.write(
                key,
                write.tokens,
                self._scope.tenant_id,
                self.epoch or manager.epoch(namespace),
                losses,
                write.retention,
                self._started_s,
                is_granted=granted >= write.tokens,
                origin=self._scope.origin,
                content=self._digests.upto(write.tokens) if is_new else b"",
            )
            name = write.retention.name
            manager.promises.record_write(self._scope.tenant_id, key, name, manager.clock())

    def finish(self, response_id: str) -> None:
        """End the answer: start the clocks that count from the last use, and keep the prompt's
        fingerprint. A second call changes nothing."""
        now_s = self._manager.clock()
        entry = self._read_entry
        if entry is not None:
            for lease in entry.leases.values():
                if lease.retention.clock == "last_use" and lease.expires_at_s > self._started_s:
                    lease.renew(now_s)
            self._manager.entries.note_change(entry)
        if self.fingerprint is not None and self._record is not None:
            self._manager.fingerprints.remember(response_id, self.fingerprint, now_s)

    def record(self, usage: Usage) -> UsageRecord:
        """Return the usage to bill. A prompt that never started read and wrote nothing."""
        base = self._record
        if base is None:
            return UsageRecord(
                total_in=usage.prompt_tokens,
                read={BEST_EFFORT: usage.cached_tokens} if usage.cached_tokens else {},
                fresh=usage.prompt_tokens - usage.cached_tokens,
                out=usage.output_tokens,
                physical_cached=usage.cached_tokens,
            )
        if usage.output_tokens == base.out:
            return base
        record = replace(base, out=usage.output_tokens)
        for one in usage.drafts:
            if one.source == PREDICTION:
                record = replace(record, prediction=(one.accepted, one.drafted - one.accepted))
        return record

    def losses(self) -> dict[str, int]:
        """Return the blocks that the call's namespace has lost so far, by cause."""
        return self._manager.losses(self._scope.namespace)

    def why_missed(self) -> str:
        """Return why less was read than requested; "" if nothing was missing.

        A difference that the request itself shows (see `diagnosis`) comes first. Otherwise the fate
        of the longest prefix found: expired, or lost to its own quota, to pressure from others, to
        an erasure or to an engine restart, or there but for the blocks of a window, or there on a
        level that did not bring it. If no prefix was found, the same content may be cached where
        this call cannot read it: in another namespace, or under another template or model. If the
        index is younger than the retention, the cause is unknown.
        """
        if self._missed and self.diagnosis is not None and self.diagnosis.outcome == "miss":
            return str(self.diagnosis.cause)
        return self._missed

    def parting_segment(self) -> str:
        """Return the segment of the first token that was not cached, for a call that asks for no
        prefix by a breakpoint and computes enough of its prompt; "" for any other call."""
        record = self._record
        if record is None or self._missed or self._terms.writes:
            return ""
        is_computed = record.total_in - record.physical_cached >= COMPUTED_TOKENS_MIN
        return self._digests.segment_behind(record.physical_cached) if is_computed else ""

    # -- internals ----------------------------------------------------------------------------

    def _adopt(self, cached_tokens: int) -> None:
        """Note that the present engine holds the prefixes that were found whole: what came back
        from a level after the end of its engine is no loss any more."""
        manager, namespace = self._manager, self._scope.namespace
        epoch = self.epoch or manager.epoch(namespace)
        for tokens, entry in self._terms.candidates:
            if (
                entry.epoch != epoch
                and not manager.is_alive(entry.epoch)
                and self._terms.is_cached(tokens, cached_tokens + self._terms.unkept_tokens())
            ):
                entry.epoch, entry.losses = epoch, manager.losses(namespace)
                manager.entries.note_change(entry)

    def _why_missed(self, read: int, cached_tokens: int, reach: int, now_s: float) -> str:
        terms, wait = self._terms, self.wait
        if terms.lookup == "none":
            return ""
        if terms.is_below:
            return "below_minimum"
        if read >= terms.requested_tokens():
            return ""
        if self.shared_tokens is not None and terms.requested_tokens() > self.shared_tokens:
            return "attention"
        longest = terms.longest()
        if longest is None or longest.tokens <= read:
            return self._cause_elsewhere(read, now_s)
        is_live = longest.is_live(now_s)
        if wait is not None and is_live and terms.is_most(wait, longest.tokens, cached_tokens):
            return wait.cause
        if not self._manager.is_alive(longest.epoch):
            return "restarted"
        if not is_live:
            return "expired"
        # The prefix is cached but not read: a longer promise was requested, or counts are coarse.
        if terms.is_cached(longest.tokens, cached_tokens):
            return ""
        if terms.is_cached(longest.tokens, reach):
            return self._manager.gap_cause(self._scope.namespace)
        return self._loss_cause(longest)

    def _cause_elsewhere(self, read: int, now_s: float) -> str:
        """Return the cause if no prefix was found here: did the tenant write it elsewhere?"""
        manager, writer = self._manager, self._scope.origin.writer
        content = [self._digests.upto(at) for at in self._digests.positions if at > read]
        causes = {
            self._cause_there(entry, now_s)
            for digest in filter(None, content)
            for entry in manager.entries.find_same_content(writer, digest)
        }
        if found := causes.intersection(CAUSES_ELSEWHERE):
            return min(found, key=CAUSES_ELSEWHERE.index)
        is_known = bool(self._terms.candidates) or manager.covers_retention(self._terms, now_s)
        return "never_written" if is_known else "unknown"

    def _cause_there(self, entry: IndexedPrefix, now_s: float) -> str:
        """Return why a prefix with the same content cannot be read here; "" if it says nothing."""
        manager, here, origin = self._manager, self._scope, entry.origin
        if not entry.is_live(now_s) or entry.key[0] == here.namespace:
            return ""
        if origin.model != here.origin.model:
            return "model"
        if origin.template != here.origin.template:
            return "template"
        # Its blocks are certainly cached if they are promised, or if none was lost since.
        is_promised = self._terms.honours_promises and entry.is_promised(now_s)
        is_whole = manager.is_alive(entry.epoch) and entry.losses == manager.losses(entry.key[0])
        return "other_namespace" if is_promised or is_whole else ""

    def _loss_cause(self, entry: IndexedPrefix) -> str:
        now = self._manager.losses(self._scope.namespace)
        grown = {cause: now.get(cause, 0) - entry.losses.get(cause, 0) for cause in now}
        cause = max(grown, key=lambda name: grown[name], default="")
        return cause if cause and grown[cause] > 0 else "evicted_pressure"


class PlannedWrite(Struct, frozen=True):
    """A breakpoint to write: the first `tokens` tokens, in this retention class."""

    tokens: int
    retention: Retention
    digest: bytes


class ContractTerms(Struct, frozen=True):
    """The rules of one prompt."""

    profile: CacheProfile
    lookup: str
    total: int
    """Tokens of the prompt."""
    candidates: Sequence[tuple[int, IndexedPrefix]]
    """Written prefixes found, with their lengths, longest first."""
    writes: tuple[PlannedWrite, ...]
    """Ascending."""
    is_below: bool
    """The call has breakpoints, and all of them are shorter than the minimum."""
    honours_promises: bool
    unkept_tokens: Callable[[], int] = lambda: 0
    """Tokens at the end of a promised prefix that the engine may compute again."""

    def requested_tokens(self) -> int:
        """Return the tokens that would be read if every breakpoint had been written."""
        return self.writes[-1].tokens if self.writes else 0

    def retention_s(self) -> float:
        """Return the longest retention of the classes written, without a read, in seconds."""
        kept = (max(w.retention.promise_s, w.retention.limit_s or 0.0) for w in self.writes)
        return max(kept, default=0.0)

    def longest(self) -> IndexedPrefix | None:
        """Return the longest written prefix found, or None."""
        return self.candidates[0][1] if self.candidates else None

    def split(
        self, cached_tokens: int, granted: Mapping[int, int] | None, now_s: float
    ) -> tuple[UsageRecord, IndexedPrefix | None]:
        """Split the prompt: total = read + write + fresh. Also returns the prefix that is read.

        `cached_tokens`: tokens the engine has. `granted`: tokens granted by the end of each write;
        None: all. O(candidates * writes).
        """
        read, entry, breached = self._read(cached_tokens, now_s)
        classes: dict[str, int] = {}
        at = read
        for write in self.writes:
            end = write.tokens if granted is None else min(write.tokens, granted[write.tokens])
            if end > at:
                classes[write.retention.name] = classes.get(write.retention.name, 0) + end - at
                at = end
        fresh = self.total - at
        if not self.profile.reports_writes:
            fresh, classes = self.total - read, {}
        name = BEST_EFFORT
        if entry is not None:
            best = entry.best(now_s)
            name = best.retention.name if best is not None else BEST_EFFORT
        record = UsageRecord(
            total_in=self.total,
            read={name: read} if read else {},
            write=classes,
            fresh=fresh,
            physical_cached=cached_tokens,
            recomputed_promised=breached,
        )
        return record, entry

    def is_cached(self, tokens: int, cached_tokens: int) -> bool:
        """Whether a prefix is cached. The last token of a prompt is always computed: not a loss."""
        return cached_tokens >= min(tokens, self.total - 1)

    def is_most(self, wait: LevelWait, tokens: int, cached_tokens: int) -> bool:
        """Whether a level had most of what is missing of a prefix, and did not bring it."""
        missing = min(tokens, self.total - 1) - cached_tokens
        return wait.cause != "" and 0 < missing <= 2 * wait.missed_tokens

    def _read(self, there: int, now_s: float) -> tuple[int, IndexedPrefix | None, int]:
        """Return (logical tokens read, their prefix, tokens of it that were promised but lost)."""
        if self.lookup == "none":
            return 0, None, 0
        read, entry = 0, None
        for tokens, found in self.candidates:
            if not found.is_live(now_s) or not self._holds_promises(tokens, now_s):
                continue
            is_owed = self.honours_promises and found.is_promised(now_s)
            if is_owed or self.is_cached(tokens, there):
                read, entry = tokens, found
                break
        if self.lookup == "longest" and there > read:
            read, entry = there, None
        read -= read % self.profile.granularity
        if read < self.profile.min_tokens:
            return 0, None, 0
        missing = min(read, self.total - 1) - there
        return read, entry, missing if missing > 0 and missing > self.unkept_tokens() else 0

    def _holds_promises(self, tokens: int, now_s: float) -> bool:
        """Whether the written prefixes hold every promise requested up to `tokens`."""
        for write in self.writes:
            if write.tokens > tokens:
                continue
            promised_s = max(
                (
                    _promise(lease.retention)
                    for at, entry in self.candidates
                    if at >= write.tokens
                    for lease in entry.leases.values()
                    if lease.expires_at_s > now_s
                ),
                default=-1.0,
            )
            if promised_s < _promise(write.retention):
                return False
        return True


def _short_lease(writes: Sequence[PlannedWrite], grants: Sequence[LeaseGrant]) -> ShortLease | None:
    """Return the first lease that was not granted whole, or None."""
    for write, grant in zip(writes, grants, strict=False):
        if grant.outcome != "granted":
            name = write.retention.name
            return ShortLease(grant.outcome, grant.bound, name, write.tokens, grant.tokens)
    return None


def _promise(retention: Retention) -> float:
    return float("inf") if retention.pinned else retention.promise_s
