"""Networks between gateways and engines that drop, hold and cut: what is lost, and what is told."""

from __future__ import annotations

import os
from typing import Any

import pytest

from engine.api import Tokens
from tests.crash.deaf_sockets import deaf
from tests.crash.fleet import fleet_of
from tests.crash.test_replicas import GREEDY, LONG, PROMPT, ids, request, rest, until
from tests.fakes import solo_output
from tests.unit.engine.server.fake_engine_process import VOCAB

pytestmark = pytest.mark.slow

WHOLE = solo_output(PROMPT, GREEDY, 0, LONG, VOCAB)


@pytest.mark.parametrize("mode", ["drop", "delay"])
async def test_a_host_that_is_no_longer_heard_is_lost(mode: Any) -> None:
    """Its connection stays open: only silence tells. What comes later reaches nobody."""
    async with fleet_of("e0", "e1", proxied=("e0", "e1")) as fleet:
        stream = fleet.replicas.submit(request())
        begun = await until(stream, Tokens)
        first = await fleet.serving("a")
        fleet.proxies[first].down = mode
        events = begun + await rest(stream)
        lost = await fleet.has_told("replica_lost", first)
        fleet.proxies[first].down = "pass"
        fleet.proxies[first].release()
        fleet.proxies[first].cut()
        await fleet.has_told("replica_ready", first, 2)
        again = ids(await rest(fleet.replicas.submit(request("b"))))

    assert ids(events) == again == WHOLE
    assert "silent" in lost["reason"]


async def test_a_cut_connection_is_lost_at_once_and_made_again() -> None:
    """The engine cancels what that connection had; the gateway finds the same life again."""
    async with fleet_of("e0", "e1", proxied=("e0", "e1")) as fleet:
        stream = fleet.replicas.submit(request())
        begun = await until(stream, Tokens)
        first = await fleet.serving("a")
        epoch = stream.epoch
        fleet.proxies[first].cut()
        events = begun + await rest(stream)
        again = await fleet.has_told("replica_ready", first, 2)

    assert ids(events) == WHOLE
    assert again["epoch"] == epoch


async def test_frames_in_halves_are_frames() -> None:
    """A network keeps no borders between frames."""
    async with fleet_of("e0", "e1", proxied=("e0", "e1")) as fleet:
        for proxy in fleet.proxies.values():
            proxy.up = proxy.down = "halve"
        answers = [ids(await rest(fleet.replicas.submit(request(n)))) for n in "abc"]

    assert answers == [WHOLE] * 3
    assert fleet.told("replica_lost") == []


async def test_frames_a_byte_at_a_time_are_frames() -> None:
    async with fleet_of("e0", "e1", proxied=("e0", "e1")) as fleet:
        for proxy in fleet.proxies.values():
            proxy.up = proxy.down = "bytes"
        answer = ids(await rest(fleet.replicas.submit(request(max_tokens=40))))

    assert answer == WHOLE[:40]
    assert fleet.told("replica_lost") == []


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 4))]
)
async def test_a_network_of_all_moods_changes_no_answer(seed: int) -> None:
    """Pieces of any size, pauses, and connections that are cut, under load."""
    async with fleet_of("e0", "e1", "e2", proxied=("e0", "e1", "e2"), seed=seed) as fleet:
        for proxy in fleet.proxies.values():
            proxy.up = proxy.down = "moods"
        answers: list[list[int]] = []
        failed = 0
        while len(answers) < 12 or sum(proxy.cuts for proxy in fleet.proxies.values()) < 3:
            streams = [
                fleet.replicas.submit(request(f"{n} {len(answers)} {failed}", 200))
                for n in range(6)
                if fleet.replicas.ready()
            ]
            events = [await rest(stream) for stream in streams]
            answers += [ids(one) for one in events if one[-1].ending == "done"]
            failed += sum(one[-1].ending != "done" for one in events)
            if not streams:
                await fleet.changed()

    assert answers == [WHOLE[:200]] * len(answers)


@pytest.mark.parametrize("who", ["gateway", "engine"])
async def test_a_network_that_is_cut_one_way_is_lost_on_both_ends(who: str) -> None:
    """Packets of the other way still arrive. The kernel gives up what is not acknowledged; the
    engine cancels what the gateway has asked for."""
    async with fleet_of("e0", "e1") as fleet:
        stream = fleet.replicas.submit(request())
        begun = await until(stream, Tokens)
        first = await fleet.serving("a")
        kept = fleet.kept[first]
        pid = os.getpid() if who == "gateway" else await kept.pid()
        with deaf(pid, kept.port) as cut:
            if who == "engine":  # what is asked meanwhile is not answered, and goes on elsewhere
                streams = [fleet.replicas.submit(request(f"late {n}", 4)) for n in range(8)]
            else:
                streams = []
            events = begun + await rest(stream)
            late = [ids(await rest(one)) for one in streams]
            await fleet.has_told("replica_lost", first)
            await kept.is_idle()
        await fleet.has_told("replica_ready", first, 2)
        again = ids(await rest(fleet.replicas.submit(request("b", 4))))

    assert cut == 1
    assert ids(events) == WHOLE
    assert late == [WHOLE[:4]] * len(streams)
    assert again == WHOLE[:4]
