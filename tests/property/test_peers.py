"""Two engines that fetch prefixes from each other, over the token oracle: no answer depends on it.

Requests, evictions, erasures, cancellations and bad weather in any order. A copy that was damaged,
came late, or is of another namespace would show as a wrong token or as a hit on what was never
written; a slot that stays held would show when all is erased.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from engine.api import CacheGrant, Erase, LeaseRequest, Peer, Quota, Request, Retention, Sampling
from engine.cache import BlockTable, PrefixCache
from engine.cache.moved_blocks import MovedBlocks
from engine.config import EngineConfig, LevelsConfig
from engine.errors import InvariantViolation
from engine.levels.levels import Levels
from engine.levels.peers.fetching import PeerFetching
from engine.levels.peers.near_fetching import NearFetching
from engine.levels.peers.sharing import Sharing
from engine.levels.places import RunPlaces
from engine.moves import (
    FetchBlocks,
    FetchedBlocks,
    FetchedRun,
    FetchRuns,
    LentBlocks,
    RunReader,
    ShareRuns,
)
from tests.checkers import World
from tests.fake_levels import Content, FakeTransferEngine, Weather, digest
from tests.fakes import BROKEN, FakeRunner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SIZE, BLOCKS, SLOTS = 2, 24, 32
NAMESPACES = (b"a", b"b")
CONFIG = LevelsConfig(host_mib=1, host_tokens_min=1)
LEASED = Retention("leased", promise_s=4, limit_s=30)
STEPS, REST_STEPS = 300, 300
POOL = b"pool"
QUIET = Weather(polls_max=3, fails=0.0)


@dataclass(eq=False)
class _Arrived:
    """A `RunReader`: what came of one fetch and was not told yet."""

    link: Link
    command: FetchRuns
    left: deque[int] = field(init=False)
    sent: deque[tuple[bytes, float | None, Content]] = field(default_factory=deque)
    is_over: bool = False

    def __post_init__(self) -> None:
        self.left = deque(self.command.slots)

    def take(self, check: bytes, limit_s: float | None, content: memoryview) -> None:
        (slot,) = struct.unpack("<I", content)
        self.sent.append((check, limit_s, self.link.source.memory.contents[slot]))
        self.link.unsent.append(self)

    def lend(self, lent: LentBlocks) -> None:
        raise AssertionError("copies were asked for")

    def end(self, why: str) -> None:
        self.is_over = True


@dataclass(eq=False)
class _Lent:
    """A `RunReader` of one near fetch. `blocks`: what it may read, theirs and ours; `done`: how
    many it has read."""

    command: FetchBlocks
    blocks: list[tuple[int, int]] | None = None
    limits_s: Sequence[float | None] = ()
    done: int = 0
    ends: list[str] = field(default_factory=list)
    has_returned: bool = False

    def take(self, check: bytes, limit_s: float | None, content: memoryview) -> None:
        raise AssertionError("blocks were asked for")

    def lend(self, lent: LentBlocks) -> None:
        assert lent.pool == POOL
        self.blocks = list(zip(lent.blocks, self.command.blocks, strict=False))
        self.limits_s = lent.limits_s[: len(self.blocks)]

    def end(self, why: str) -> None:
        self.ends.append(why)


class Pools:
    """`engine.moves.NearPools`, whose blocks the links copy."""

    domain, handle, bytes_per_s = "host", POOL, 1e12

    def read(self, handle: bytes, theirs: Sequence[int], ours: Sequence[int]) -> None: ...

    def let_go_ended(self) -> None: ...

    def close(self) -> None: ...


class Link:
    """`engine.moves.Peers` and `NearPeers` from one engine to the other one."""

    def __init__(self, chance: random.Random, weather: Weather, memory: FakeTransferEngine) -> None:
        self.source: Side
        self.memory = memory
        self.unsent: deque[_Arrived] = deque()
        self._chance, self._weather = chance, weather
        self.is_careless = False
        self._fetches: dict[int, _Arrived] = {}
        self._near: dict[int, _Lent] = {}
        self._stopped: set[int] = set()
        self.runner: Callable[[], FakeRunner]

    def fetch(self, command: FetchRuns) -> None:
        found = self._fetches[command.call_id] = _Arrived(self, command)
        wanted = ShareRuns(command.namespace, command.tokens, command.first, command.form.name)
        self.source.sharing().begin(wanted, found, self.source.world.clock())

    def stop(self, call_id: int) -> None:
        self._stopped.add(call_id)

    def poll(self) -> list[FetchedRun]:
        outcomes: list[FetchedRun] = []
        for call_id, one in list(self._fetches.items()):
            outcomes += self._some(call_id, one)
            if not one.left:
                del self._fetches[call_id]
                self._stopped.discard(call_id)
                self.source.sharing().leave(one)
        while self.unsent and self._chance.random() < 0.7:
            self.source.sharing().told_sent(self.unsent.popleft())
        return outcomes

    def close(self) -> None: ...

    def fetch_blocks(self, command: FetchBlocks) -> None:
        one = self._near[command.call_id] = _Lent(command)
        wanted = ShareRuns(command.namespace, command.tokens, command.first, "", is_near=True)
        self.source.sharing().begin(wanted, one, self.source.world.clock())

    def poll_blocks(self) -> list[FetchedBlocks]:
        outcomes: list[FetchedBlocks] = []
        for call_id, one in list(self._near.items()):
            if (outcome := self._read_some(call_id, one)) is not None:
                outcomes.append(outcome)
                del self._near[call_id]
                self._stopped.discard(call_id)
                self.source.sharing().leave(one)
        return outcomes

    def _read_some(self, call_id: int, one: _Lent) -> FetchedBlocks | None:
        """Copy some of the blocks that are lent, often none; return the outcome if it has one."""
        if call_id in self._stopped or 5 * self._chance.random() < self._weather.fails:
            return FetchedBlocks(call_id, "lost")
        if one.ends:
            if one.ends[0]:
                return FetchedBlocks(call_id, "lacking")
            is_whole = one.done == len(one.command.blocks)
            return FetchedBlocks(call_id, "" if is_whole else "lacking", tuple(one.limits_s))
        assert one.blocks is not None
        for _ in range(self._chance.randint(0, 2)):
            if one.done < len(one.blocks):
                theirs, ours = one.blocks[one.done]
                content = self.source.link.runner().slots[theirs * SIZE : (theirs + 1) * SIZE]
                self.runner().slots[ours * SIZE : (ours + 1) * SIZE] = content
                one.done += 1
        if one.done == len(one.blocks) and not one.has_returned and self._chance.random() < 0.5:
            one.has_returned = True
            self.source.sharing().returned(one)
        return None

    def _some(self, call_id: int, one: _Arrived) -> list[FetchedRun]:
        """Return some of the outcomes of a fetch, often none."""
        found: list[FetchedRun] = []
        for _ in range(self._chance.randint(0, 2)):
            if not one.left:
                break
            if one.sent and self._chance.random() >= self._weather.fails:
                check, limit_s, content = one.sent.popleft()
                is_damaged = self._chance.random() < self._weather.fails
                came = (BROKEN,) * len(content) if is_damaged else content
                self.memory.write(one.left.popleft(), came, one.command.form.name)
                if digest(came) == check or self.is_careless:
                    found.append(FetchedRun(call_id, "", check, limit_s))
                    continue
                found.append(FetchedRun(call_id, "damaged"))
            elif not (one.sent or one.is_over or call_id in self._stopped):
                break
            found += [FetchedRun(call_id, "lost")] * len(one.left)
            one.left.clear()
        return found


class Side:
    """One engine, with its host memory and its link to the other one."""

    def __init__(self, chance: random.Random, weather: Weather) -> None:
        self.memory: FakeTransferEngine
        self.link: Link

        def below(cache: PrefixCache, runner: Callable[[], FakeRunner]) -> Levels:
            self.memory = FakeTransferEngine(runner, SLOTS, chance, weather)
            self.link = Link(chance, weather, self.memory)
            self.link.runner = runner
            view = lambda slot, size: memoryview(struct.pack("<I", slot))  # noqa: E731
            link, own = self.link, Pools()
            return Levels(cache, CONFIG, self.memory, peers=link, near=link, pools=own, view=view)

        self.world = World(
            EngineConfig(step_tokens_max=16, sequences_max=4),
            blocks=BLOCKS,
            block_size=SIZE,
            context_tokens=32,
            make_levels=below,
        )

    def levels(self) -> Levels:
        assert self.world.core.levels is not None
        return self.world.core.levels

    def sharing(self) -> Sharing:
        sharing = self.levels().sharing
        assert sharing is not None
        return sharing

    def near_fetching(self) -> NearFetching:
        fetching = self.levels().near_fetching
        assert fetching is not None
        return fetching

    def is_busy(self) -> bool:
        return self.world.core.has_work() or self.levels().is_busy


def pair_of(chance: random.Random, weather: Weather) -> tuple[Side, Side]:
    """Return two engines that fetch from each other."""
    sides = Side(chance, weather), Side(chance, weather)
    for one, other in zip(sides, reversed(sides), strict=True):
        one.link.source = other
        other.world.written = one.world.written
    return sides


def play(seed: int, weather: Weather, near: float = 0.5) -> tuple[int, int, int]:
    """Play one life of two engines; return the runs that came as copies and as blocks, and the host
    bytes left. `near`: the part of requests whose peer is near."""
    chance = random.Random(seed)
    sides = pair_of(chance, weather)
    prompts = [tuple(chance.randrange(3) for _ in range(24)) for _ in range(3)]
    for number in range(STEPS):
        side = chance.choice(sides)
        act = chance.random()
        if act < 0.25:
            prompt = chance.choice(prompts)[: chance.randint(2, 24)]
            _submit(side.world, chance, str(number), prompt, is_near=chance.random() < near)
        elif act < 0.27:
            namespace = chance.choice(NAMESPACES)
            before = side.world.written.get(namespace, [])
            for one in chance.sample(sides, 2):  # what waits in either has matched before
                one.world.written[namespace] = before
                one.world.erase(namespace)
        elif act < 0.3 and side.world.live:
            side.world.cancel(chance.choice(list(side.world.live)))
        elif act < 0.32:
            for one in sides:
                one.world.clock.advance(chance.choice((1.0, 10.0, 130.0)))
        side.world.step()
    rest(sides)
    for namespace in NAMESPACES:
        for one in sides:
            one.world.erase(namespace)
    for one in sides:
        one.world.settle()
    levels = [level for one in sides for level in one.world.core.stats().levels]
    peers = [one for one in levels if one.name == "peer"]
    copies = sum(one.fetched_total for one in peers)
    blocks = sum(one.near_fetching().fetched for one in sides)
    return copies, blocks, sum(one.used_bytes for one in levels if one.name == "host")


def rest(sides: tuple[Side, Side]) -> None:
    """Step until both have nothing to do."""
    left = REST_STEPS
    while any(one.is_busy() for one in sides):
        assert left, "no end"
        left -= 1
        for one in sides:
            one.world.clock.advance(0.5)
            one.world.step()


def erase_while_fetching(seed: int, *, is_near: bool = False) -> int:
    """Erase a prefix in an engine that has begun to fetch it, before the other one hears of that;
    return the hit of a request that comes later."""
    chance = random.Random(seed)
    sides = source, reader = pair_of(chance, Weather(polls_max=3, fails=0.0))
    prompt = tuple(chance.randrange(3) for _ in range(24))
    asked = Request("a", prompt, 1, CacheGrant(b"a", Quota(payer=b"p")), Sampling(temperature=0))
    source.world.submit(asked)
    rest(sides)
    peer = Peer("other", "h", 1, len(prompt), b"", is_near)
    for name in ("b", "c"):
        reader.world.submit(replace(asked, request_id=name, peer=peer))
    while not (reader.near_fetching() if is_near else reader.levels().fetching):
        reader.world.step()
    reader.world.erase(b"a")
    for _ in range(STEPS):  # in which no deadline passes
        for one in sides:
            one.world.step()
    rest(sides)
    reader.world.submit(replace(asked, request_id="d"))
    rest(sides)
    started = reader.world.streams["d"].started
    assert started is not None
    return started.cached_tokens


def _submit(
    world: World, chance: random.Random, name: str, prompt: tuple[int, ...], *, is_near: bool
) -> None:
    namespace = chance.choice(NAMESPACES)
    leases = (LeaseRequest(len(prompt), LEASED, name),) if chance.random() < 0.2 else ()
    grant = CacheGrant(namespace, Quota(payer=b"p"), leases=leases)
    request = Request(name, prompt, chance.randint(1, 4), grant, Sampling(temperature=0))
    if chance.random() < 0.8:
        request = replace(request, peer=Peer("other", "h", 1, len(prompt), b"", is_near))
    world.submit(request)


@pytest.mark.parametrize("seed", range(10))
def test_what_is_fetched_changes_no_answer_and_leaves_nothing_held(seed: int) -> None:
    """`World` compares each token with that of the sequence alone."""
    weather = Weather(polls_max=3, fails=0.1 if seed % 2 else 0.0)
    copies, blocks, left = play(seed, weather)
    assert copies + blocks > 0
    assert left == 0


def test_prefixes_come_as_copies_and_as_blocks() -> None:
    """Else the test above would say nothing of one of them."""
    copies, blocks, _ = map(sum, zip(*(play(seed, QUIET) for seed in range(4)), strict=True))
    assert min(copies, blocks) > 0


@pytest.mark.parametrize("is_near", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_what_is_erased_is_not_brought_back(seed: int, is_near: bool) -> None:
    """Nor by a second request that waits for the same fetch."""
    assert erase_while_fetching(seed, is_near=is_near) == 0


def _play_all(near: float = 0.0) -> None:
    for seed in range(20):
        *_, left = play(seed, Weather(polls_max=3, fails=0.1), near)
        assert left == 0


def test_blocks_that_are_read_and_not_held_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been evicted meanwhile, and is of another prompt now, gives another token."""
    begin, hold = Sharing.begin, MovedBlocks.hold
    inside = list[bool]()

    def faulty_begin(self: Sharing, wanted: ShareRuns, reader: RunReader, now_s: float) -> None:
        inside.append(True)
        begin(self, wanted, reader, now_s)
        inside.clear()

    def faulty_hold(self: MovedBlocks, account: Any, path: Any, *more: Any) -> BlockTable:
        return hold(self, account, [] if inside else path, *more)

    monkeypatch.setattr(Sharing, "begin", faulty_begin)
    monkeypatch.setattr(MovedBlocks, "hold", faulty_hold)
    with pytest.raises((AssertionError, InvariantViolation)):
        _play_all(near=1.0)


