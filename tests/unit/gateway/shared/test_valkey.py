"""Shared limits: exact over all gateways, and what holds while the state is away."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from redis import Redis

from gateway.shared.interface import Account, AccountLimits, Change, SharedAway, Standing
from gateway.shared.valkey import CHANGE, ValkeyLimits
from tests.examples import examples
from tests.unit.gateway.shared.limits_in_memory import LimitsInMemory
from tests.unit.gateway.shared.valkey_server import ValkeyServer

PATIENT_S = 20.0
"""A busy machine is no server that is away."""
NO_LIMITS: AccountLimits = (0, 0, 0, 0, 0)
ONE = (1, 0, 0, 0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    yield server
    server.kill()


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[Redis]:
    """An empty server's."""
    with Redis(port=server.port) as client:
        client.flushall()
        yield client


@asynccontextmanager
async def gateways(server: ValkeyServer, count: int) -> AsyncIterator[list[ValkeyLimits]]:
    """Yield so many gateways that have reached the server, by its port and its socket in turns."""
    lines: list[str] = []
    found = [
        ValkeyLimits(
            server.socket_url if number % 2 else server.url,
            f"g{number}",
            lambda event, facts: lines.append(f"{event} {facts}"),
            time.monotonic,
            answer_s=PATIENT_S,
        )
        for number in range(count)
    ]
    for one in found:
        await one.open()
        assert not one.is_away, lines
    yield found
    for one in found:
        await one.close()


def take(name: str, limits: AccountLimits = NO_LIMITS, key: AccountLimits = NO_LIMITS) -> Change:
    return Change("take", name, (Account("tenant:1", limits), Account("key:1", key)), ONE)


@pytest.mark.usefixtures("client")
async def test_a_limit_is_exact_over_sixteen_gateways(server: ValkeyServer) -> None:
    """1,000 calls at once under a limit of 100 a minute: 100 are let in, and what drains while the
    test runs."""
    began_s = time.monotonic()
    limits = (100, 0, 0, 0, 0)
    async with gateways(server, 16) as all_:
        asked = [one.change(take(f"r{n}", limits)) for n in range(1_000) for one in [all_[n % 16]]]
        answers = await asyncio.gather(*asked)
        counted = all_[0].gateways, all_[-1].gateways
    drained = math.ceil((time.monotonic() - began_s) * 100 / 60)
    admitted = sum(one.fits for one in answers)

    assert 100 <= admitted <= 100 + drained
    assert counted == (1, 16)


@pytest.mark.usefixtures("client")
async def test_requests_at_once_are_exact_and_come_back(server: ValkeyServer) -> None:
    """Over gateways; a place is free when its request ends, or its client leaves while it is
    asked for."""
    limits = (0, 0, 0, 0, 100)
    async with gateways(server, 16) as all_:
        asked = [one.change(take(f"r{n}", limits)) for n in range(1_000) for one in [all_[n % 16]]]
        answers = await asyncio.gather(*asked)
        again = await all_[3].change(take("r0", limits))
        for number, answer in enumerate(answers):
            if answer.fits:
                done = structs.replace(take(f"r{number}", limits), kind="settle")
                all_[number % 16].note(done)
        leaving = asyncio.ensure_future(all_[0].change(take("left", limits)))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(*(one.change(take(f"then {one}")) for one in all_))
        after = await all_[0].change(take("after", limits))

    assert sum(one.fits for one in answers) == 100
    assert again.fits, "a request that asks twice has one place"
    assert (after.fits, after.running[0]) == (True, 17)


DEMANDS = st.tuples(st.just(1), st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
LIMITS = st.tuples(
    st.sampled_from([0, 3]),
    st.sampled_from([0, 60, 90]),
    st.sampled_from([0, 50]),
    st.just(0),
    st.sampled_from([0, 2]),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "extend", "correct", "settle"]),
        st.integers(0, 4),
        DEMANDS,
        LIMITS,
        st.integers(0, 20_000),
    ),
    max_size=20,
)


