"""One resolution algorithm for every dialect's caching contract.

Before a call runs it is resolved: which written prefixes may be read, what is to be written, which
leases the engine is asked for (`terms` has the rules). When the engine says what it found, the two
numbers part: logical (what the contract says was read and written, and what is billed) and physical
(what was not computed again). An entry can be read once the call that wrote it has its first token.
It knows no dialect and no HTTP; the gateway's handlers call it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from engine.api import Clock, LeaseGrant, LeaseRequest, Namespace, Retention, Usage
from gateway.caching.breakpoints import Look, positions
from gateway.caching.miss_diagnosis import (
    Fingerprint,
    FingerprintIndex,
    MissContext,
    PromptDigests,
    compare,
)
from gateway.caching.prefix_index import NOBODY, IndexedPrefix, Lease, Origin, PrefixIndex, digests
from gateway.caching.promises import PromiseTally
from gateway.dialects.canonical import Call, Diagnosis, Rendered, UsageRecord
from gateway.errors import Kind, Refusal
from gateway.retention_classes import BEST_EFFORT, CacheProfile, CachingConfig


class CacheScope(Struct, frozen=True):
    """Whose prefixes: the engine's `namespace`, the tenant that owns its entries, and `name` of the
    tenant and workspace for fingerprints. `classes`: those it may use; None: all. `origin`: who
    asks, and with which model and template."""

    namespace: Namespace
    tenant_id: int
    name: str
    classes: tuple[str, ...] | None = None
    origin: Origin = NOBODY


class Contracts:
    """The books of one gateway, and the rules. Belongs to one thread."""

    def __init__(
        self,
        config: CachingConfig,
        clock: Clock,
        losses: Callable[[Namespace], dict[str, int]],
        epoch: Callable[[], str],
        *,
        has_past: bool = False,
    ) -> None:
        """`losses`: blocks a namespace has lost by cause, as of the engine's latest heartbeat;
        `epoch`: which start of it this is; `has_past`: a gateway that is no more may have written
        what these books know nothing of."""
        self.config = config
        self.clock = clock
        self.losses = losses
        self.epoch = epoch
        self._began_s = clock() if has_past else -math.inf
        self.entries = PrefixIndex(config.entries_max, config.entries_per_tenant_max)
        self.promises = PromiseTally(self.entries, epoch)
        self.entries.on_drop = self.promises.gave_up
        self.fingerprints = FingerprintIndex(config.fingerprints_max, config.fingerprint_life_s)

    def resolve(
        self,
        call: Call,
        rendered: Rendered,
        scope: CacheScope,
        classes: Mapping[str, Retention] | None = None,
        held: Collection[str] = (),
    ) -> Contract:
        """What this prompt may read and has to write. O(tokens) for digests where there are
        breakpoints, O(boundaries) else. `classes`: further ones, of this call alone; those in
        `held` have been written and paid for already, whatever became of their blocks.

        Raises Refusal for a class that does not exist or that the tenant may not use.
        """
        ask = call.cache
        look = Look(())
        names = {mark.retention for mark in rendered.boundaries}
        names.add(ask.implicit)
        names.discard(None)
        if names and call.operation != "count":  # most name no class, and nothing is written
            named = {name: self._class(name, scope, classes) for name in names if name is not None}
            least = max(1, self.config.profile(ask.profile).min_tokens)
            look = positions(rendered.boundaries, ask, named, least)
        now_s = self.clock()
        keeps_print = ask.remember or ask.compare_with
        if not (look.tries or look.writes or keeps_print):
            return self._contract(call, rendered, scope, look, [], (), now_s)
        ends = {look.tokens for look in look.tries} | {write.tokens for write in look.writes}
        if keeps_print:
            ends |= {mark.tokens for mark in rendered.boundaries}
        found = digests(rendered.token_ids, ends)
        tries = []
        for place in look.tries:
            entry = self.entries.find((scope.namespace, found[place.tokens]))
            if entry is not None:
                tries.append((place.tokens, entry))
        writes = tuple(
            [Write(mark.tokens, mark.retention, found[mark.tokens]) for mark in look.writes]
        )
        for write in writes:
            if write.retention.name in held:
                key = (scope.namespace, write.digest)
                entry = IndexedPrefix(key, write.tokens, 0, self.epoch(), {}, scope.origin, b"")
                entry.leases[write.retention.name] = Lease(write.retention, now_s, is_granted=True)
                tries.append((write.tokens, entry))
        tries.sort(key=lambda pair: -pair[0])
        contract = self._contract(call, rendered, scope, look, tries, writes, now_s)
        if keeps_print:
            total = len(rendered.token_ids)
            contract.fingerprint = Fingerprint.of(
                call, rendered.boundaries, found, total, scope.name, scope.origin
            )
            if ask.compare_with:
                then = self.fingerprints.find(scope.name, ask.compare_with, now_s)
                contract.diagnosis = (
                    Diagnosis("unknown") if then is None else compare(contract.fingerprint, then)
                )
        return contract

    def _contract(
        self,
        call: Call,
        rendered: Rendered,
        scope: CacheScope,
        look: Look,
        tries: Sequence[tuple[int, IndexedPrefix]],
        writes: tuple[Write, ...],
        now_s: float,
    ) -> Contract:
        profile = self.config.profile(call.cache.profile)
        terms = ContractTerms(
            profile=profile,
            lookup=call.cache.lookup or profile.lookup,
            total=len(rendered.token_ids),
            tries=tries,
            writes=writes,
            is_below=look.is_below,
            honours_promises=self.config.honour_broken_promises,
        )
        places = [place.tokens for place in look.tries]
        words = PromptDigests(call.prompts[0], rendered.boundaries, places)
        return Contract(self, scope, terms, words, now_s)

    def knows_all(self, terms: ContractTerms, now_s: float) -> bool:
        """Have the books been kept for as long as what these terms ask for is?"""
        return now_s >= self._began_s + terms.kept_s()

    def _class(
        self, name: str, scope: CacheScope, classes: Mapping[str, Retention] | None
    ) -> Retention:
        own = (classes or {}).get(name)
        if own is not None:
            return own
        found = self.config.retention(name)
        if found is None:
            message = f"There is no retention class {name!r} here."
            raise Refusal(Kind.BAD, "unknown_retention", message, param="ttl")
        if scope.classes is not None and name not in scope.classes:
            allowed = ", ".join(scope.classes) or "none"
            message = f"The retention class {name!r} is not part of your plan (yours: {allowed})."
            raise Refusal(Kind.PERMISSION, "retention_not_allowed", message, param="ttl")
        return found


class Contract:
    """One prompt's contract, from before it runs until it is billed."""

    def __init__(
        self,
        books: Contracts,
        scope: CacheScope,
        terms: ContractTerms,
        words: PromptDigests,
        started_s: float,
    ) -> None:
        self._books = books
        self._scope = scope
        self._terms = terms
        self._words = words
        self._started_s = started_s
        self._erasures = books.entries.erasures
        self._granted: dict[int, int] = {}
        self._record: UsageRecord | None = None
        self._read_entry: IndexedPrefix | None = None
        self._is_written = False
        self._missed = ""
        self.missed_segment = ""
        self.grants: tuple[LeaseGrant, ...] = ()
        self.missed_tokens = 0
        """Of the longest prefix in the books, what was not read."""
        self.fingerprint: Fingerprint | None = None
        self.diagnosis: Diagnosis | None = None

    @property
    def leases(self) -> tuple[LeaseRequest, ...]:
        """What the engine is asked to keep."""
        if not self._terms.writes:
            return ()
        return tuple(
            LeaseRequest(write.tokens, write.retention, write.digest.hex())
            for write in self._terms.writes
        )

    def expect(self, cached_tokens: int) -> UsageRecord:
        """What would be read and written if the engine had this many tokens; changes nothing."""
        return self._terms.split(cached_tokens, None, self._books.clock())[0]

    def explain(self, cached_tokens: int) -> str:
        """Why less than what it asks for would be read if the engine had this many tokens."""
        read = self.expect(cached_tokens).read_tokens()
        return self._why_missed(read, cached_tokens, self._books.clock())

    def begin(self, cached_tokens: int, grants: Sequence[LeaseGrant]) -> UsageRecord:
        """The engine has started: settle what was read, renew it, and note what is granted."""
        now_s = self._books.clock()
        terms = self._terms
        if terms.writes:
            self._granted = {w.tokens: w.tokens for w in terms.writes}
            for write, grant in zip(terms.writes, grants, strict=False):
                self._granted[write.tokens] = grant.tokens
        self.grants = tuple(grants)
        self._record, self._read_entry = terms.split(cached_tokens, self._granted, now_s)
        read = self._record.read_tokens()
        self._missed = self._why_missed(read, cached_tokens, now_s)
        if self._missed:
            self.missed_segment = self._words.segment_behind(cached_tokens)
            if terms.tries:
                self.missed_tokens = max(0, terms.tries[0][0] - read)
        self._books.promises.answered(self._scope.tenant_id, grants)
        if self._read_entry is not None and self._record.breached_tokens:
            self._books.promises.broke(self._read_entry, now_s)
        for tokens, entry in terms.tries:
            if tokens <= read and entry.is_live(now_s):
                self._books.entries.renew(entry, self._started_s)
        return self._record

    def written(self) -> None:
        """The first token is out (or the prefill is done): what was written can be read now. If it
        was erased meanwhile, by whoever may, the engine has kept nothing of it, and owes nothing.
        """
        if self._is_written or self._record is None:
            return
        self._is_written = True
        books = self._books
        namespace, writes = self._scope.namespace, self._terms.writes
        keys = [(namespace, write.digest) for write in writes]
        if keys and books.entries.was_erased(self._erasures, namespace, keys):
            return
        losses = books.losses(self._scope.namespace) if writes else {}
        for write in writes:
            granted = self._granted.get(write.tokens, 0)
            key = (self._scope.namespace, write.digest)
            is_news = books.entries.find(key) is None
            books.entries.write(
                key,
                write.tokens,
                self._scope.tenant_id,
                books.epoch(),
                losses,
                write.retention,
                self._started_s,
                is_granted=granted >= write.tokens,
                origin=self._scope.origin,
                words=self._words.upto(write.tokens) if is_news else b"",
            )
            name = write.retention.name
            books.promises.wrote(self._scope.tenant_id, key, name, books.clock())

    def finish(self, response_id: str) -> None:
        """The answer is over: clocks that count from the last use start, the prompt's fingerprint
        is kept. Safe to call twice."""
        now_s = self._books.clock()
        entry = self._read_entry
        if entry is not None:
            for lease in entry.leases.values():
                if lease.retention.clock == "last_use" and lease.expires_at_s > self._started_s:
                    lease.renew(now_s)
        if self.fingerprint is not None and self._record is not None:
            self._books.fingerprints.remember(response_id, self.fingerprint, now_s)

    def record(self, usage: Usage) -> UsageRecord:
        """The bill's numbers. A prompt that never started read and wrote nothing."""
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
            return base  # before the first token, and asked again
        return replace(base, out=usage.output_tokens)

    def why_missed(self) -> str:
        """Why less was read than was asked for; "" if nothing was missing.

        What the request itself shows (see `diagnosis`) comes first; else what became of the
        longest entry found: expired, or lost to its own quota, to others' pressure, to an erasure
        or to a restart of the engine. Where there is none, the same words may stand where this call
        cannot read: in another namespace, under another template or model; or what was written is
        unknown, for these books are younger.
        """
        if self._missed and self.diagnosis is not None and self.diagnosis.outcome == "miss":
            return str(self.diagnosis.cause)
        return self._missed

    # -- inside -------------------------------------------------------------------------------

    def _why_missed(self, read: int, cached_tokens: int, now_s: float) -> str:
        terms = self._terms
        if terms.lookup == "none":
            return ""
        if terms.is_below:
            return "below_minimum"
        if read >= terms.wanted():
            return ""
        longest = terms.longest()
        if longest is None or longest.tokens <= read:
            return self._elsewhere(read, now_s)
        if longest.epoch != self._books.epoch():
            return "restarted"
        if not longest.is_live(now_s):
            return "expired"
        # There, and not read all the same: a longer promise was asked for, or counts are coarse.
        return "" if terms.is_there(longest.tokens, cached_tokens) else self._lost(longest)

    def _elsewhere(self, read: int, now_s: float) -> str:
        """Nothing was written here: has the same tenant written it where it cannot be read?"""
        books, scope = self._books, self._scope
        honours = self._terms.honours_promises
        standing = MissContext(
            scope.namespace, scope.origin, now_s, books.epoch(), honours, books.losses
        )
        if cause := standing.cause(self._words, books.entries, read):
            return cause
        is_known = bool(self._terms.tries) or books.knows_all(self._terms, now_s)
        return "never_written" if is_known else "unknown"

    def _lost(self, entry: IndexedPrefix) -> str:
        now = self._books.losses(self._scope.namespace)
        grown = {cause: now.get(cause, 0) - entry.losses.get(cause, 0) for cause in now}
        cause = max(grown, key=lambda name: grown[name], default="")
        return cause if cause and grown[cause] > 0 else "evicted_pressure"


