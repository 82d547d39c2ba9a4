"""Prompts that one engine computes for the answers of another: real processes, a real model, TLS.

Whatever becomes of the prompt, the answer and its usage are those of one engine that has done all
of it, and what engines count agrees by epoch with what is entered.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
from msgspec.structs import replace

from engine.api import CacheGrant, Event, Finished, Quota, Request, Started
from engine.client.request_stream import RequestStream
from engine.config import LevelsConfig
from engine.model_store import ModelCard
from gateway.config.fleet import ReplicaSettings
from gateway.engines.elsewhere.dialer import FleetIdentity
from gateway.engines.elsewhere.fleet import FleetReplicas
from gateway.engines.replica import Replica
from gateway.routing import router
from tests.crash.fleet import PATIENCE_S
from tests.crash.peers import CONFIG, Answer, Pair, pair_of, request
from tests.models import prepared, tiny_config
from tests.unit.engine.server.fleet_certificates import certificate

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.asyncio(loop_scope="module")]

CHANCE = random.Random(11)
PROMPT = tuple(CHANCE.randrange(256) for _ in range(2_300))


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> None:
    """Disabled here: each start makes a folder, in microseconds."""


@pytest.fixture(autouse=True)
def part_all_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines on the same cores win nothing by it."""
    monkeypatch.setattr(router, "APART_FACTOR", 0.0)


class Fleet:
    """A gateway's replicas over e0, which computes prompts, and e1, which answers."""

    def __init__(self, pair: Pair, replicas: FleetReplicas) -> None:
        self.pair, self.replicas = pair, replicas
        self._entered = defaultdict[str, list[int]](lambda: [0, 0, 0])
        """By epoch, as the ledger adds up what was entered, less what no engine counted."""
        self._before: dict[str, list[int]] = {}

    def enter(self, stream: RequestStream, end: Finished, began: Sequence[Started] = ()) -> None:
        """Enter what a request has used: its prompt as it `began`, if one engine had it alone."""
        usage = end.usage
        first = began[0] if began and stream.join is None else usage
        used = first.prompt_tokens, first.cached_tokens, usage.output_tokens
        sums = self._entered[stream.epoch]
        sums[:] = [a + b - c for a, b, c in zip(sums, used, stream.correction, strict=True)]

    async def ask(self, wanted: Request) -> Answer:
        """Return the answer to a request, and enter it."""
        stream = self.replicas.submit(wanted)
        async with asyncio.timeout(PATIENCE_S):
            answer = Answer([event async for event in stream])
        self.enter(stream, answer.end)
        return answer

    async def books(self) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Return by epoch what was entered, and what the engines counted for clients since the last
        call; then begin anew."""
        counted = await self._count()
        new = {
            epoch: [a - b for a, b in zip(sums, self._before.get(epoch, [0, 0, 0]), strict=True)]
            for epoch, sums in counted.items()
        }
        entered = {epoch: self._entered[epoch] for epoch in counted}
        self._before, self._entered = counted, defaultdict(lambda: [0, 0, 0])
        return entered, new

    async def _count(self) -> dict[str, list[int]]:
        found = {}
        for replica in self.replicas:
            stats = await replica.running().get_stats()
            assert replica.info is not None
            found[replica.info.epoch] = [
                stats.prompt_tokens_total - stats.abandoned_prompt_tokens_total,
                stats.cached_tokens_total - stats.abandoned_cached_tokens_total,
                stats.output_tokens_total - stats.abandoned_output_tokens_total,
            ]
        return found

    @property
    def outcomes(self) -> dict[str, int]:
        return {name: count for name, count in self.replicas.apart.outcomes.items() if count}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    card: ModelCard = prepared(tmp_path_factory.mktemp("apart"), tiny_config(context=4096))
    levels = LevelsConfig(host_mib=16)
    config = replace(CONFIG, role="prefill", levels=levels)
    async with pair_of(card, config, role="decode", levels=levels) as pair:
        yield pair


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(pair: Pair) -> AsyncIterator[Fleet]:
    ports = pair.proxy.port, pair.kept["e1"].port
    places = tuple(f"e{number}=127.0.0.1:{port}" for number, port in enumerate(ports))
    changed = asyncio.Event()
    replicas = FleetReplicas(
        *(pair.digest, ReplicaSettings(replicas=places)),
        FleetIdentity("g1", certificate("gateway/g1")),
        lambda event, facts: changed.set(),
        prompts_apart=True,
    )

    def may_fetch(replica: Replica) -> bool:
        facts = replicas.chooser.facts_of(replica)
        return facts is not None and facts.load.report.peer_bytes_per_s > 0

    replicas.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not all(one.ready() for one in replicas) or len(replicas) < 2:
                await changed.wait()
                changed.clear()
            while not all(map(may_fetch, replicas)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        found = Fleet(pair, replicas)
        await found.books()
        yield found
    finally:
        await replicas.close()


def of(name: str, space: bytes, tokens: Sequence[int] = PROMPT) -> Request:
    """Return a request in a namespace of its own."""
    return request(name, tokens, space)


async def test_the_answer_and_its_usage_are_those_of_one_engine(fleet: Fleet) -> None:
    """A first prompt has no hit, though one engine has fetched nearly all of it; a second turn has
    the first one's, as on one engine."""
    alone = [await fleet.pair.ask("e1", of("a1", b"alone"))]
    longer = (*PROMPT, *alone[0].tokens, *reversed(PROMPT[:1_200]))
    alone.append(await fleet.pair.ask("e1", of("a2", b"alone", longer[: len(PROMPT) + 1_200])))
    before = await fleet.pair.level("e1")
    await fleet.books()
    apart = [await fleet.ask(of("b1", b"apart"))]
    apart.append(await fleet.ask(of("b2", b"apart", longer[: len(PROMPT) + 1_200])))
    entered, counted = await fleet.books()

    assert [one.tokens for one in apart] == [one.tokens for one in alone]
    for one, other in zip(apart, alone, strict=True):
        fields = ("prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens")
        assert [getattr(one.end.usage, name) for name in fields] == [
            getattr(other.end.usage, name) for name in fields
        ]
    assert fleet.outcomes["apart"] >= 1
    assert (await fleet.pair.level("e1")).loaded_total - before.loaded_total >= 2_288 // 16
    assert entered == counted