def test_blocks_that_were_lent_too_long_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that does not care whether they were held till then has what is there now."""

    def faulty(self: _Lent, why: str) -> None:
        self.ends.append("" if why == "late" else why)

    monkeypatch.setattr(_Lent, "end", faulty)
    with pytest.raises((AssertionError, InvariantViolation)):
        _play_all(near=1.0)


def test_bytes_that_nobody_compared_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above could fail: a damaged copy that counts gives another token."""
    made = Link.fetch

    def careless(self: Link, command: FetchRuns) -> None:
        self.is_careless = True
        made(self, command)

    monkeypatch.setattr(Link, "fetch", careless)
    with pytest.raises((AssertionError, InvariantViolation)):
        _play_all()


def test_slots_that_stay_held_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not come would take room for ever."""
    turn, release = PeerFetching.turn, RunPlaces.release
    inside = list[bool]()

    def faulty_turn(self: PeerFetching, now_s: float) -> None:
        inside.append(True)
        turn(self, now_s)
        inside.clear()

    def faulty_release(self: RunPlaces, slot: int) -> None:
        if not inside:
            release(self, slot)

    monkeypatch.setattr(PeerFetching, "turn", faulty_turn)
    monkeypatch.setattr(RunPlaces, "release", faulty_release)
    with pytest.raises((AssertionError, InvariantViolation)):
        _play_all()


def test_what_comes_after_an_erasure_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch that does not know of the erasure would bring back what was erased."""
    erase = Levels.erase

    def faulty(self: Levels, call: Erase) -> Any:
        told = erase(self, call)
        self.places.epochs[call.namespace] -= 1
        return told

    monkeypatch.setattr(Levels, "erase", faulty)
    monkeypatch.setattr(PeerFetching, "erase", lambda self, namespace, now_s: None)
    with pytest.raises((AssertionError, InvariantViolation)):
        assert not any(map(erase_while_fetching, range(10)))
