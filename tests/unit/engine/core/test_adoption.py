"""A request that takes a promise over from another engine: what it grants, renews and leaves."""

from __future__ import annotations

import pytest

from engine.api import CacheGrant, Erase, FindLease, LeaseRequest, Peek, Request, Retention
from engine.config import EngineConfig
from engine.protocol import unpack_tokens
from engine.server.tree_snapshot import find_lease
from tests.checkers import World

SPACE = b"n"
PROMPT = tuple(n * n % 3 for n in range(20))
LAST_USE = Retention("last", promise_s=100, limit_s=1_000)
FROM_START = Retention("start", promise_s=100, limit_s=1_000, clock="request_start")


def new_world() -> World:
    return World(EngineConfig(), blocks=32, block_size=4, context_tokens=64)


def adopting(*leases: LeaseRequest, tokens: int = 20, name: str = "adopts") -> Request:
    return Request(name, PROMPT[:tokens], 0, CacheGrant(SPACE, leases=leases), adopts=True)


def promised(world: World) -> int:
    return world.core.peek(Peek(1, SPACE, (*PROMPT, 2))).promised_tokens


@pytest.mark.parametrize("retention", [LAST_USE, FROM_START], ids=lambda one: one.name)
def test_it_promises_for_the_time_that_is_left(retention: Retention) -> None:
    """Computing it and its end begin no clock anew; a read does, as by its class."""
    world = new_world()
    world.submit(adopting(LeaseRequest(20, retention, "a", age_s=70.0)))
    world.settle()
    world.clock.advance(29.0)
    before = promised(world)
    world.clock.advance(2.0)

    assert before == 20
    assert promised(world) == 0


def test_a_read_renews_what_was_adopted() -> None:
    """From then on it is a promise like any other."""
    world = new_world()
    world.submit(adopting(LeaseRequest(20, LAST_USE, "a", age_s=70.0)))
    world.settle()
    world.clock.advance(20.0)
    world.submit(Request("reads", PROMPT, 1, CacheGrant(SPACE)))
    world.settle()
    world.clock.advance(90.0)

    assert promised(world) == 20


def test_it_renews_no_other_promise() -> None:
    """Nobody has read what it finds: its payer would pay for time that nobody asked for."""
    world = new_world()
    world.submit(Request("own", PROMPT[:8], 0, CacheGrant(SPACE, leases=(
        LeaseRequest(8, LAST_USE, "own"),
    ))))  # fmt: skip
    world.settle()
    world.clock.advance(60.0)
    world.submit(adopting(LeaseRequest(20, FROM_START, "a", age_s=90.0)))
    world.settle()
    world.clock.advance(20.0)
    middle = promised(world)
    world.clock.advance(25.0)

    assert middle == 8
    assert promised(world) == 0


@pytest.mark.parametrize("lease_id", [None, "a"])
def test_what_was_erased_lately_is_not_kept(lease_id: str | None) -> None:
    """Who brings it may not have heard of the erasure; two minutes later everybody has."""
    world = new_world()
    world.core.erase(Erase(1, SPACE, lease_id))
    world.submit(adopting(LeaseRequest(20, LAST_USE, "a")))
    world.settle()
    refused = promised(world)
    world.submit(adopting(LeaseRequest(20, LAST_USE, "b"), name="other"))
    world.settle()
    other = promised(world)
    world.clock.advance(130.0)
    world.submit(adopting(LeaseRequest(20, LAST_USE, "a"), name="later"))
    world.settle()

    assert (refused, other) == (0, 20 if lease_id else 0)
    assert promised(world) == 20


def test_a_lease_tells_its_tokens_until_it_is_over() -> None:
    """Up to the end of its last block; an unknown one tells none."""
    world = new_world()
    lease = LeaseRequest(10, Retention("short", 10, 10), "a")
    world.submit(Request("own", PROMPT, 1, CacheGrant(SPACE, leases=(lease,))))
    world.settle()
    found = [find_lease(world.core, FindLease(1, SPACE, name)) for name in ("a", "b")]
    world.clock.advance(11.0)
    late = find_lease(world.core, FindLease(1, SPACE, "a"))

    assert [unpack_tokens(one.token_ids) for one in found] == [PROMPT[:12], ()]
    assert late.token_ids == b""
