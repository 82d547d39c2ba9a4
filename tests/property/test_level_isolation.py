"""One payer's requests change nothing that another finds inside its floors, on any level (rule
*Isolation*).

As `test_isolation` for the device: the same requests of a victim run twice over a whole engine with
host memory and a disk, with and without an attacker's between them, and the victim's hits on each
level are compared. The disk itself, which has quotas of its own, is tested below: the same stores
and looks over the real store, with and without another payer's.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.api import CacheGrant, LeaseRequest, Quota, Request, Retention, Sampling
from engine.cache import PrefixCache
from engine.config import EngineConfig, LevelsConfig
from engine.levels.host.accounts import HostAccounts, HostShare
from engine.levels.levels import Levels
from engine.moves import ROOT, SetStoredQuotas
from engine.storage.space.quotas import DiskQuotas
from tests.checkers import World
from tests.examples import examples
from tests.fake_levels import FakeStorage, FakeTransferEngine, Weather
from tests.fakes import FakeRunner
from tests.property.test_isolation import ATTACKER, VICTIM, Act, lives
from tests.unit.engine.storage.local_storage import LocalRig
from tests.unit.engine.storage.storage_rig import RUN
from tests.unit.engine.storage.test_store import room_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SIZE, BLOCKS, FLOOR = 2, 16, 6
STEPS_MAX = 400
LEASED = Retention("leased", promise_s=4)  # the fake disk knows no limits
CONFIG = LevelsConfig(host_mib=1, disk_gib=1.0, host_tokens_min=1, disk_tokens_min=1)


def make_world(slots: int, *, has_disk: bool) -> World:
    """Return an engine whose host memory has `slots`, with a disk or without."""
    chance, weather = random.Random(1), Weather()

    def below(cache: PrefixCache, runner: Callable[[], FakeRunner]) -> Levels:
        memory = FakeTransferEngine(runner, slots, chance, weather)
        disk = FakeStorage(memory, chance, weather) if has_disk else None
        return Levels(cache, CONFIG, memory, disk)

    return World(
        EngineConfig(step_tokens_max=16, sequences_max=4),
        blocks=BLOCKS,
        block_size=SIZE,
        context_tokens=24,
        make_levels=below,
    )


def seen_by_victim(
    life: list[Act], slots: int, *, has_disk: bool, attacked: bool
) -> list[tuple[int, dict[str, int]]]:
    """Return the victim's cached tokens, in whole blocks, and where they were, in order.

    A part of a block is found only while there is a block to copy it to: that is the device's, not
    the levels', as is what requests that run at once do to each other
    (`test_concurrent_isolation`). What a request of the victim has begun to move comes to its end
    before the next call: otherwise the steps of the attacker's would be time for it, which decides
    from where it is loaded later.
    """
    world, seen = make_world(slots, has_disk=has_disk), list[tuple[int, dict[str, int]]]()
    strict = Quota(floor_blocks=FLOOR, ceiling_blocks=FLOOR, payer=VICTIM)
    world.submit(Request("first", (0,), 1, CacheGrant(VICTIM, strict), Sampling(temperature=0)))
    world.settle()
    for number, act in enumerate(life):
        world.clock.advance(act.wait_s)
        if act.who == ATTACKER and not attacked:
            continue
        leases = (LeaseRequest(len(act.prompt), LEASED, str(number)),) if act.leased else ()
        quota = strict if act.who == VICTIM else Quota(payer=ATTACKER)
        grant = CacheGrant(act.who, quota, leases=leases)
        outputs = 2 if act.who == VICTIM else 12
        name = str(number)
        world.submit(Request(name, act.prompt, outputs, grant, Sampling(temperature=0)))
        for _ in range(STEPS_MAX):
            if name in world.live:
                world.step()
        assert name not in world.live, "a request that does not end"
        if act.who == ATTACKER:
            continue
        world.settle()
        started = world.streams[name].started
        if started is None:  # its own promises leave no room
            seen.append((-1, {}))
        else:
            whole = started.cached_tokens // SIZE * SIZE
            seen.append((whole, {**dict(started.loaded_tokens)}))
    return seen


def check_life(life: list[Act], slots: int, *, has_disk: bool) -> None:
    """Compare the victim's hits with and without the attacker."""
    alone = seen_by_victim(life, slots, has_disk=has_disk, attacked=False)

    attacked = seen_by_victim(life, slots, has_disk=has_disk, attacked=True)

    assert attacked == alone


PINNED_AWAY = [
    Act(VICTIM, (1, 1, 1, 0), False, 1.0),
    Act(VICTIM, (0, 1), False, 0.0),
    Act(ATTACKER, (0, 0, 0, 1, 0, 0, 1), True, 3.0),
    Act(ATTACKER, (1, 0, 0), False, 0.0),
    Act(VICTIM, (0, 0, 0, 1, 1, 1, 0, 0, 0), False, 0.0),
    Act(VICTIM, (0, 1, 0), False, 3.0),
]
"""Copies ahead of need pinned all that the attacker could give, and the victim, inside its floor,
evicted a block of its own."""


MOVED_MEANWHILE = [
    Act(VICTIM, (0, 1, 0), True, 0.0),
    Act(ATTACKER, (0,), False, 0.0),
    Act(VICTIM, (0,) * 8, True, 0.0),
    Act(VICTIM, (0,), False, 0.0),
    Act(VICTIM, (0, 1, 0, 1, 0), False, 0.0),
]
"""The victim's first prefix got to the disk while the attacker's request ran: that is timing."""


