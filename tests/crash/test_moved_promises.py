"""Promises leave an engine that drains: real processes, TLS, and SIGKILL at a message.

Over the fake runner what another engine adopts is computed there; of a real model it is fetched.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterable

import pytest

from engine.api import Erased, Event, Finished, LeaseFound, Peeked, Started
from engine.client.client import SocketEngine
from engine.model_store import ModelCard
from engine.protocol import Reply
from gateway.engines.replica import Replica
from tests.crash.fleet import KeptReplica, fleet_of
from tests.crash.peers import gateway_of, pair_of
from tests.models import prepared, tiny_config
from tests.unit.gateway.engines.promise_books import PromiseBooks
from tests.unit.gateway.gateway_fixture import new_renderer

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(300)]

CHANCE = random.Random(7)
PROMPTS = [tuple(CHANCE.randrange(64) for _ in range(100)) for _ in range(8)]


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> None:
    """Disabled here: each start makes a folder, in microseconds."""


def kill_at(patch: pytest.MonkeyPatch, replica: Replica, kind: type) -> None:
    """Kill an engine's process when it sends a message of a kind, before anybody gets it."""
    engine = replica.engine
    assert isinstance(engine, SocketEngine)
    assert engine.info is not None
    pid, receive = engine.info.pid, engine.receive

    def take(messages: Iterable[Event | Reply]) -> None:
        for message in messages:
            if isinstance(message, kind):
                os.kill(pid, signal.SIGKILL)
                engine.mark_lost("killed")
                return
            receive((message,))

    patch.setattr(engine, "receive", take)


async def drain(kept: KeptReplica) -> None:
    """Drain an engine as its keeper does."""
    kept.keeper.begin_drain()
    await kept.running().drain(60.0)


async def gone(kept: KeptReplica) -> None:
    """Wait until an engine has ended."""
    if kept.engine is not None:
        await kept.engine.wait_lost()


@pytest.mark.parametrize(
    ("victim", "at"),
    [("", Finished), ("e0", LeaseFound), ("e0", Erased), ("e1", Peeked), ("e1", Started)],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
async def test_promises_have_one_holder_whoever_is_killed(
    card: ModelCard, monkeypatch: pytest.MonkeyPatch, victim: str, at: type
) -> None:
    """The engine that the books name promises them, unless it was killed; the other one does not,
    and the engine that drained has ended by itself."""
    async with fleet_of("e0", "e1") as fleet:
        books = PromiseBooks(new_renderer(card), fleet.replicas, time.monotonic)
        source, home = fleet.replica("e0"), fleet.replica("e1")
        entries = [await books.write(source, prompt, 90) for prompt in PROMPTS]
        epochs = {one.name: one.info.epoch for one in fleet.replicas if one.info is not None}
        if victim:
            kill_at(monkeypatch, fleet.replica(victim), at)
        await drain(fleet.kept["e0"])
        await books.emptied()
        await gone(fleet.kept["e0"])
        named = {name: sum(one.epoch == epoch for one in entries) for name, epoch in epochs.items()}
        held = 0
        if victim != "e1":
            space = books.namespace
            peeked = [await home.running().peek(space, prompt) for prompt in PROMPTS]
            held = sum(one.promised_tokens >= 80 for one in peeked)
        await books.moves.close()

    assert named["e0"] + named["e1"] == len(entries)
    if not victim:
        assert (named["e1"], held, books.ends) == (8, 8, {"moved": 8})
    elif victim == "e1":
        assert (named["e0"], books.ends["moved"]) == (8, 0)
    else:
        assert held >= named["e1"] == books.ends["moved"]
        assert (named["e1"] == 0) == (at is LeaseFound)


async def test_what_moves_is_fetched_and_read_as_before(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """All copies come from the engine that drains; of each prompt the end alone is computed."""
    model = prepared(tmp_path_factory.mktemp("moved"), tiny_config(context=4096))
    prompts = [tuple(CHANCE.randrange(256) for _ in range(700)) for _ in range(4)]
    async with pair_of(model) as pair, gateway_of(pair) as replicas:
        books = PromiseBooks(new_renderer(model), replicas, time.monotonic)
        for engine in pair.engines.values():
            await engine.close()  # the other gateway has nothing to move
        source, home = list(replicas)
        entries = [await books.write(source, prompt, 690) for prompt in prompts]
        await drain(pair.kept[source.name])
        await books.emptied()
        await gone(pair.kept[source.name])
        stats = await home.running().get_stats()
        peer = next(level for level in stats.levels if level.name == "peer")
        peeked = [await home.running().peek(books.namespace, prompt) for prompt in prompts]
        named = [home.engine is not None and home.engine.is_alive(one.epoch) for one in entries]
        await books.moves.close()

    assert books.ends == {"moved": 4}
    assert named == [True] * 4
    assert all(one.promised_tokens >= 688 for one in peeked)
    assert peer.loaded_total == 4 * 43
    assert stats.computed_tokens_total <= 4 * 16
