"""Engines elsewhere that die: their requests go on at another replica, unseen by their clients.

Real engine processes under their keepers, real sockets with TLS; a model that computes tokens from
the prefix, so that each answer is known.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from msgspec import structs

from engine.api import (
    CacheGrant,
    Finished,
    Grammar,
    Request,
    SampleEnded,
    Sampling,
    Started,
    Tokens,
)
from engine.client.request_stream import RequestStream
from tests.crash.fleet import PATIENCE_S, Fleet, fleet_of
from tests.fakes import solo_output
from tests.unit.engine.server.fake_engine_process import VOCAB

pytestmark = pytest.mark.slow

GREEDY, SEEDED = Sampling(temperature=0), Sampling(temperature=1.0, seed=5)
PROMPT = tuple(range(40))
LONG = 1_000


def request(name: str = "a", max_tokens: int = LONG, **more: Any) -> Request:
    wanted = {"sampling": GREEDY} | more
    return Request(name, PROMPT, max_tokens, CacheGrant(b"n"), **wanted)


async def until(stream: RequestStream, kind: type) -> list[Any]:
    """Return the events up to the first of a kind."""
    events: list[Any] = []
    async with asyncio.timeout(PATIENCE_S):
        async for event in stream:
            events.append(event)
            if isinstance(event, kind):
                return events
    raise AssertionError(f"no {kind.__name__}")


async def rest(stream: RequestStream) -> list[Any]:
    async with asyncio.timeout(PATIENCE_S):
        return [event async for event in stream]


def ids(events: list[Any]) -> list[int]:
    return [one.token_id for event in events if isinstance(event, Tokens) for one in event.tokens]


async def kill_the_one_with(fleet: Fleet, name: str) -> str:
    """Kill the engine that has a request; return the name of its replica."""
    victim = await fleet.serving(name)
    await fleet.kept[victim].kill()
    return victim


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", [None, Started, Tokens], ids=["queued", "started", "tokens"])
async def test_a_killed_engines_request_goes_on_elsewhere(
    kind: type | None, sampling: Sampling
) -> None:
    """Wherever it was: its reader sees one answer, the same as without a death."""
    async with fleet_of("e0", "e1") as fleet:
        stream = fleet.replicas.submit(request(sampling=sampling))
        begun = [] if kind is None else await until(stream, kind)
        victim = await kill_the_one_with(fleet, "a")
        events = begun + await rest(stream)
        (moved,) = fleet.told("request_moved")

    assert ids(events) == solo_output(PROMPT, sampling, 0, LONG, VOCAB)
    assert [type(event) for event in events if not isinstance(event, Tokens)] == [
        Started,
        SampleEnded,
        Finished,
    ]
    end = events[-1]
    assert (end.ending, end.usage.output_tokens) == ("done", LONG)
    assert end.usage.prompt_tokens == len(PROMPT)
    assert moved["from"] == victim


async def test_a_grammar_goes_on_where_it_was() -> None:
    """The text is one document, begun by one engine and ended by another."""
    grammar = Grammar("regex", "[A-Z]{600}")
    async with fleet_of("e0", "e1", faults=dict.fromkeys(("e0", "e1"), "grammars")) as fleet:
        whole = ids(await rest(fleet.replicas.submit(request("whole", grammar=grammar))))
        stream = fleet.replicas.submit(request(grammar=grammar))
        begun = await until(stream, Tokens)
        await kill_the_one_with(fleet, "a")
        events = begun + await rest(stream)

    assert events[-1].ending == "done"
    assert ids(events) == whole


async def test_samples_and_logprobs_of_a_prompt_end_with_an_error() -> None:
    """They have no single place to go on from."""
    async with fleet_of("e0", "e1") as fleet:
        streams = [
            fleet.replicas.submit(request("many", samples=2)),
            fleet.replicas.submit(request("logprobs", prompt_logprobs=0)),
        ]
        for stream in streams:
            await until(stream, Started)
        for kept in fleet.kept.values():
            await kept.kill()
        ends = [(await rest(stream))[-1] for stream in streams]

    assert [end.code for end in ends] == ["engine_died", "engine_died"]


async def test_the_only_replicas_request_fails_as_ever() -> None:
    """There is nowhere to go; the client is told at once."""
    async with fleet_of("e0") as fleet:
        stream = fleet.replicas.submit(request())
        begun = await until(stream, Tokens)
        await fleet.kept["e0"].kill()
        events = begun + await rest(stream)
        await fleet.has_told("replica_ready", "e0", 2)
        answer = ids(await rest(fleet.replicas.submit(request("b", 4))))

    assert events[-1].code == "engine_died"
    assert answer == solo_output(PROMPT, GREEDY, 0, 4, VOCAB)


async def test_a_request_that_kills_engines_ends() -> None:
    """It goes to another replica once without progress; the replicas come back, and others are
    served."""
    names = ("e0", "e1")
    async with fleet_of(*names, faults=dict.fromkeys(names, "deadly")) as fleet:
        stream = fleet.replicas.submit(structs.replace(request(), tokens=(13,)))
        end = (await rest(stream))[-1]
        moves = len(fleet.told("request_moved"))
        for name in names:
            await fleet.has_told("replica_ready", name, 2)
        other = structs.replace(request("b", 4), tokens=(12,))
        answer = ids(await rest(fleet.replicas.submit(other)))

    assert (end.ending, end.code) == ("failed", "engine_died")
    assert moves == 1
    assert answer == solo_output((12,), GREEDY, 0, 4, VOCAB)


async def test_a_drained_engine_finishes_and_gets_nothing_new() -> None:
    """A rolling upgrade: no request fails, and none waits. Its state says when it has ended, and
    when its keeper has."""
    async with fleet_of("e0", "e1") as fleet:
        running = fleet.replicas.submit(request())
        begun = await until(running, Tokens)
        name = await fleet.serving("a")
        kept, other = fleet.kept[name], {"e0": "e1", "e1": "e0"}[name]
        kept.keeper.begin_drain()
        assert kept.engine is not None
        await kept.engine.drain(30.0)
        await fleet.has_told("replica_draining", name)
        late = [fleet.replicas.submit(request(f"late {n}", 4)) for n in range(4)]
        served = [await fleet.serving(f"late {n}") for n in range(4)]
        answers = [ids(await rest(stream)) for stream in late]
        events = begun + await rest(running)
        await fleet.has_told("replica_lost", name)
        replica = fleet.replica(name)
        ended = replica.state, replica.reason
        await kept.close()
        await fleet.has_told("replica_unreachable", name)
        gone = replica.state, replica.reason

    assert ended == ("drained", "It has ended after its drain.")
    assert gone == ("drained", "Connection refused")
    assert ids(events) == solo_output(PROMPT, GREEDY, 0, LONG, VOCAB)
    assert served == [other] * 4
    assert answers == [solo_output(PROMPT, GREEDY, 0, 4, VOCAB)] * 4
    assert fleet.told("request_moved") == []


async def test_an_engine_that_stands_still_is_lost_by_its_silence() -> None:
    """Its connection is open; what it computes later is counted apart and reaches nobody."""
    async with fleet_of("e0", "e1") as fleet:
        stream = fleet.replicas.submit(request())
        begun = await until(stream, Tokens)
        victim = await fleet.serving("a")
        pid = await fleet.kept[victim].pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            events = begun + await rest(stream)
        finally:
            os.kill(pid, signal.SIGCONT)
        await fleet.has_told("replica_ready", victim, 2)
        replica = fleet.replica(victim)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                stats = await replica.running().get_stats()
                if not stats.running:
                    break

    assert ids(events) == solo_output(PROMPT, GREEDY, 0, LONG, VOCAB)
    assert "silent" in fleet.told("replica_lost")[0]["reason"]
    assert stats.prompt_tokens_total == stats.abandoned_prompt_tokens_total


async def test_books_of_both_engines_agree_after_a_move() -> None:
    """What the entry has more than an engine counted is known, and what it abandoned too."""
    async with fleet_of("e0", "e1", proxied=("e0", "e1")) as fleet:
        stream = fleet.replicas.submit(request())
        begun = await until(stream, Tokens)
        first = await fleet.serving("a")
        fleet.proxies[first].cut()
        events = begun + await rest(stream)
        await fleet.has_told("replica_ready", first, 2)
        entered = {first: (0, 0, 0), {"e0": "e1", "e1": "e0"}[first]: entry_of(events)}
        for name, entry in entered.items():
            replica = fleet.replica(name)
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    stats = await replica.running().get_stats()
                    if not stats.running:
                        break
            more = stream.correction if name != first else (0, 0, 0)
            assert entry == (
                stats.prompt_tokens_total - stats.abandoned_prompt_tokens_total + more[0],
                stats.cached_tokens_total - stats.abandoned_cached_tokens_total + more[1],
                stats.output_tokens_total - stats.abandoned_output_tokens_total + more[2],
            )


def entry_of(events: list[Any]) -> tuple[int, int, int]:
    usage = events[-1].usage
    return usage.prompt_tokens, usage.cached_tokens, usage.output_tokens