async def test_a_client_may_leave_at_any_time_and_the_books_agree(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the prompt has begun, while it is computed, fetched, or answered: both ends are told,
    and each request is entered as often as it was counted."""
    await fleet.books()
    chance, ends = random.Random(5), list[str]()

    async def one(number: int) -> None:
        space = b"left %d" % (number % 5)
        wanted = of(f"left{number}", space, (*PROMPT[: chance.randrange(2_060, 2_300)], number))
        stream, began, end = fleet.replicas.submit(wanted), list[Started](), None
        push = stream.push

        def note(event: Event) -> None:
            if isinstance(event, Started):
                began.append(event)
            push(event)

        monkeypatch.setattr(stream, "push", note)
        try:
            async with asyncio.timeout(chance.choice((0.0, 0.01, 0.05, 0.1, 0.2, 0.4, 30.0))):
                async for event in stream:
                    end = event if isinstance(event, Finished) else end
        except TimeoutError:
            async with asyncio.timeout(PATIENCE_S):
                end = await stream.cancel() or end
        assert end is not None
        fleet.enter(stream, end, began)
        ends.append(end.ending)

    for start in range(0, 24, 4):
        await asyncio.gather(*(one(number) for number in range(start, start + 4)))
    entered, counted = await fleet.books()
    stats = [await replica.running().get_stats() for replica in fleet.replicas]

    assert set(ends) == {"done", "cancelled"}
    assert entered == counted
    assert [one.running + one.waiting for one in stats] == [0, 0]


async def test_a_payer_at_its_ceiling_is_answered_all_the_same(fleet: Fleet) -> None:
    """Its blocks hold one prompt at each engine: the others wait there, or are late."""
    quota = Quota(payer=b"small", ceiling_blocks=150)
    asked = [of(f"q{number}", b"room", (number, *PROMPT[1:])) for number in range(3)]
    small = [replace(one, grant=replace(one.grant, quota=quota)) for one in asked]
    small = [replace(one, request_id=f"{one.request_id}/small") for one in small]
    answers = await asyncio.gather(*map(fleet.ask, small))
    entered, counted = await fleet.books()
    alone = [
        await fleet.pair.ask("e1", replace(one, grant=CacheGrant(b"alone there"))) for one in asked
    ]

    assert [one.tokens for one in answers] == [one.tokens for one in alone]
    assert [one.end.usage.cached_tokens for one in answers] == [0, 0, 0]
    assert entered == counted


async def test_nothing_is_parted_across_namespaces_or_after_an_erasure(fleet: Fleet) -> None:
    """What another namespace has is no hit; what is erased is computed where it is answered."""
    await fleet.ask(of("n1", b"first"))
    other = await fleet.ask(of("n2", b"second"))
    await fleet.replicas.erase(b"first")
    before = fleet.replicas.apart.outcomes.total()
    again = await fleet.ask(of("n3", b"first"))
    entered, counted = await fleet.books()

    assert other.end.usage.cached_tokens == again.end.usage.cached_tokens == 0
    assert fleet.replicas.apart.outcomes.total() == before
    assert other.tokens == again.tokens
    assert entered == counted


async def test_an_engine_killed_while_it_computes_a_prompt_costs_nothing_but_time(
    fleet: Fleet,
) -> None:
    """The answer is whole, and counted once at the engine that lives."""
    whole = await fleet.ask(of("k1", b"lives"))
    await fleet.books()
    before = fleet.outcomes.get("lost", 0)
    stream = fleet.replicas.submit(of("k2", b"killed"))
    await fleet.pair.kept["e0"].kill()
    async with asyncio.timeout(PATIENCE_S):
        answer = Answer([event async for event in stream])
    fleet.enter(stream, answer.end)
    replica = next(one for one in fleet.replicas if one.name == "e1")
    assert replica.info is not None
    epoch = replica.info.epoch
    async with asyncio.timeout(PATIENCE_S):
        while not all(one.ready() for one in fleet.replicas):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    entered, counted = await fleet.books()

    assert answer.tokens == whole.tokens
    assert answer.end.usage.cached_tokens == 0
    assert fleet.outcomes["lost"] == before + 1
    assert entered[epoch] == counted[epoch]
