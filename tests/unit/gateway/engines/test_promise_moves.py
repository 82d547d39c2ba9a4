"""Promises move from an engine that drains: whoever dies, and when, the books name one holder.

Real engines over the token oracle, each in a thread; what dies is cut off at a message.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from engine.api import (
    CacheGrant,
    Command,
    Erase,
    Erased,
    Event,
    FindLease,
    Finished,
    LeaseFound,
    LetGo,
    Peek,
    Peeked,
    Quota,
    Request,
    Started,
    Submit,
)
from engine.config import EngineConfig
from engine.protocol import Reply
from engine.server.embedded import LocalEngine
from gateway.caching.prefix_index import IndexedPrefix
from gateway.engines.replicas import Replicas
from gateway.prompt import Renderer
from tests.fakes import FakeClock
from tests.unit.engine.server.fake_engine_process import fake_core
from tests.unit.gateway.engines.promise_books import PromiseBooks

PROMPT = tuple(range(40))
CONFIG = EngineConfig(heartbeat_s=0.05)


class MortalEngine(LocalEngine):
    """An engine that is cut off where it gets, or would say, a message of one kind."""

    dies_at: type | None = None
    is_let_go = False

    def die(self) -> None:
        """Be lost to the gateway."""
        self.mark_lost("killed")

    def post(self, command: Command) -> None:
        if self.dies_at is not None and isinstance(command, self.dies_at):
            self.die()
            return
        self.is_let_go |= isinstance(command, LetGo)
        super().post(command)

    def receive(self, messages: Iterable[Event | Reply]) -> None:
        for message in messages:
            if self.dies_at is not None and isinstance(message, self.dies_at):
                self.die()
                return
            super().receive((message,))


class World(PromiseBooks):
    """The books over engines e0, e1 and so on."""

    def __init__(self, renderer: Renderer, engines: dict[str, MortalEngine]) -> None:
        replicas, self.time = Replicas(), FakeClock()
        self.engines = engines
        self.members = {name: replicas.add(name, engine) for name, engine in engines.items()}
        super().__init__(renderer, replicas, self.time)

    async def promise(self, name: str) -> IndexedPrefix:
        """Have an engine promise the beginning of the prompt."""
        return await self.write(self.members[name], PROMPT, 37)

    async def drain(self, name: str) -> None:
        """Drain an engine, and wait until the gateway lets it go."""
        replica, engine = self.members[name], self.engines[name]
        await engine.drain(30.0)
        replica.state = "draining"
        replica.begin_move(engine)
        await self.emptied()

    def lose(self, name: str) -> None:
        """Lose an engine for ever."""
        self.engines[name].die()
        self.members[name].engine = None

    async def holders(self) -> list[str]:
        """Return the engines that promise all of the prompt's whole blocks, dead ones included:
        their processes live, and only their connections are gone."""
        found = []
        for name, engine in self.engines.items():
            other = engine.beside()
            if (await other.peek(self.namespace, PROMPT)).promised_tokens >= 32:
                found.append(name)
            await other.close()
        return found

    def named(self, entry: IndexedPrefix) -> str:
        """Return the engine that the books name."""
        epochs = {e.info.epoch: name for name, e in self.engines.items() if e.info is not None}
        return epochs[entry.epoch]


@asynccontextmanager
async def world_of(renderer: Renderer, *names: str) -> AsyncIterator[World]:
    """Start engines."""
    engines: dict[str, MortalEngine] = {}
    world: World | None = None
    try:
        for name in names:
            started = await MortalEngine.start(partial(fake_core, CONFIG), CONFIG)
            assert isinstance(started, MortalEngine)
            engines[name] = started
            started.service.join(started.beside(), moves=True)  # it stays to be asked
        world = World(renderer, engines)
        yield world
    finally:
        if world is not None:
            await world.moves.close()
        for engine in engines.values():
            await engine.close()


async def test_a_promise_moves_with_the_time_that_is_left(renderer: Renderer) -> None:
    """Its old holder has nothing of it any more, and the new one ends it when the old would."""
    async with world_of(renderer, "e0", "e1") as world:
        entry = await world.promise("e0")
        world.time.advance(600.0)
        await world.drain("e0")
        assert world.engines["e0"].is_let_go
        peeked = await world.engines["e1"].peek(world.namespace, PROMPT)

        assert (world.named(entry), await world.holders()) == ("e1", ["e1"])
        assert peeked.expires_in_s == pytest.approx(3_000, abs=30)
        assert world.ends == {"moved": 1}
        assert world.outcomes()["running"] == 1


async def test_an_adoption_is_counted_apart(renderer: Renderer) -> None:
    """No gateway enters what it computed, so books agree by what is left."""
    async with world_of(renderer, "e0", "e1") as world:
        await world.promise("e0")
        await world.drain("e0")
        stats = await world.engines["e1"].get_stats()

    assert (stats.prompt_tokens_total, stats.abandoned_prompt_tokens_total) == (37, 37)
    assert (stats.output_tokens_total, stats.abandoned_output_tokens_total) == (0, 0)


SOURCE_DEATHS = [FindLease, LeaseFound, Erase, Erased]
HOME_DEATHS = [Peek, Peeked, Submit, Started, Finished]


@pytest.mark.parametrize("at", SOURCE_DEATHS, ids=lambda one: one.__name__)
async def test_the_source_dies(renderer: Renderer, at: type) -> None:
    """The promise is the source's until another engine has granted it, from then on that one's."""
    async with world_of(renderer, "e0", "e1") as world:
        entry = await world.promise("e0")
        world.engines["e0"].dies_at = at
        await world.drain("e0")
        before = at in (FindLease, LeaseFound)
        left = await world.holders()

        assert world.named(entry) == ("e0" if before else "e1")
        assert ("e1" in left) is not before
        assert world.ends == {"failed" if before else "moved": 1}


@pytest.mark.parametrize("at", HOME_DEATHS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("others", [0, 1])
async def test_the_new_holder_dies(renderer: Renderer, at: type, others: int) -> None:
    """The promise stays where it was, or goes on to a third engine, and is held by that alone."""
    names = ("e0", "e1", "e2")[: 2 + others]
    async with world_of(renderer, *names) as world:
        entry = await world.promise("e0")
        first, *_ = world.replicas.homes(
            Request("x", PROMPT[:37], 0, CacheGrant(world.namespace)), but=world.members["e0"]
        )
        world.engines[first.name].dies_at = at
        await world.drain("e0")
        third = {"e1", "e2"} & set(names) - {first.name}
        expected = third.pop() if third else "e0"
        live = [name for name in await world.holders() if name != first.name]

        assert world.named(entry) == expected
        assert live == [expected]


async def test_what_has_no_room_stays_and_is_told(renderer: Renderer) -> None:
    """The books do not name an engine that promises less."""
    async with world_of(renderer, "e0", "e1") as world:
        entry = await world.promise("e0")
        world.quota = Quota(promised_blocks_max=1, payer=b"1")
        await world.drain("e0")

        assert (world.named(entry), await world.holders()) == ("e0", ["e0"])
        assert world.ends == {"no_room": 1}
        assert world.told["no_room"] == 1


async def test_what_is_erased_meanwhile_does_not_come_back(renderer: Renderer) -> None:
    """By this gateway, or by another one, of whose erasure the new engine alone has heard."""
    async with world_of(renderer, "e0", "e1") as world:
        await world.promise("e0")
        await world.engines["e1"].erase(world.namespace)
        await world.drain("e0")
        found = await world.engines["e1"].peek(world.namespace, PROMPT)

    assert found.cached_tokens == found.promised_tokens == 0
    assert world.ends["moved"] == 0


async def test_a_promise_of_a_dead_engine_is_found_where_a_copy_is(renderer: Renderer) -> None:
    """Another engine got the same lease by a request of its own; no tokens are computed but the
    last."""
    async with world_of(renderer, "e0", "e1", "e2") as world:
        await world.promise("e1")
        entry = await world.promise("e0")
        world.lose("e0")
        before = (await world.engines["e1"].get_stats()).computed_tokens_total
        await world.moves.look()
        after = (await world.engines["e1"].get_stats()).computed_tokens_total

        assert world.named(entry) == "e1"
        assert after - before <= 16
        assert world.ends == {"found": 1}


async def test_a_promise_that_nobody_else_has_is_broken(renderer: Renderer) -> None:
    """It ends as broken in the books, as its reader's credit says."""
    async with world_of(renderer, "e0", "e1") as world:
        entry = await world.promise("e0")
        world.lose("e0")
        await world.moves.look()
        world.time.advance(3_601.0)
        counts = world.outcomes()

        assert world.named(entry) == "e0"
        assert world.ends == {"lacking": 1}
        assert (counts["broken"], counts["kept"]) == (1, 0)