@example(MOVED_MEANWHILE, 12, True)
@example(PINNED_AWAY, 16, False)
@given(lives, st.sampled_from([12, 16, 32]), st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_an_attacker_changes_no_hit_on_any_level(
    life: list[Act], slots: int, has_disk: bool
) -> None:
    """Filling pool and host memory must neither reveal nor decide the hits of a strict payer."""
    check_life(life, slots, has_disk=has_disk)


# -- planted faults -----------------------------------------------------------------------------


def bound_by_others(original: Any) -> Any:
    """A payer's ceiling in host memory is what others leave."""

    def take(self: HostAccounts, payer: bytes, form: int = 0, at_s: float | None = None) -> Any:
        has_two = self.pool.used < self.pool.layout.slots - 2
        return original(self, payer, form, at_s) if has_two else None

    return take


def drops_another(original: Any) -> Any:
    """A payer that makes room drops a copy of whoever was used least recently."""

    def make_room(self: HostAccounts, taker: HostShare, form: int, at_s: float | None) -> bool:
        leaves = [s.next_dropped(form) for s in self.shares()]
        oldest = min((c for c in leaves if c is not None), key=lambda c: c.last_use_s, default=None)
        if oldest is None:
            return False
        self._drop(oldest)
        return True

    return make_room


def random_life(chance: random.Random) -> list[Act]:
    """Return a life as the strategy draws it, from a seed."""
    life = []
    for _ in range(chance.randint(8, 24)):
        who = chance.choice([VICTIM, ATTACKER, ATTACKER])
        prompt = tuple(chance.randint(0, 1) for _ in range(chance.randint(1, 10)))
        wait_s = chance.choice([0.0, 0.0, 1.0, 3.0])
        life.append(Act(who, prompt, chance.random() < 0.5, wait_s))
    return life


def check_lives(count: int) -> None:
    """Check so many seeded lives, with and without a disk."""
    for seed in range(count):
        life = random_life(random.Random(seed))
        check_life(life, (12, 16, 32)[seed % 3], has_disk=seed % 2 == 0)


@pytest.mark.parametrize(
    ("name", "fault"), [("take", bound_by_others), ("_make_room", drops_another)]
)
def test_a_planted_leak_is_caught(
    name: str, fault: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A property that misses this fault proves nothing when it holds."""
    monkeypatch.setattr(HostAccounts, name, fault(getattr(HostAccounts, name)))

    with pytest.raises(AssertionError):
        check_lives(400)


# -- the disk -----------------------------------------------------------------------------------

ON_DISK = st.lists(
    st.tuples(
        st.sampled_from([VICTIM, ATTACKER, ATTACKER]),
        st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
        st.sampled_from([0.0, 0.0, 5.0]),
    ),
    min_size=6,
    max_size=40,
)
"""Stores of a path by a party, promised for some seconds or not."""


def found_on_disk(
    stores: list[tuple[bytes, tuple[int, ...], float]], *, attacked: bool
) -> list[int]:
    """Return how many runs the victim finds of each path that it stores, just before it does."""
    with tempfile.TemporaryDirectory(prefix="isolation-") as folder:
        make: Callable[..., LocalRig] = LocalRig
        rig = make(Path(folder) / "levels", **room_for(10))
        try:
            quota = Quota(floor_blocks=FLOOR, ceiling_blocks=FLOOR, payer=VICTIM)
            rig.storage.send(SetStoredQuotas((quota,)))
            found = []
            for who, path, promise_s in stores:
                rig.clock.advance(1.0)
                if who == ATTACKER and not attacked:
                    continue
                words = tuple(number for number in path for _ in range(RUN))
                known = rig.found(who, words)
                if who == VICTIM:
                    found.append(len(known))
                if rest := words[len(known) * RUN :]:
                    parent, above = (known[-1] if known else ROOT), words[: len(known) * RUN]
                    command = rig.store_command(
                        *(who, rest), parent=parent, above=above, promise_s=promise_s, payer=who
                    )
                    rig.send_store(command)
            return found
        finally:
            rig.close()


@given(ON_DISK)
@settings(max_examples=examples(30), deadline=None)
def test_an_attacker_changes_no_hit_on_the_disk(
    stores: list[tuple[bytes, tuple[int, ...], float]],
) -> None:
    """The store's own quotas hold as those of host memory do."""
    assert found_on_disk(stores, attacked=True) == found_on_disk(stores, attacked=False)


def test_a_disk_that_takes_from_anyone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property above would find it."""

    def anyone(
        self: DiskQuotas, used: Mapping[bytes, int], taker: bytes, without: Container[bytes]
    ) -> bytes | None:
        return next((payer for payer in used if payer not in without), None)

    monkeypatch.setattr(DiskQuotas, "victim", anyone)
    stores: list[tuple[bytes, tuple[int, ...], float]] = [(VICTIM, (0, 1, 2), 0.0)]
    stores += [(ATTACKER, (n % 4, 3, n % 2), 0.0) for n in range(8)]
    stores += [(VICTIM, (0, 1, 2), 0.0)]

    assert found_on_disk(stores, attacked=True) != found_on_disk(stores, attacked=False)