@settings(max_examples=examples(80), deadline=None)
@given(STEPS)
def test_the_script_does_what_its_twin_does(
    server: ValkeyServer, steps: list[tuple[Any, ...]]
) -> None:
    """For any order of changes, limits that change and pauses: the same answers, to the digit."""
    now_ms = 1_000_000
    twin = LimitsInMemory(lambda: now_ms)
    with Redis(port=server.port, decode_responses=True) as client:
        client.flushall()
        client.set("trunkline:begun", "0")
        script = CHANGE.replace("redis.call('TIME')", "redis.call('HMGET', 'clock', 's', 'us')")
        for kind, number, counts, limits, pause_ms in steps:
            now_ms += pause_ms
            client.hset("clock", mapping={"s": now_ms // 1_000, "us": now_ms % 1_000 * 1_000})
            _, tokens, inputs, outputs = counts
            change = Change(
                kind,
                f"r{number}",
                (Account("tenant:1", limits), Account("key:1", (0, 70, 0, 0, 3))),
                (1, 0, 0, 0) if kind == "take" else (1, tokens, inputs, outputs),
            )
            expected = twin.apply(change)
            for name in ("tenant:1", "key:1"):  # the server's own expiries follow its own clock
                client.persist(f"trunkline:used:{name}")
                client.persist(f"trunkline:running:{name}")
            client.persist(f"trunkline:request:r{number}")
            assert run_script(client, script, change) == expected


def run_script(client: Redis, script: str, change: Change) -> Standing:
    names = [account.name for account in change.accounts]
    keys = [f"trunkline:request:{change.request_id}"]
    keys += [f"trunkline:{what}:{name}" for name in names for what in ("used", "running")]
    numbers = [60_000, 600_000, *change.counts]
    numbers += [limit for account in change.accounts for limit in account.limits]
    arguments = [change.kind, change.request_id, *map(str, numbers)]
    found: Any = client.eval(script, 6, *keys, "trunkline:begun", *arguments)
    fits, a, b, c, d, e, f, g, h, tenant, key = map(int, found)
    return Standing(bool(fits), ((a, b, c, d), (e, f, g, h)), (tenant, key))


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server that evicts what it is given."""
    server = ValkeyServer(tmp_path, "--maxmemory-policy", "allkeys-lru")
    yield server
    server.kill()


async def test_a_server_that_evicts_is_not_used(forgetful: ValkeyServer) -> None:
    """Evicted counts would be limits that nobody keeps: the log says what is wrong and right."""
    lines: list[object] = []
    shared = ValkeyLimits(
        forgetful.url,
        "g0",
        lambda event, facts: lines.append((event, facts["reason"])),
        time.monotonic,
        answer_s=PATIENT_S,
    )
    await shared.open()
    with pytest.raises(SharedAway):
        await shared.change(take("a"))
    await shared.close()

    assert shared.is_away
    assert lines == [
        ("shared_away", "its maxmemory-policy is allkeys-lru; expected noeviction"),
    ]


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server that the test may kill."""
    server = ValkeyServer(tmp_path)
    yield server
    server.kill()


async def test_a_server_that_died_under_load_is_gone_on_without_and_found_again(
    own_server: ValkeyServer,
) -> None:
    """Calls are answered all the time; who waits for the dead one is told at once. It comes back
    empty: limits begin half used."""
    server, states = own_server, list[bool]()
    limits = (100, 0, 0, 0, 0)
    shared = ValkeyLimits(
        server.url,
        "g0",
        lambda event, facts: None,
        time.monotonic,
        on_state=states.append,
        answer_s=PATIENT_S,
    )
    await shared.open()
    first = await shared.change(take("first", limits))
    await asyncio.to_thread(server.kill)
    lost = await asyncio.gather(
        *(shared.change(take(f"lost{n}", limits)) for n in range(50)), return_exceptions=True
    )
    shared.note(structs.replace(take("first", limits), kind="settle"))
    await asyncio.to_thread(server.start)
    await shared.poll()
    admitted = [await shared.change(take(f"r{n}", limits)) for n in range(100)]
    await shared.close()

    assert first.fits
    assert {type(one) for one in lost} == {SharedAway}
    assert states == [False, True, False]
    assert 50 <= sum(one.fits for one in admitted) <= 55
