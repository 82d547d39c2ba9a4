"""Prefixes that one engine fetches from another: real engine processes, a real model, TLS.

Whatever becomes of the fetch, the answer is that of an engine that has computed all of it, and what
has come is a hit. Each test has a namespace of its own.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from msgspec.structs import replace

from engine.api import CacheGrant, Quota
from engine.config import LevelsConfig
from engine.statistics import LevelStats
from tests.crash.peers import KEY, Answer, Pair, gateway_of, pair_of, request
from tests.models import prepared, tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CHANCE = random.Random(1)
PROMPT = tuple(CHANCE.randrange(256) for _ in range(700))
LONG = tuple(CHANCE.randrange(256) for _ in range(3_000))


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> None:
    """Disabled here: each start makes a folder, in microseconds."""


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[False, True],
    ids=["by copies", "by blocks"],
)
async def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Pair]:
    """Two engines. e1 gets copies, or reads e0's pool, as engines of one host do."""
    card = prepared(tmp_path_factory.mktemp("peers"), tiny_config(context=4096))
    async with pair_of(card, levels=LevelsConfig(host_mib=2)) as pair:
        pair.is_near = request.param
        yield pair


async def computed(pair: Pair, namespace: bytes) -> Answer:
    """Return the answer to the prompt that e0 computes, which it keeps."""
    return await pair.ask("e0", request("first", PROMPT, namespace))


def new(before: LevelStats, after: LevelStats) -> tuple[int, dict[str, int]]:
    """Return the runs that were fetched meanwhile, as copies or to the device at once, and why
    others were not."""
    why = Counter(after.not_loaded) - Counter(before.not_loaded)
    copies = after.fetched_total - before.fetched_total
    return copies or after.loaded_total - before.loaded_total, dict(why)


async def test_a_prefix_is_fetched_and_the_answer_is_the_computed_one(pair: Pair) -> None:
    """All runs that were offered come, once; a second request finds them where they are now."""
    before = await pair.level("e1")
    first = await computed(pair, b"whole")
    wanted = request("b", PROMPT, b"whole")
    fetched = await pair.ask("e1", replace(wanted, peer=pair.peer(wanted, 640)))
    again = await pair.ask("e1", request("c", PROMPT, b"whole"))

    assert fetched.tokens == again.tokens == first.tokens
    assert (fetched.started.cached_tokens, fetched.fetched) == (640, 640)
    assert again.fetched == 0
    assert new(before, await pair.level("e1")) == (40, {})


async def test_two_requests_fetch_a_prefix_once(pair: Pair) -> None:
    """The second waits for the first one's fetch, also when the first is cancelled; both hit."""
    before = await pair.level("e1")
    first = await computed(pair, b"once")
    wanted = [request(name, PROMPT, b"once") for name in "bcd"]
    asked = [replace(one, peer=pair.peer(one, 640)) for one in wanted]
    left = pair.engines["e1"].submit(asked[0])
    both = asyncio.gather(*(pair.ask("e1", one) for one in asked[1:]))
    await asyncio.sleep(0)  # all are on their way
    pair.engines["e1"].forget(left.request_id)
    answers = await both

    assert [one.tokens for one in answers] == [first.tokens] * 2
    assert min(one.started.cached_tokens for one in answers) == 640
    assert new(before, await pair.level("e1")) == (40, {})


@pytest.mark.parametrize("fault", ["key", "reader", "tokens", "namespace"])
async def test_a_wrong_ticket_brings_nothing(pair: Pair, fault: str) -> None:
    """It is refused, and the request computes all of it."""
    namespace = f"wrong-{fault}".encode()
    first, before, sent = (
        await computed(pair, namespace),
        await pair.level("e1"),
        await pair.level("e0"),
    )
    wanted = request("b", PROMPT, namespace)
    signed = {
        "tokens": request("b", (*PROMPT[:600], *range(100)), namespace),
        "namespace": request("b", PROMPT, b"other"),
    }.get(fault, wanted)
    key, reader = bytes(32) if fault == "key" else KEY, "e2" if fault == "reader" else "e1"
    answer = await pair.ask(
        "e1", replace(wanted, peer=pair.peer(signed, 640, key=key, reader=reader))
    )

    assert answer.tokens == first.tokens
    assert answer.started.cached_tokens == 0
    assert new(before, await pair.level("e1")) == (0, {"refused": 1})
    assert (await pair.level("e0")).stored_total == sent.stored_total


