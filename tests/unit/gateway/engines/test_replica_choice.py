"""A model's replicas: each request goes where its prefix is, unless that queue is long."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine.api import (
    CacheGrant,
    Departed,
    GetDeparted,
    GetHeld,
    GetStats,
    Held,
    Request,
    Started,
    Submit,
    WatchPrefixes,
)
from engine.client.client import EngineConnection
from engine.errors import EngineUnavailable
from engine.statistics import LoadReport
from engine.strides import PrefixChanges, stride_digests
from gateway.engines.replicas import Replicas
from tests.fakes import ENGINE_INFO, FakeClock

INFO = replace(ENGINE_INFO, blocks=4_096, context_tokens=16_384)
IDLE = LoadReport(free_blocks=4_096, prefill_tokens_per_s=10_000.0)
PREFIX = 2_048


class RecordedEngine(EngineConnection):
    """An engine that accepts every request, computes nothing and tells what it is made to tell.
    Whoever asks for counts is answered at once."""

    def __init__(self, epoch: str) -> None:
        super().__init__()
        self.info = replace(INFO, epoch=epoch)
        self.sent: list[Request] = []
        self.asked = 0

    def post(self, command: object) -> None:
        """Record a request, and how often prefixes were asked for."""
        if isinstance(command, Submit):
            self.sent.append(command.request)
        elif isinstance(command, GetStats):
            self.receive([replace(self.stats, call_id=command.call_id)])
        elif isinstance(command, GetHeld):
            self.receive([Held(command.call_id, ())])
        elif isinstance(command, GetDeparted):
            self.receive([Departed(command.call_id, ())])
        self.asked += isinstance(command, WatchPrefixes)

    async def close(self) -> None:
        """Do nothing."""

    def beat(self, waiting_tokens: int = 0) -> None:
        """Tell a load that counts all that was sent."""
        self.receive([replace(IDLE, accepted=len(self.sent), waiting_tokens=waiting_tokens)])

    def start(self, cached_tokens: int = 0, *, is_told: bool = True) -> None:
        """Start and compute the request that was sent last; `is_told`: tell what it wrote."""
        last = self.sent[-1]
        self.receive([Started(last.request_id, len(last.tokens), cached_tokens)])
        if is_told:
            written = b"".join(stride_digests(last.grant.namespace, last.tokens))
            self.receive([PrefixChanges(device_added=written)])


def request(tenant: int, turn: int = 0, *, write: bool = True) -> Request:
    """Return a request of a tenant with a system prompt of 2,048 tokens."""
    tokens = (*([tenant] * PREFIX), *([50 + turn] * 32))
    grant = CacheGrant(b"n%d" % tenant, write=write)
    return Request(f"{tenant}-{turn}", tokens, max_tokens=8, grant=grant)


@pytest.fixture
def engines() -> list[RecordedEngine]:
    return [RecordedEngine("a"), RecordedEngine("b")]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def replicas_of(engines: list[RecordedEngine], clock: FakeClock) -> Replicas:
    """Return replicas over engines that have told that they are empty and idle."""
    replicas = Replicas(clock=clock)
    for number, engine in enumerate(engines):
        replicas.add(f"e{number}", engine)
        engine.receive([PrefixChanges(is_first=True), IDLE])
    return replicas


def tenants_of(engine: RecordedEngine) -> set[bytes]:
    return {one.grant.namespace for one in engine.sent}


def homes_of(engines: list[RecordedEngine]) -> tuple[RecordedEngine, RecordedEngine]:
    """Return the engine that got the only request, and the other one."""
    return (engines[0], engines[1]) if engines[0].sent else (engines[1], engines[0])


def test_turns_of_a_tenant_stay_where_their_prefix_is(
    engines: list[RecordedEngine], clock: FakeClock
) -> None:
    """Taking turns would compute each prefix on each replica."""
    replicas = replicas_of(engines, clock)
    for turn in range(4):
        for tenant in range(8):
            before = [len(engine.sent) for engine in engines]
            replicas.submit(request(tenant, turn))
            for engine, sent in zip(engines, before, strict=True):
                if len(engine.sent) > sent:
                    engine.start()
                engine.beat()
    assert not tenants_of(engines[0]) & tenants_of(engines[1])
    assert len(engines[0].sent) + len(engines[1].sent) == 32


def test_a_request_is_told_that_no_engine_is_known() -> None:
    """Of an empty directory, which drains nothing: the client is to ask again."""
    with pytest.raises(EngineUnavailable, match="none is known") as refused:
        Replicas().submit(request(1))

    assert refused.value.code == "engine_unavailable"


def test_an_engine_without_a_pace_is_as_fast_as_the_fastest(
    engines: list[RecordedEngine], clock: FakeClock
) -> None:
    """A slow engine would lose its prefix to one that has computed nothing yet."""
    replicas = replicas_of(engines, clock)
    for engine in engines:
        engine.receive([replace(IDLE, prefill_tokens_per_s=0.0)])
    replicas.submit(request(1))
    home, _ = homes_of(engines)
    home.start()
    home.receive([replace(IDLE, accepted=1, prefill_tokens_per_s=90.0)])
    replicas.submit(request(1, 1))

    assert len(home.sent) == 2


def test_a_burst_of_prompts_is_spread_before_a_report(
    engines: list[RecordedEngine], clock: FakeClock
) -> None:
    """What was just sent waits there, though no report counts it yet."""
    replicas = replicas_of(engines, clock)
    for tenant in range(8):
        replicas.submit(request(tenant))
    assert [len(engine.sent) for engine in engines] == [4, 4]


def test_a_burst_of_one_prompt_stays_together_until_it_has_started(
    engines: list[RecordedEngine], clock: FakeClock
) -> None:
    """The first of them has told nothing yet, and each replica would compute the prefix."""
    replicas = replicas_of(engines, clock)
    for turn in range(2):
        replicas.submit(request(1, turn))
    home, other = homes_of(engines)
    assert (len(home.sent), len(other.sent)) == (2, 0)
    for sent in home.sent:
        home.receive([Started(sent.request_id, len(sent.tokens), 0)])
    home.beat(waiting_tokens=1_000)
    replicas.submit(request(1, 2))
    assert len(other.sent) == 1, "nothing was told since"


def test_an_engine_learns_what_a_request_is_expected_to_find(
    engines: list[RecordedEngine], clock: FakeClock
) -> None:
    """Its reports of the load leave that out, to all gateways; the engine that the request moves to
    may have nothing of it."""
    replicas = replicas_of(engines, clock)
    replicas.submit(request(1))
    home, other = homes_of(engines)
    home.start()
    home.beat()
    stream = replicas.submit(request(1, 1))

    assert [one.expected_cached_tokens for one in home.sent] == [0, PREFIX]
    again = stream.continuation(home.sent[-1])
    assert again is not None
    assert again.expected_cached_tokens == 0
    assert not other.sent


def test_what_was_sent_counts_for_30_s(engines: list[RecordedEngine], clock: FakeClock) -> None:
    """A request that was refused never starts."""
    replicas = replicas_of(engines, clock)
    replicas.submit(request(1))
    home, other = homes_of(engines)
    home.beat(waiting_tokens=1_000)
    clock.advance(29.0)
    replicas.submit(request(1, 1))
    assert not other.sent
    home.beat(waiting_tokens=1_000)
    clock.advance(31.0)
    replicas.submit(request(1, 2))
    assert len(other.sent) == 1


def test_a_hot_prefix_leaves_a_long_queue(engines: list[RecordedEngine], clock: FakeClock) -> None:
    """Hits are worth the seconds that they save, and no more."""
    replicas = replicas_of(engines, clock)
    replicas.submit(request(1))
    home, other = homes_of(engines)
    home.start()
    home.beat(waiting_tokens=1_500)
    replicas.submit(request(1, 1))
    assert not other.sent
    home.beat(waiting_tokens=5_000)
    replicas.submit(request(1, 2))
    assert len(other.sent) == 1


@pytest.mark.parametrize("loss", ["eviction", "another life", "asked anew"])
def test_what_an_engine_has_lost_draws_no_request(
    loss: str, engines: list[RecordedEngine], clock: FakeClock
) -> None:
    """An engine that began again has an empty cache, and digests of erased words must go."""
    replicas = replicas_of(engines, clock)
    replicas.submit(request(1))
    home, other = homes_of(engines)
    home.start()
    gone = b"".join(stride_digests(b"n1", home.sent[0].tokens))
    if loss == "eviction":
        home.receive([PrefixChanges(device_removed=gone)])
    elif loss == "asked anew":
        home.receive([PrefixChanges(is_first=True)])
    else:
        replica = next(one for one in replicas if one.engine is home)
        replica.release(home, "died")
        sent, home = home.sent, RecordedEngine("later")
        home.sent = sent
        replica.hold(home)
        assert home.asked == 1
    home.beat(waiting_tokens=1_500)
    replicas.submit(request(1, 1))
    assert len(other.sent) == 1


def test_a_prompt_that_is_not_written_is_not_counted_as_sent(
    engines: list[RecordedEngine], clock: FakeClock
) -> None:
    """It leaves nothing in a cache, so nothing is found there."""
    replicas = replicas_of(engines, clock)
    replicas.submit(request(1, write=False))
    home, other = homes_of(engines)
    home.beat(waiting_tokens=1_500)
    replicas.submit(request(1, 1))
    assert len(other.sent) == 1


def test_prefixes_are_asked_for_anew_where_a_hundredth_is_wrong(
    engines: list[RecordedEngine], clock: FakeClock
) -> None:
    """An operator is told, and the requests of the next minute find what is said."""
    reports: list[tuple[str, dict[str, object]]] = []
    replicas = Replicas(lambda event, facts: reports.append((event, facts)), clock)
    replicas.add("e0", engines[0])
    replicas.add("e1")
    told = b"".join(stride_digests(b"n1", request(1).tokens))
    engines[0].receive([PrefixChanges(is_first=True, device_added=told), IDLE])
    for turn in range(2):
        replicas.submit(request(1, turn))
        engines[0].start(PREFIX - 512, is_told=False)
        clock.advance(61.0)
    replicas.submit(request(1, 2))
    engines[0].start(PREFIX, is_told=False)

    facts = replicas.chooser.describe(next(iter(replicas)))
    assert facts["routed_tokens"] == {
        "prompt": 3 * (PREFIX + 32),
        "cached": 3 * PREFIX - 1_024,
        "predicted": 3 * PREFIX,
        "missing": 1_024,
    }
    assert engines[0].asked == 2
    assert reports == [
        ("prefixes_wrong", {"replica": "e0", "prompt_tokens": 4_160, "missing_tokens": 1_024})
    ]


def test_a_choice_can_be_explained(engines: list[RecordedEngine], clock: FakeClock) -> None:
    """An operator asks why a request was computed again."""
    replicas = replicas_of(engines, clock)
    replicas.add("e2").state = "lost"
    replicas.submit(request(1))
    home, _ = homes_of(engines)
    home.start()
    home.beat()
    replicas.submit(request(1, 1))

    choice = replicas.chooser.recent.get("1-1")
    assert choice is not None
    assert choice.replica == ("e0" if home is engines[0] else "e1")
    assert choice.refused == {"e2": "not ready"}
    assert {cost.found.device for cost in choice.costs} == {0, PREFIX}


def test_an_engine_that_was_found_by_dns_is_followed(clock: FakeClock) -> None:
    """It has no name before it answers."""
    replicas = Replicas(clock=clock)
    replica, engine = replicas.add(is_elsewhere=True), RecordedEngine("a")
    replica.name = "e0"
    replica.hold(engine)
    engine.receive([PrefixChanges(is_first=True), IDLE])

    assert engine.asked == 1
    assert replicas.chooser.describe(replica)["facts"] == 2
    assert replica.rescue is not None
