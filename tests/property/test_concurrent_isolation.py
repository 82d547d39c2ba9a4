"""A strict payer finds the same beside any requests of others (rule *Isolation*).

As `test_isolation`, over a whole engine, without levels and with host memory, and with the
attacker's requests still under way: the victim's come one after another, as those of one chat do,
while up to a batch of the attacker's run, wait and take the steps. Its hits are compared to the
token, with its grants.

Two things are timing, and left out: what a payer's *own* requests do to each other when they run at
once, since what runs beside decides how they share steps; and how many blocks one request needs at
a time where it does not keep what it has computed (window groups), or reads nothing of what is
there, since that depends on the length of its slices.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.api import CacheGrant, LeaseRequest, Quota, Request, Retention, Sampling
from engine.cache import PrefixCache
from engine.cache.blocks.block_manager import BlockManager
from engine.cache.tree.accounts import PayerAccount
from engine.config import EngineConfig
from engine.core.timeouts import Timeouts
from tests.checkers import World
from tests.property.test_isolation import ATTACKER, VICTIM
from tests.property.test_level_isolation import make_world
from tests.strategies import tokens

SIZE, BLOCKS, FLOOR = 2, 16, 6
STEPS_MAX, IDLE_STEPS = 2_000, 4
LEASED = Retention("leased", promise_s=4, limit_s=8)
STRICT = Quota(floor_blocks=FLOOR, ceiling_blocks=FLOOR, payer=VICTIM)


@dataclass(frozen=True)
class Move:
    """A request that is submitted; the victim's is waited for, the attacker's for `steps` steps.

    `is_late`: it comes while the victim's next request runs, a step after it, or after the last
    one that came late.
    """

    who: bytes
    prompt: tuple[int, ...]
    leased: bool = False
    outputs: int = 2
    wait_s: float = 0.0
    steps: int = 1
    priority: int = 0
    is_late: bool = False


@dataclass(frozen=True)
class Seen:
    """What a payer learns from one request: the tokens found, and what was promised."""

    cached_tokens: int
    grants: tuple[str, ...]


def seen_by_victim(
    life: list[Move], *, attacked: bool, depth: int = 1, slots: int = 0
) -> list[Seen]:
    """Return what the victim sees of each of its requests, in order. `slots`: of host memory."""
    world = make_world(slots, has_disk=False) if slots else make_device(depth)
    seen, late = list[Seen](), deque[Request]()
    run_alone(world, request_of(Move(VICTIM, (0,)), "first"), late)
    for number, move in enumerate(life):
        world.clock.advance(move.wait_s)
        for _ in range(IDLE_STEPS if move.wait_s else 0):
            world.step()  # what time brings to its end, it brings in both lives
        name = str(number)
        if move.who == VICTIM:
            run_alone(world, request_of(move, name), late)
            started = world.streams[name].started
            if started is None:
                seen.append(Seen(-1, ()))
            else:
                grants = tuple(f"{one.outcome} {one.tokens}" for one in started.leases)
                seen.append(Seen(started.cached_tokens, grants))
        elif attacked and move.is_late:
            late.append(request_of(move, name))
        elif attacked:
            world.submit(request_of(move, name))
            for _ in range(move.steps):
                world.step()
    return seen


def make_device(depth: int) -> World:
    """Return an engine without levels."""
    return World(
        EngineConfig(step_tokens_max=16, sequences_max=4),
        blocks=BLOCKS,
        block_size=SIZE,
        depth=depth,
        context_tokens=24,
    )


def request_of(move: Move, name: str) -> Request:
    """Return the request of a move."""
    leases = (LeaseRequest(len(move.prompt), LEASED, name),) if move.leased else ()
    quota = STRICT if move.who == VICTIM else Quota(payer=ATTACKER)
    grant = CacheGrant(move.who, quota, leases=leases)
    sampling = Sampling(temperature=0)
    return Request(name, move.prompt, move.outputs, grant, sampling, priority=move.priority)


def run_alone(world: World, request: Request, late: deque[Request]) -> None:
    """Submit a request and step until it has ended, whatever else runs; `late` ones come on the
    way."""
    world.submit(request)
    for _ in range(STEPS_MAX):
        if request.request_id not in world.live:
            return
        world.step()
        if late:
            world.submit(late.popleft())
    raise AssertionError("a request that does not end")


def check_life(life: list[Move], depth: int, slots: int = 0) -> None:
    """Compare what the victim sees with and without the attacker."""
    alone = seen_by_victim(life, attacked=False, depth=depth, slots=slots)

    attacked = seen_by_victim(life, attacked=True, depth=depth, slots=slots)

    assert attacked == alone


def random_life(chance: random.Random, *, priorities: int = 1) -> list[Move]:
    """Return a life from a seed."""
    life = []
    for _ in range(chance.randint(6, 24)):
        who = chance.choice([VICTIM, ATTACKER, ATTACKER])
        life.append(
            Move(
                who,
                tuple(chance.randint(0, 1) for _ in range(chance.randint(1, 10))),
                chance.random() < 0.3,
                chance.choice([1, 2, 6] if who == VICTIM else [1, 4, 10]),
                chance.choice([0.0, 0.0, 1.0, 3.0]),
                chance.choice([0, 1, 1, 3, 8]),
                0 if who == VICTIM else chance.randrange(priorities),
                who == ATTACKER and chance.random() < 0.4,
            )
        )
    return life


short = tokens.map(lambda words: words[:10])


def moves_of(who: bytes) -> st.SearchStrategy[Move]:
    """Draw the requests of one party."""
    is_victim = who == VICTIM
    return st.builds(
        Move,
        who=st.just(who),
        prompt=short,
        leased=st.booleans(),
        outputs=st.sampled_from([1, 2, 6] if is_victim else [1, 4, 10]),
        wait_s=st.sampled_from([0.0, 0.0, 1.0, 3.0]),
        steps=st.sampled_from([0, 1, 1, 3, 8]),
        priority=st.just(0) if is_victim else st.integers(0, 1),
        is_late=st.just(False) if is_victim else st.booleans(),
    )


lives = st.lists(
    moves_of(VICTIM) | moves_of(ATTACKER) | moves_of(ATTACKER), min_size=4, max_size=24
)

PINNED_AROUND = [
    Move(VICTIM, (1,) * 7, outputs=1),
    Move(ATTACKER, (0, 0, 1, 1, 0, 0, 0, 0, 1), outputs=8),
    Move(ATTACKER, (1, 0, 1, 1), outputs=8, steps=3),
    Move(VICTIM, (0, 1, 0, 1, 0), outputs=1),
    Move(VICTIM, (1,) * 7 + (0,), outputs=1),
]
"""The attacker's two sequences pin all the rest. The victim's second prompt was let in for room
that is not there, its own blocks inside its floor, and lost the part of a block it had found."""

STALLED = [
    Move(ATTACKER, (1,), outputs=10, steps=0),
    Move(ATTACKER, (0, 0, 0, 0, 0, 0, 0, 1), leased=True, outputs=10, steps=3),
    Move(ATTACKER, (0, 0, 1, 0, 1, 1), leased=True, outputs=10, steps=8),
    Move(VICTIM, (0, 0, 1, 1, 1, 0, 0, 0), leased=True, outputs=4),
    Move(ATTACKER, (1, 0, 0, 0, 1, 0, 1, 1), outputs=4, steps=0, is_late=True),
    Move(ATTACKER, (0, 1, 0, 1), outputs=4, steps=0, is_late=True),
    Move(VICTIM, (1, 1, 0, 1, 0), outputs=1),
]
"""The attacker has promises and sequences that cannot go on. The victim's request, which waits for
them, was given up first."""

PREEMPTED = [
    Move(VICTIM, (1, 1, 1, 1), outputs=1),
    *(Move(ATTACKER, (0, i % 2, i // 2), outputs=10, priority=1, is_late=True) for i in range(6)),
    Move(VICTIM, (0, 1, 1, 0), outputs=5),
    Move(VICTIM, (1, 1, 1, 1, 0), outputs=1),
]
"""Requests of a higher priority take the victim's slot in the middle of a block. The sequence left
that block to the cache, and at its ceiling an older block went for the copy of it."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@example(PINNED_AROUND, 1)
@example(STALLED, 1)
@example(PREEMPTED, 1)
@given(lives, st.sampled_from([1, 2]))
@settings(max_examples=150, deadline=None)
def test_what_runs_beside_changes_no_hit_inside_a_floor(life: list[Move], depth: int) -> None:
    """Neither blocks that others pin, nor slots, steps and priorities that they take."""
    check_life(life, depth)