async def test_what_a_peer_has_in_another_namespace_is_not_sent(pair: Pair) -> None:
    """Even with a ticket: its trees are compared by namespace and tokens."""
    first, before = await computed(pair, b"theirs"), await pair.level("e1")
    wanted = request("b", PROMPT, b"ours")
    answer = await pair.ask("e1", replace(wanted, peer=pair.peer(wanted, 640)))

    assert answer.tokens == first.tokens
    assert answer.started.cached_tokens == 0
    assert new(before, await pair.level("e1")) == (0, {"lacking": 1})


async def test_a_part_is_a_shorter_hit(pair: Pair) -> None:
    """The peer has less than it was said to have: the rest is computed."""
    before = await pair.level("e1")
    await pair.ask("e0", request("a", PROMPT[:331], b"part"))
    wanted = request("b", PROMPT, b"part")
    answer = await pair.ask("e1", replace(wanted, peer=pair.peer(wanted, 640)))
    alone = await computed(pair, b"alone")

    assert answer.tokens == alone.tokens
    assert (answer.started.cached_tokens, answer.fetched) == (320, 320)
    assert new(before, await pair.level("e1")) == (20, {"lacking": 1})


@pytest.mark.parametrize("fault", ["killed", "silent", "cut"])
async def test_a_peer_that_does_not_deliver_costs_a_hit_alone(pair: Pair, fault: str) -> None:
    """Its process is gone, its network is, or its connection ends: all is computed."""
    namespace = fault.encode()
    first, before = await computed(pair, namespace), await pair.level("e1")
    wanted = request("b", PROMPT, namespace)
    peer = pair.peer(wanted, 640)
    if fault == "killed":
        await pair.kept["e0"].kill()
    elif fault == "silent":
        pair.proxy.down = "drop"
    else:
        pair.proxy.lead_to(1)
    answer = await pair.ask("e1", replace(wanted, peer=peer))
    pair.proxy.down = "pass"
    pair.proxy.lead_to(pair.kept["e0"].port)
    if fault == "killed":
        await pair.join("e0")

    assert answer.tokens == first.tokens
    assert answer.started.cached_tokens == 0
    fetched, why = new(before, await pair.level("e1"))
    assert fetched == 0
    assert sum(why.values()) == 1


async def test_without_room_less_is_fetched(pair: Pair) -> None:
    """A payer at its ceiling gets as many copies as its part of host memory takes; of blocks the
    ceiling itself has room for all."""
    first, before = await computed(pair, b"full"), await pair.level("e1")
    quota = Quota(ceiling_blocks=64)  # of 1024, and so 16 of the 256 slots of host memory
    wanted = replace(request("b", PROMPT), grant=CacheGrant(b"full", quota=quota))
    answer = await pair.ask("e1", replace(wanted, peer=pair.peer(wanted, 640)))

    assert answer.tokens == first.tokens
    runs = 40 if pair.is_near else 16
    assert answer.started.cached_tokens == runs * 16
    assert new(before, await pair.level("e1")) == (runs, {})


async def test_an_erased_namespace_is_not_fetched_again(pair: Pair) -> None:
    """The other engine may not have heard of the erasure yet."""
    first, before = await computed(pair, b"erased"), await pair.level("e1")
    await pair.engines["e1"].erase(b"erased")
    wanted = request("b", PROMPT, b"erased")
    answer = await pair.ask("e1", replace(wanted, peer=pair.peer(wanted, 640)))

    assert answer.tokens == first.tokens
    assert answer.started.cached_tokens == 0
    assert new(before, await pair.level("e1")) == (0, {})


async def test_the_router_sends_a_request_with_its_peer(pair: Pair) -> None:
    """The engine that gets it has nothing; it fetches what the other one has told of itself."""
    before = [await pair.level(name) for name in ("e0", "e1")]
    async with gateway_of(pair) as replicas:
        first = Answer([one async for one in replicas.submit(request("a", LONG, b"routed"))])
        second = Answer([one async for one in replicas.submit(request("b", LONG, b"routed"))])
        choices = [replicas.chooser.recent.get(name) for name in ("a", "b")]
    costs = [choice.cost for choice in choices if choice is not None and choice.cost is not None]

    assert second.tokens == first.tokens
    assert costs[0].replica != costs[1].replica
    assert [cost.peer for cost in costs] == ["", costs[0].replica]
    assert costs[1].peer_tokens == second.fetched == second.started.cached_tokens == 2944
    after = [await pair.level(name) for name in ("e0", "e1")]
    runs = [one.loaded_total - other.loaded_total for one, other in zip(after, before, strict=True)]
    assert sum(runs) == 2944 // 16