class OtherGateway(PromiseBooks):
    """Another gateway's books, over connections of its own to the engines of a world."""

    def __init__(self, renderer: Renderer, world: World) -> None:
        self.there = {name: engine.beside() for name, engine in world.engines.items()}
        replicas = Replicas()
        self.members = {name: replicas.add(name, one) for name, one in self.there.items()}
        super().__init__(renderer, replicas, world.time)

    def _new_id(self) -> str:
        return f"other-{super()._new_id()}"


@pytest.mark.parametrize("others", [0, 1])
async def test_two_gateways_that_move_one_lease_agree_on_its_holder(
    renderer: Renderer, others: int
) -> None:
    """Both have read and written the same prefix, and are told at once that its engine drains. All
    gateways find the same home, so whoever comes second finds it there."""
    names = ("e0", "e1", "e2")[: 2 + others]
    async with world_of(renderer, *names) as world:
        entry = await world.promise("e0")
        other = OtherGateway(renderer, world)
        twin = await other.write(other.members["e0"], PROMPT, 37)
        other.members["e0"].state = "draining"
        other.members["e0"].begin_move(other.there["e0"])
        await world.drain("e0")
        await other.emptied()
        holders = await world.holders()
        await other.moves.close()
        for engine in other.there.values():
            await engine.close()

    assert holders == [world.named(entry)] == [world.named(twin)]
    assert holders != ["e0"]


async def test_an_erasure_that_is_owed_is_carried_out_when_the_engine_is_back(
    renderer: Renderer,
) -> None:
    """It was lost before it could be told; its disk promises the prefix still, until then."""
    async with world_of(renderer, "e0", "e1") as world:
        entry = await world.promise("e0")
        world.engines["e0"].dies_at = Erase
        world.members["e0"].begin_move(world.engines["e0"])
        await world.emptied()
        before = await world.holders()
        await world.moves.look()
        away = await world.holders()
        back = world.members["e0"].engine = world.engines["e0"].beside()
        await world.moves.look()
        after = await world.holders()
        await back.close()

    assert world.named(entry) == "e1"
    assert (before, away, after) == (["e0", "e1"], ["e0", "e1"], ["e1"])