@pytest.mark.slow
@pytest.mark.timeout(300)
@given(lives, st.sampled_from([12, 16, 32]))
@settings(max_examples=40, deadline=None)
def test_what_runs_beside_changes_no_hit_from_host_memory(life: list[Move], slots: int) -> None:
    """Nor slots of host memory, and moves, that others take."""
    check_life(life, 1, slots)


# -- planted faults -----------------------------------------------------------------------------


def check_lives(lives: Sequence[list[Move] | int]) -> None:
    """Check lives, or those of seeds."""
    for one in lives:
        life = random_life(random.Random(one), priorities=2) if isinstance(one, int) else one
        check_life(life, 1)


def all_of_its_own(original: Any) -> Any:
    """A payer may lose any of its own blocks, not only what it holds above its floor."""
    return lambda self, payer: 0


def anyone_gives(original: Any) -> Any:
    """Others may take blocks inside a floor."""
    return lambda self: self.evictable


def gives_up_the_first(original: Any) -> Any:
    """Of stalled requests the first one is given up, whoever holds what it lacks."""
    return lambda self, requests, is_inside_floor: original(self, requests, lambda one: False)


def keeps_the_tail(original: Any) -> Any:
    """A preempted sequence leaves its partly filled block to the cache, wherever it is."""

    def is_inside(self: PrefixCache, namespace: bytes, quota: Quota, wanted: int) -> bool:
        return bool(wanted) and original(self, namespace, quota, wanted)

    return is_inside


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "fault", "lives"),
    [
        (BlockManager, "_firm_floor", all_of_its_own, [PINNED_AROUND]),
        (PayerAccount, "spare_blocks", anyone_gives, range(40)),
        (PrefixCache, "is_inside_floor", keeps_the_tail, [PREEMPTED]),
        (Timeouts, "find_stalled", gives_up_the_first, [STALLED]),
    ],
)
def test_a_planted_leak_is_caught(
    owner: type,
    name: str,
    fault: Callable[[Any], Any],
    lives: Sequence[list[Move] | int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A property that misses this fault proves nothing when it holds."""
    monkeypatch.setattr(owner, name, fault(getattr(owner, name)))

    with pytest.raises(AssertionError):
        check_lives(lives)
