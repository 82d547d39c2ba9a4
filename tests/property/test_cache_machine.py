"""The cache alone under hypothesis, against a shadow of its KV and a model of its promises.

The shadow keeps, for every slot, the exact prefix written there. The model keeps two bounds
computed from the requests alone: until when a prefix may be found at most, and how much of it must
be found at least. Neither knows a tree, a reference count or an eviction order. Every run draws an
eviction policy.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from engine.api import LeaseRequest, Quota
from engine.cache import BlockTable, EvictionPolicy, Fact, LeastRecentlyUsed, PrefixCache
from engine.cache.events import BlocksErased, Committed, Evicted, Expired, PromiseLost
from engine.cache.tree.prefix_tree import tree_blocks
from tests.fakes import FirstInFirstOut
from tests.property.machine_runs import case
from tests.strategies import NAMESPACES, leases, namespaces, quotas, tokens

Prefix = tuple[int, ...]


@dataclass(eq=False)
class Writer:
    """A sequence: its tokens and its grants."""

    namespace: bytes
    tokens: list[int]
    table: BlockTable
    leases: tuple[LeaseRequest, ...]
    started_s: float
    write: bool
    promises: list[tuple[float, int]] = field(default_factory=list)


class ShadowKv:
    """The content of each slot: a namespace, a KV group and the exact prefix up to that token."""

    def __init__(self, blocks: int, size: int, windows: tuple[int, ...] = ()) -> None:
        self.size, self.windows = size, windows
        self.slots: list[tuple[bytes, int, Prefix] | None] = [None] * (blocks * size)

    def copy(self, src: int, dst: int, count: int) -> None:
        """Copy the first `count` slots; the rest of the block counts as never written."""
        kept = self.slots[src * self.size : src * self.size + count]
        self.slots[dst * self.size : (dst + 1) * self.size] = kept + [None] * (self.size - count)

    def write(self, writer: Writer, start: int, end: int) -> None:
        for group, row in enumerate((writer.table.blocks, *writer.table.beside)):
            for at in range(start, end):
                slot = row[at // self.size] * self.size + at % self.size
                self.slots[slot] = (writer.namespace, group, tuple(writer.tokens[: at + 1]))

    def read(self, writer: Writer) -> None:
        """Check that every slot that the next query reads holds the writer's own prefix."""
        kv_tokens = writer.table.kv_tokens
        firsts = (0, *(max(0, kv_tokens - window + 1) for window in self.windows))
        for group, row in enumerate((writer.table.blocks, *writer.table.beside)):
            for at in range(firsts[group], kv_tokens):
                assert row[at // self.size] >= 0, f"a hole at {at} of group {group}"
                slot = row[at // self.size] * self.size + at % self.size
                own = (writer.namespace, group, tuple(writer.tokens[: at + 1]))
                assert self.slots[slot] == own, f"slot {slot} holds {self.slots[slot]}, not {own}"


class CacheMachine(RuleBasedStateMachine):
    """Sequences begin, compute, fork, are preempted and end; time passes; prefixes are erased."""

    windows: tuple[int, ...] = ()

    @initialize(
        blocks=st.integers(6, 16),
        size=st.sampled_from([2, 4]),
        shares=st.tuples(quotas, quotas, quotas),
        is_joint=st.booleans(),
        may_change=st.booleans(),
        policy=st.sampled_from([LeastRecentlyUsed(), FirstInFirstOut()]),
    )
    def start(
        self,
        blocks: int,
        size: int,
        shares: tuple[Quota, Quota, Quota],
        is_joint: bool,
        may_change: bool,
        policy: EvictionPolicy,
    ) -> None:
        """Make a cache. `is_joint`: one payer has the first two namespaces under one quota.
        `may_change`: quotas and payers change.
        """
        self.size, self.may_change = size, may_change
        self.in_trees: Counter[bytes] = Counter()
        self.cache = PrefixCache(
            blocks=blocks,
            block_size=size,
            facts=self.note,
            eviction_policy=policy,
            windows=self.windows,
        )
        self.shadow = ShadowKv(blocks, size, self.windows)
        self.quotas = dict(zip(NAMESPACES, shares, strict=True))
        if is_joint:
            joint = structs.replace(shares[0], payer=b"both")
            self.quotas |= dict.fromkeys(NAMESPACES[:2], joint)
        self.now_s = 0.0
        self.live: list[Writer] = []
        self.preempted: list[Writer] = []
        self.told_lost = 0
        self.past: list[Writer] = []
        self.touched: dict[tuple[bytes, Prefix], float] = defaultdict(lambda: -math.inf)
        self.promised: list[tuple[bytes, Prefix, float]] = []

    def note(self, fact: Fact) -> None:
        """Count the blocks that enter and leave a namespace's tree, by the facts."""
        if isinstance(fact, Committed):
            self.in_trees[fact.namespace] += fact.new_blocks
        elif isinstance(fact, Evicted | Expired | BlocksErased):
            self.in_trees[fact.namespace] -= fact.blocks
        elif isinstance(fact, PromiseLost):
            self.told_lost += fact.blocks

    # -- the model ----------------------------------------------------------------------------

    def latest_end(self, namespace: bytes, prefix: Prefix) -> float:
        """Return when this block's prefix stops being found at the latest: the longest lease on it.

        -inf: no request of the namespace wrote it. A request without leases, or a block beyond the
        leases of its request, has no limit.
        """
        start = (len(prefix) - 1) // self.size * self.size
        shared = prefix[: start + 1]  # one limit per block, for each use of a part
        writers = [w for w in [*self.live, *self.past] if w.namespace == namespace]
        if not any(tuple(w.tokens[: len(prefix)]) == prefix for w in writers):
            return -math.inf
        at_s = -math.inf
        for writer in writers:
            if tuple(writer.tokens[: start + 1]) != shared:
                continue
            covering = [lease for lease in writer.leases if lease.tokens > start]
            if not covering:
                return math.inf
            for lease in covering:
                kind = lease.retention
                renewed = kind.renewed_on_read and kind.clock != "absolute"
                base_s = self.touched[namespace, shared] if renewed else 0.0
                limit_s = math.inf if kind.limit_s is None else kind.limit_s
                at_s = max(at_s, max(base_s, writer.started_s) + limit_s)
        return at_s

    def extend(self, namespace: bytes, prompt: Prefix) -> int:
        """Return how many tokens of a prompt may be found now at most."""
        for at in range(1, len(prompt)):
            ends_s = self.latest_end(namespace, prompt[:at])
            first = (at - 1) // self.size * self.size + 1
            pinned = any(
                writer.namespace == namespace and tuple(writer.tokens[:first]) == prompt[:first]
                for writer in self.live
            )  # in use: a clock from the last use has not started
            if ends_s == -math.inf or (ends_s <= self.now_s and not pinned):
                return at - 1
        return len(prompt) - 1

    def touch(self, writer: Writer) -> None:
        for at in range(1, len(writer.tokens) + 1):
            self.touched[writer.namespace, tuple(writer.tokens[:at])] = self.now_s

    # -- rules --------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        asked=leases,
        write=st.sampled_from([True] * 4 + [False]),
        whole=st.sampled_from([True, True, False]),
    )
    def begin(
        self, data: st.DataObject, asked: tuple[LeaseRequest, ...], write: bool, whole: bool
    ) -> None:
        """Begin a request; `whole`: compute it to its end at once, and end it."""
        namespace, prompt = self.draw_prompt(data)
        writer = self.admit(namespace, prompt, asked, write)
        if whole and self.compute_slice(writer, len(writer.tokens)):
            self.finish(writer, keep=True)

    @rule(namespace=namespaces, words=st.lists(tokens, min_size=3, max_size=5), asked=leases)
    def flood(self, namespace: bytes, words: list[Prefix], asked: tuple[LeaseRequest, ...]) -> None:
        """Run many prompts in a row, so that blocks must be evicted."""
        for word in words:
            writer = self.admit(namespace, (*word, *word)[:16], asked, True)
            self.compute_slice(writer, len(writer.tokens))
            self.finish(writer, keep=True)

    def draw_prompt(self, data: st.DataObject) -> tuple[bytes, Prefix]:
        """Draw a new prompt, or an earlier one with its end cut off and tokens added."""
        said = [(w.namespace, tuple(w.tokens)) for w in [*self.past[-6:], *self.live[-2:]]]
        if not said or not data.draw(st.sampled_from([True, True, False])):
            return data.draw(namespaces), data.draw(tokens)
        namespace, before = data.draw(st.sampled_from(said))
        start = before[: len(before) - data.draw(st.sampled_from([0, 0, 1, 3]))]
        return namespace, (*start, *data.draw(tokens))[:16]

    def admit(
        self, namespace: bytes, prompt: Prefix, asked: tuple[LeaseRequest, ...], write: bool
    ) -> Writer:
        found = self.cache.peek(namespace, prompt, self.now_s)
        reach = self.extend(namespace, prompt)
        quota = self.quotas[namespace]
        table = self.cache.begin(
            namespace, prompt, self.now_s, quota=quota, leases=asked, write=write
        )
        writer = Writer(namespace, list(prompt), table, asked, self.now_s, write)
        whole = found.cached_tokens // self.size * self.size
        if not self.windows:
            assert table.kv_tokens in (found.cached_tokens, whole), (
                "what peek said, or its whole blocks"
            )
        assert table.kv_tokens <= reach, "more found than may be"
        assert [grant.lease_id for grant in table.leases] == [lease.lease_id for lease in asked]
        self.live.append(writer)
        self.touch(writer)
        for grant, lease in zip(table.leases, asked, strict=True):
            assert grant.tokens <= min(lease.tokens, len(prompt)), "granted more than was asked"
            assert (grant.outcome == "granted") == (grant.tokens == min(lease.tokens, len(prompt)))
        writer.promises = self.promises_of(writer)
        return writer

    def promises_of(self, writer: Writer) -> list[tuple[float, int]]:
        """Return until when at least each grant of a writer promises anything, and how many
        tokens."""
        found = []
        for grant, lease in zip(writer.table.leases, writer.leases, strict=True):
            kind = lease.retention
            promise_s = (kind.limit_s or 0.0) if kind.pinned else kind.promise_s
            if promise_s and writer.write:
                found.append((writer.started_s + promise_s, grant.tokens))
        return found

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def preempt(self, data: st.DataObject, keep: bool) -> None:
        """Preempt a sequence; one without promises ends."""
        writer = data.draw(st.sampled_from(self.live))
        tokens_now = list(writer.tokens)
        if not self.cache.suspend(writer.table, writer.tokens, self.now_s, keep=keep):
            self.finish(writer, keep=keep)
            return
        self.touch(writer)
        self.live.remove(writer)
        self.preempted.append(writer)
        if writer.write:
            self.past.append(replace(writer, tokens=tokens_now))
        if not self.windows:  # there, a prefix stands where its windows are promised
            self.keep_promises(writer, writer.table.kv_tokens)

    @precondition(lambda self: self.preempted)
    @rule(data=st.data(), gives_up=st.sampled_from([False, False, True]))
    def begin_again(self, data: st.DataObject, gives_up: bool) -> None:
        """Begin a preempted sequence again: what it was promised and has not run out is promised
        again; where windows are cut, or told as lost."""
        writer = data.draw(st.sampled_from(self.preempted))
        self.preempted.remove(writer)
        if gives_up:
            self.cache.release(writer.table, writer.tokens, self.now_s, keep=False)
            return
        reach = self.extend(writer.namespace, tuple(writer.tokens))
        told, before = self.told_lost, self.promised_blocks(writer.promises)
        writer.table = self.cache.begin(
            writer.namespace,
            writer.tokens,
            self.now_s,
            quota=self.quotas[writer.namespace],
            leases=writer.leases,
            write=writer.write,
            suspended=writer.table,
        )
        assert writer.table.kv_tokens <= reach, "more found than may be"
        writer.promises = self.promises_of(writer)
        fewer = before - self.promised_blocks(writer.promises)
        told = self.told_lost - told if self.windows else 0
        assert fewer <= told, f"{fewer} promised blocks dropped by a preemption"
        self.live.append(writer)
        self.touch(writer)

    def promised_blocks(self, promises: list[tuple[float, int]]) -> int:
        """Return how many blocks promises cover whose time is not over."""
        tokens_now = [granted for until_s, granted in promises if until_s > self.now_s]
        return -(-max(tokens_now, default=0) // self.size)

    @rule(data=st.data())
    def peek(self, data: st.DataObject) -> None:
        """Check that a peek changes nothing and reports no more than may be found."""
        namespace, prompt = self.draw_prompt(data)
        before = self.cache.stats()
        found = self.cache.peek(namespace, prompt, self.now_s)

        assert found == self.cache.peek(namespace, prompt, self.now_s)
        after = self.cache.stats()
        assert (before.pinned, before.copied_blocks_total) == (
            after.pinned,
            after.copied_blocks_total,
        )

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 6))
    def compute(self, data: st.DataObject, count: int) -> None:
        """Compute a slice of a sequence: room, copies, writing, commit."""
        writer = data.draw(st.sampled_from(self.live))
        start = writer.table.kv_tokens
        if start == len(writer.tokens):
            writer.tokens.append(data.draw(st.integers(0, 1)))
            self.touch(writer)
        self.compute_slice(writer, min(start + count, len(writer.tokens)))

    def compute_slice(self, writer: Writer, end: int) -> bool:
        table, start = writer.table, writer.table.kv_tokens
        before = (list(table.blocks), table.version)
        if not self.cache.grow(table, end, self.now_s):
            assert before == (list(table.blocks), table.version), "no room, and yet a change"
            return False
        self.launch()
        self.shadow.write(writer, start, end)
        self.cache.commit(table, writer.tokens, end, self.now_s)
        for other in self.live:
            self.shadow.read(other)
        return True

    def launch(self) -> None:
        for copy in self.cache.take_copies():
            self.shadow.copy(copy.src, copy.dst, copy.tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 6))
    def take_room(self, data: st.DataObject, count: int) -> None:
        """Take room for a slice that is then not computed."""
        writer = data.draw(st.sampled_from(self.live))
        end = min(writer.table.kv_tokens + count, len(writer.tokens))
        if self.cache.grow(writer.table, end, self.now_s):
            self.launch()

    @precondition(lambda self: self.may_change)
    @rule(
        namespace=namespaces,
        quota=quotas,
        payer=st.sampled_from([b"", b"both"]),
        told=st.booleans(),
    )
    def change_quota(self, namespace: bytes, quota: Quota, payer: bytes, told: bool) -> None:
        """Change a tenant's quota during its requests; `told`: before its next request."""
        self.quotas[namespace] = structs.replace(quota, payer=payer)
        if told:
            self.cache.set_quota(structs.replace(quota, payer=payer or namespace))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.launch()
        writer = data.draw(st.sampled_from(self.live))
        table = self.cache.fork(writer.table)
        twin = Writer(
            writer.namespace,
            list(writer.tokens),
            table,
            writer.leases,
            writer.started_s,
            writer.write,
        )
        self.live.append(twin)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: st.DataObject, keep: bool) -> None:
        self.finish(data.draw(st.sampled_from(self.live)), keep=keep)

    def finish(self, writer: Writer, *, keep: bool) -> None:
        kv_tokens = writer.table.kv_tokens
        self.touch(writer)
        self.cache.release(writer.table, writer.tokens, self.now_s, keep=keep)
        self.live.remove(writer)
        if writer.write:
            self.past.append(writer)
        self.keep_promises(writer, kv_tokens)

    def keep_promises(self, writer: Writer, kv_tokens: int) -> None:
        """Note what a writer was promised of its first `kv_tokens` tokens."""
        for until_s, granted in writer.promises:
            whole = min(granted, kv_tokens) // self.size * self.size
            if writer.write and whole:
                self.promised.append((writer.namespace, tuple(writer.tokens[:whole]), until_s))

    @rule(seconds=st.sampled_from([1.0, 4.0, 5.0, 10.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def expire(self) -> None:
        self.cache.expire(self.now_s)

    @rule(namespace=namespaces)
    def erase(self, namespace: bytes) -> None:
        """Erase a namespace; its running sequences commit nothing more."""
        self.cache.erase(namespace)
        self.forget(namespace, ())

    @rule(data=st.data())
    def erase_a_prefix(self, data: st.DataObject) -> None:
        namespace, said = self.draw_prompt(data)
        prefix = said[: data.draw(st.integers(1, len(said)))]
        self.cache.erase(namespace, tokens=prefix)
        self.forget(namespace, prefix)
        for reader in (prefix, (*prefix, 0), (*prefix, 1)):
            found = self.cache.peek(namespace, reader, self.now_s).cached_tokens
            assert found <= len(prefix), "something under an erased prefix is found"

    @rule(namespace=namespaces, lease_id=st.sampled_from(["a", "b"]))
    def erase_a_lease(self, namespace: bytes, lease_id: str) -> None:
        self.cache.erase(namespace, lease_id=lease_id)
        self.forget(namespace, None)

    def forget(self, namespace: bytes, prefix: Prefix | None) -> None:
        """Drop the model's promises and writes of a namespace, and hits beyond `prefix` (None:
        any).
        """
        self.promised = [entry for entry in self.promised if entry[0] != namespace]
        theirs = [writer for writer in self.past if writer.namespace == namespace]
        for writer in [*self.live, *self.preempted]:
            if writer.namespace == namespace:
                writer.promises.clear()
                if writer.write:
                    theirs.append(replace(writer, tokens=list(writer.tokens), write=False))
                writer.write = False
        self.past = [writer for writer in self.past if writer.namespace != namespace]
        for writer in theirs if prefix != () else ():
            if prefix and tuple(writer.tokens[: len(prefix)]) == prefix:
                writer.tokens = writer.tokens[: len(prefix)]
            self.past.append(writer)

    # -- invariants ---------------------------------------------------------------------------

    @invariant()
    def the_checker_passes(self) -> None:
        """Recount the cache, and check blocks = free + cached + pinned."""
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        stats = self.cache.stats()
        assert stats.free + stats.cached + stats.pinned == stats.blocks
        for namespace in NAMESPACES:
            root = self.cache.tree_root(namespace)
            nodes = [] if root is None else [node for node in root.subtree() if node.block >= 0]
            blocks = sum(len(tree_blocks(node)) for node in nodes)
            assert self.in_trees[namespace] == blocks, "what facts say that a tree has"
        held = {block for writer in self.live for block in writer.table.blocks}
        assert stats.pinned >= len(held), "a block of a table is not pinned"
        together: dict[bytes, int] = defaultdict(int)
        for use in self.cache.namespaces():
            together[self.quotas[use.namespace].payer or use.namespace] += use.blocks
        for namespace, quota in self.quotas.items():
            ceiling, payer = quota.ceiling_blocks, quota.payer or namespace
            if self.may_change:
                continue  # blocks above a new ceiling stay until they are needed
            assert ceiling is None or together[payer] <= ceiling, "above its ceiling"

    @invariant()
    def nothing_is_found_after_its_limit(self) -> None:
        """Neither another namespace's tokens, nor erased ones, nor any at or after their limit
        (rule *Lease*).
        """
        for writer in [*getattr(self, "past", ())][-4:]:
            for namespace in NAMESPACES:
                prompt = (*writer.tokens, 0)
                found = self.cache.peek(namespace, prompt, self.now_s).cached_tokens
                assert found <= self.extend(namespace, prompt), "more found than may be"

    @invariant()
    def promises_are_kept(self) -> None:
        """Granted and computed blocks are found until their promise ends (rule *Grant*)."""
        for namespace, prefix, until_s in getattr(self, "promised", ()):
            if self.now_s < until_s:
                found = self.cache.peek(namespace, (*prefix, 0), self.now_s).cached_tokens
                assert found >= len(prefix), f"{found} of {len(prefix)} promised until {until_s}"

    def teardown(self) -> None:
        """End every sequence: no block stays pinned, and an erasure frees every block."""
        if not hasattr(self, "cache"):
            return
        for writer in self.live:
            self.cache.release(writer.table, writer.tokens, self.now_s)
        for writer in self.preempted:
            self.cache.release(writer.table, writer.tokens, self.now_s, keep=False)
        self.launch()
        assert self.cache.stats().pinned == 0
        for namespace in NAMESPACES:
            self.cache.erase(namespace)
        assert self.cache.stats().free == self.cache.blocks
        self.cache.check()


TestCacheMachine = case(CacheMachine, 50)
