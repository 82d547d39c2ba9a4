"""Promises over the levels, against a model computed from the requests alone: every block that was
promised and computed is on some level until its promise ends, or was told as lost, once; what is
promised twice is charged once; what is promised already needs no further room.

A pool of few blocks, a disk of few records, two payers, two tokens. Moves are late or fail, records
are lost under the engine, namespaces and leases are erased.
"""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.api import (
    CacheGrant,
    Erase,
    LeaseRequest,
    Namespace,
    Quota,
    Request,
    Retention,
    Sampling,
)
from engine.cache import Fact
from engine.cache.events import PromiseLost
from engine.cache.tree.leases import promised_seconds
from engine.config import EngineConfig, LevelsConfig
from tests.checkers import World, expect
from tests.fake_levels import LevelsBelow
from tests.property.machine_runs import case
from tests.strategies import tokens

NAMESPACES = (b"north", b"south")
CLASSES = (
    Retention("short", promise_s=20, limit_s=40),
    Retention("kept", promise_s=60),
    Retention("pinned", limit_s=90, clock="absolute", renewed_on_read=False, pinned=True),
)
Block = tuple[Namespace, tuple[int, ...]]
"""A namespace, and the tokens up to the end of a block."""


class PromisesMachine(LevelsBelow, RuleBasedStateMachine):
    """Requests with leases over a small pool, host memory and disk."""

    windows: tuple[int, ...] = ()

    @initialize(
        blocks=st.integers(8, 14),
        slots=st.sampled_from([6, 24, 60]),
        records_max=st.sampled_from([6, 16, 10**6]),
        floor=st.sampled_from([0, 2]),
        ceiling=st.sampled_from([None, 6]),
        promised_max=st.sampled_from([None, 4, 12]),
        depth=st.integers(1, 2),
        step_tokens=st.sampled_from([16, 16, 4]),
    )
    def start(
        self,
        blocks: int,
        slots: int,
        records_max: int,
        floor: int,
        ceiling: int | None,
        promised_max: int | None,
        depth: int,
        step_tokens: int,
    ) -> None:
        """Make an engine."""
        config = LevelsConfig(
            host_mib=1,
            disk_gib=1.0,
            host_tokens_min=1,
            disk_tokens_min=1,
            host_keeps_promises=not self.has_disk,
        )
        groups = 1 + len(self.windows)
        self.prepare(config, slots * groups, records_max)
        self.world = World(
            EngineConfig(step_tokens_max=step_tokens, sequences_max=4, queue_requests_max=8),
            blocks=blocks * groups,
            block_size=2,
            depth=depth,
            windows=self.windows,
            make_levels=self.make_levels,
        )
        self.world.cache.facts = self.note
        self.quotas = {
            b"north": Quota(floor_blocks=floor, promised_blocks_max=promised_max),
            b"south": Quota(ceiling_blocks=ceiling),
        }
        self.count = self.unmatched = 0
        self.promised: dict[Block, float] = {}
        self.known: dict[str, set[Block]] = {}
        self.doubtful: set[Block] = set()
        """Blocks whose record is gone, of which the engine may not know."""
        self.asked: dict[str, tuple[Request, float, dict[Block, float]]] = {}

    def now_s(self) -> float:
        """See `LevelsBelow`."""
        return self.world.clock() if hasattr(self, "world") else 0.0

    def note(self, fact: Fact) -> None:
        """Count the promises that are told as lost."""
        if isinstance(fact, PromiseLost):
            self.unmatched += fact.blocks

    # -- rules --------------------------------------------------------------------------------

    @rule(
        namespace=st.sampled_from(NAMESPACES),
        prompt=tokens,
        again=st.booleans(),
        data=st.data(),
        ends=st.lists(st.tuples(st.integers(1, 14), st.sampled_from(CLASSES)), max_size=2),
    )
    def ask(
        self,
        namespace: bytes,
        prompt: tuple[int, ...],
        again: bool,
        data: st.DataObject,
        ends: list[tuple[int, Retention]],
    ) -> None:
        """Submit a request, often over what is promised already."""
        known = [path for space, path in self.promised_runs() if space == namespace]
        if again and known:
            prompt = (data.draw(st.sampled_from(known)) + prompt)[:14]
        leases = tuple(
            LeaseRequest(end, retention, f"{self.count}/{number}")
            for number, (end, retention) in enumerate(ends)
        )
        priority = data.draw(st.sampled_from([0, 0, 1]))  # it preempts what runs
        self.submit(namespace, prompt, leases, data.draw(st.sampled_from([1, 1, 3])), priority)

    def submit(
        self,
        namespace: bytes,
        prompt: tuple[int, ...],
        leases: tuple[LeaseRequest, ...],
        max_tokens: int,
        priority: int = 0,
    ) -> None:
        """Submit a request and run a step."""
        self.count += 1
        name = f"r{self.count}"
        request = Request(
            request_id=name,
            tokens=prompt,
            max_tokens=max_tokens,
            grant=CacheGrant(namespace, self.quotas[namespace], leases),
            sampling=Sampling(temperature=0),
            priority=priority,
        )
        self.asked[name] = request, self.world.clock(), {}
        self.known[name] = set(self.promised)
        self.world.submit(request)
        self.step(1, 0.0)

    @rule(steps=st.integers(1, 6), seconds=st.sampled_from([0.0, 0.0, 0.4, 3.0]))
    def step(self, steps: int, seconds: float) -> None:
        """Run some steps."""
        for _ in range(steps):
            self.world.clock.advance(seconds)
            self.world.step()
            self.take_grants()

    @rule(namespace=st.sampled_from(NAMESPACES), seed=st.integers(0, 5))
    def flood(self, namespace: bytes, seed: int) -> None:
        """Run prompts without leases, each twice, until device and host memory have no room."""
        chance = random.Random(seed)
        for prompt in [tuple(chance.randrange(2) for _ in range(14)) for _ in range(6)] * 2:
            self.submit(namespace, prompt, (), 1)
            self.settle()

    @precondition(lambda self: self.promised_runs())
    @rule(data=st.data(), fails=st.sampled_from([0.0, 0.0, 1.0]))
    def read_back(self, data: st.DataObject, fails: float) -> None:
        """Read what is promised, from levels that serve or do not."""
        namespace, path = data.draw(st.sampled_from(self.promised_runs()))
        before, self.weather.fails = self.weather.fails, fails
        self.submit(namespace, (*path, 0), (), 1)
        self.settle()
        self.weather.fails = before

    @rule()
    def settle(self) -> None:
        """Let everything come to rest."""
        while self.world.live:
            self.step(1, 0.0)
        self.world.settle()

    @rule(seconds=st.sampled_from([15.0, 25.0, 70.0]))
    def wait(self, seconds: float) -> None:
        """Let time pass, in steps between which the levels have turns."""
        for _ in range(10):
            self.step(1, seconds / 10)

    @rule(polls=st.integers(0, 3), fails=st.sampled_from([0.0, 0.0, 0.2, 1.0]))
    def change_weather(self, polls: int, fails: float) -> None:
        """Let moves become slower or faster, and fail more or less often."""
        self.weather.polls_max, self.weather.fails = polls, fails

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def lose_a_record(self, data: st.DataObject) -> None:
        """The disk loses a record, and with it those below; the engine learns of it at a read."""
        before = self.stored()
        self.disk.lose(data.draw(st.sampled_from(sorted(self.disk.records))))
        self.doubtful |= before - self.stored()

    @rule(namespace=st.sampled_from(NAMESPACES), lease=st.booleans(), data=st.data())
    def erase(self, namespace: bytes, lease: bool, data: st.DataObject) -> None:
        """Erase a namespace, or one lease of it."""
        ids = [one.lease_id for name in self.asked for one in self.asked[name][0].grant.leases]
        lease_id = data.draw(st.sampled_from(ids)) if lease and ids else None
        if lease_id is not None:
            self.world.core.erase(Erase(1, namespace, lease_id))
        else:
            self.world.erase(namespace)
            expect(self.promised_now(namespace) == 0, "promises of an erased namespace", namespace)
        self.promised = {one: at for one, at in self.promised.items() if one[0] != namespace}
        for name, (request, _, _) in list(self.asked.items()):
            if request.grant.namespace == namespace:
                del self.asked[name]

    # -- the model ----------------------------------------------------------------------------

    def take_grants(self) -> None:
        """Note what was granted, and once a request is done, what is promised."""
        for name, (request, submitted_s, owed) in list(self.asked.items()):
            stream = self.world.streams[name]
            if stream.started is not None and not owed:
                self.note_grants(request, submitted_s, owed)
            if stream.finished is None:
                continue
            del self.asked[name]
            for block, until_s in owed.items() if stream.finished.ending == "done" else ():
                self.promised[block] = max(until_s, self.promised.get(block, 0.0))

    def note_grants(self, request: Request, submitted_s: float, owed: dict[Block, float]) -> None:
        """Note the blocks that a request was promised; what was promised before is granted."""
        started = self.world.streams[request.request_id].started
        assert started is not None
        namespace, size = request.grant.namespace, self.world.block_size
        for grant, lease in zip(started.leases, request.grant.leases, strict=True):
            until_s = submitted_s + promised_seconds(lease.retention)
            for block in self.blocks_of(namespace, request.tokens[: grant.tokens]):
                owed[block] = max(until_s, owed.get(block, 0.0))
            covered = min(lease.tokens, len(request.tokens) - 1) // size * size  # may be matched
            blocks = self.blocks_of(namespace, request.tokens[:covered])
            known, now_s = self.known[request.request_id], self.world.clock() + 1.0
            if all(one in known and self.promised.get(one, 0.0) > now_s for one in blocks):
                expect(grant.tokens >= covered, "a promise that was there is clipped", grant)

    def blocks_of(self, namespace: bytes, tokens: tuple[int, ...]) -> list[Block]:
        """Return the blocks that a promise of these tokens promises."""
        size = self.world.block_size
        return [(namespace, tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def promised_runs(self) -> list[Block]:
        """Return what is promised, of KV group 0."""
        return sorted(self.promised)

    def is_there(self, block: Block) -> bool:
        """Return whether a level has a block."""
        namespace, path = block
        now_s, size = self.world.clock(), self.world.block_size
        if self.world.cache.peek(namespace, (*path, 2), now_s).cached_tokens >= len(path):
            return True
        copies = self.levels.places.match(namespace, (*path, 2), now_s)
        if len(copies) * size < len(path):
            return False
        return all(self.has_bytes(copy.slot, copy.record_id) for copy in copies)

    def stored(self) -> set[Block]:
        """Return the blocks of which the disk has records."""
        return {(one.namespace, self.disk.path(i)) for i, one in self.records.items()}

    def has_bytes(self, slot: int, record_id: int) -> bool:
        """Return whether a copy is where the engine believes it to be."""
        return slot >= 0 or record_id in self.records

    def promised_now(self, namespace: bytes) -> int:
        """Return the promised blocks of a namespace."""
        return sum(self.world.cache.use(namespace).promised.values())

    # -- invariants ---------------------------------------------------------------------------

    @invariant()
    def promises_are_kept_or_told(self) -> None:
        """Every promised block is on some level until its promise ends."""
        if not hasattr(self, "world"):
            return
        now_s = self.world.clock()
        self.doubtful -= self.stored()
        for block in self.doubtful:
            self.promised.pop(block, None)
        self.promised = {one: at for one, at in self.promised.items() if at > now_s}
        missing = [block for block in self.promised if not self.is_there(block)]
        expect(len(missing) <= self.unmatched, "promises that were not told as lost", missing)
        self.unmatched -= len(missing)
        for block in missing:
            del self.promised[block]

    @invariant()
    def promises_are_charged_once(self) -> None:
        """Those that are there count once, on whatever level; bounds hold on each."""
        if not hasattr(self, "world") or self.unmatched:
            return
        now_s = self.world.clock()
        due = Counter(one[0] for one, until_s in self.promised.items() if until_s > now_s)
        for namespace in NAMESPACES:
            has = self.promised_now(namespace)
            expect(has >= due[namespace], "promises that nobody pays for", has, due[namespace])
            account = self.world.cache.payer_account(namespace)
            most = self.quotas[namespace].promised_blocks_max
            if account is not None and most is not None:
                expect(account.promised_total <= most, "more than its quota", account.promised)

    def teardown(self) -> None:
        """Check that every promise ends."""
        if not hasattr(self, "world"):
            return
        self.weather.fails = 0.0
        self.settle()
        for _ in range(5):
            self.world.clock.advance(200.0)
            self.world.step()
        self.world.settle()
        for namespace in NAMESPACES:
            expect(self.promised_now(namespace) == 0, "a promise without an end", namespace)
        self.world.check()


class HostPromisesMachine(PromisesMachine):
    """The same without a disk: host memory keeps promises."""

    has_disk = False


TestPromisesMachine = case(PromisesMachine)
TestHostPromisesMachine = case(HostPromisesMachine)