class Write(Struct, frozen=True):
    """A breakpoint to write: the first `tokens` tokens in this class."""

    tokens: int
    retention: Retention
    digest: bytes


class ContractTerms(Struct, frozen=True):
    """`total`: tokens of the prompt. `tries`: what of it was written before, by length, longest
    first. `writes`: ascending. `is_below`: there were breakpoints, all too near the beginning."""

    profile: CacheProfile
    lookup: str
    total: int
    tries: Sequence[tuple[int, IndexedPrefix]]
    writes: tuple[Write, ...]
    is_below: bool
    honours_promises: bool

    def wanted(self) -> int:
        """Up to where it would read, if all had been written."""
        return self.writes[-1].tokens if self.writes else 0

    def kept_s(self) -> float:
        """How long what it asks for is kept, if nobody reads it: the longest of its classes."""
        kept = (max(w.retention.promise_s, w.retention.limit_s or 0.0) for w in self.writes)
        return max(kept, default=0.0)

    def longest(self) -> IndexedPrefix | None:
        """Of what was written before, that which holds most."""
        return self.tries[0][1] if self.tries else None

    def split(
        self, cached_tokens: int, granted: Mapping[int, int] | None, now_s: float
    ) -> tuple[UsageRecord, IndexedPrefix | None]:
        """total = read + write + fresh, and the entry that is read, if the engine has this many
        tokens and grants so many at each write (None: all). O(tries * writes)."""
        read, entry, owed = self._read(cached_tokens, now_s)
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
            breached_tokens=owed,
        )
        return record, entry

    def is_there(self, tokens: int, cached_tokens: int) -> bool:
        """The last token of a prompt is always computed: that is no loss."""
        return cached_tokens >= min(tokens, self.total - 1)

    def _read(self, there: int, now_s: float) -> tuple[int, IndexedPrefix | None, int]:
        """(logical tokens read, the entry they come from, of them promised but not there)."""
        if self.lookup == "none":
            return 0, None, 0
        read, entry = 0, None
        for tokens, found in self.tries:
            if not found.is_live(now_s) or not self._covers(tokens, now_s):
                continue
            owed = self.honours_promises and found.is_promised(now_s)
            if owed or self.is_there(tokens, there):
                read, entry = tokens, found
                break
        if self.lookup == "longest" and there > read:
            read, entry = there, None
        read -= read % self.profile.granularity
        if read < self.profile.min_tokens:
            return 0, None, 0
        return read, entry, max(0, min(read, self.total - 1) - there)

    def _covers(self, tokens: int, now_s: float) -> bool:
        """Does what was written hold each promise asked for up to here?"""
        for write in self.writes:
            if write.tokens > tokens:
                continue
            held = max(
                (
                    _promise(lease.retention)
                    for at, entry in self.tries
                    if at >= write.tokens
                    for lease in entry.leases.values()
                    if lease.expires_at_s > now_s
                ),
                default=-1.0,
            )
            if held < _promise(write.retention):
                return False
        return True


def _promise(retention: Retention) -> float:
    return float("inf") if retention.pinned else retention.promise_s
