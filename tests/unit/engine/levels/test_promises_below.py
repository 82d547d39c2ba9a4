"""Promises that move down: kept on disk beyond the device's size, and lost only aloud."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api import CacheGrant, Erase, LeaseRequest, Peek, Quota, Retention
from engine.core.core import Core
from engine.moves import Renew, StorageStats
from tests.unit.engine.levels.leveled_worlds import (
    HOUR,
    PAYER,
    LeveledWorld,
    ask,
    leased,
    prompt,
)

SHORT = Retention("short", promise_s=100, limit_s=200)


def with_promise(retention: Retention = HOUR, **settings: Any) -> LeveledWorld:
    """Return an engine that has promised the three whole blocks of the first prompt."""
    world = LeveledWorld(**settings)
    world.run(ask("first", prompt(1), grant=leased(12, retention)))
    return world


def pushed(world: LeveledWorld, count: int) -> None:
    """Run `count` prompts of three whole blocks and one token, each promised for an hour."""
    for number in range(count):
        world.run(ask(f"leased{number}", prompt(number), grant=leased(12)))


def test_more_is_promised_than_the_device_holds() -> None:
    """Forty promises of ninety-six blocks in a pool of forty: all are read back, none is lost."""
    world = LeveledWorld()
    pushed(world, 40)

    assert all(world.grant(f"leased{n}").outcome == "granted" for n in range(40))
    assert world.promised()[:2] == (96, 96)
    world.push_out()
    assert world.promised() == (96, 96, 96)
    for number in range(40):
        assert world.run(ask(f"again{number}", prompt(number))) == [12]
        assert world.loaded(f"again{number}") != {}
    assert not world.lost
    assert world.promised()[:2] == (96, 96)


def test_without_a_durable_level_a_promise_stays_on_the_device() -> None:
    """Host memory that ends with the engine is not good enough unless the configuration says so."""
    world = LeveledWorld(disk=False)
    pushed(world, 14)

    outcomes = [world.grant(f"leased{n}").outcome for n in range(14)]
    assert outcomes == ["granted"] * 11 + ["clipped", "refused", "refused"]
    assert world.grant("leased11").bound == "pool"
    assert world.cache.promisable_blocks == 35
    assert world.promised() == (35, 0, 0)


def test_host_memory_keeps_promises_where_it_may() -> None:
    """Its copies are not given up for room, and promises take 7/8 of its slots."""
    world = LeveledWorld(slots=80, disk=False, host_keeps_promises=True)
    pushed(world, 40)
    world.push_out(30)

    assert world.promised()[0] == world.cache.promisable_blocks == 70
    host = world.core.stats().levels[0]
    assert host.promised_bytes == 70 * 1000
    assert sum(payer.promised for payer in host.payers) == host.promised_bytes
    granted = [number for number in range(40) if world.grant(f"leased{number}").tokens == 12]
    assert len(granted) > 20
    for number in granted:
        assert world.run(ask(f"again{number}", prompt(number))) == [12]
    assert not world.lost


def test_a_promise_is_charged_to_the_device_until_the_disk_has_it() -> None:
    """A disk that takes nothing leaves the device's own bound, with the device's words."""
    world = LeveledWorld()
    world.disk.is_away = True
    pushed(world, 14)

    assert [world.grant(f"leased{n}").outcome for n in range(10, 14)] == [
        *("granted", "clipped", "refused", "refused")
    ]
    assert world.grant("leased13").bound == "pool"
    assert world.promised() == (35, 0, 0)
    world.disk.is_away = False
    for _ in range(4):
        world.pass_s(1.0)
    assert world.promised() == (35, 35, 0)


def test_a_full_disk_breaks_no_promise() -> None:
    """What it does not take stays on the device; what it has is never dropped."""
    world = LeveledWorld(records_max=30)
    pushed(world, 20)
    world.push_out()

    granted = [number for number in range(20) if world.grant(f"leased{number}").tokens == 12]
    assert len(granted) == 20
    assert world.promised()[:2] == (56, 26)
    for number in granted:
        assert world.run(ask(f"again{number}", prompt(number))) == [12]
    assert not world.lost


def test_a_promise_read_again_needs_no_further_room() -> None:
    """A lease on what is promised below is granted whole, however full the quota is."""
    world = LeveledWorld()
    full = Quota(payer=b"payer", promised_blocks_max=6)
    for number in range(3):
        world.run(ask(f"leased{number}", prompt(number), grant=leased(12, quota=full)))
    assert [world.grant(f"leased{n}").tokens for n in range(3)] == [12, 12, 0]
    assert world.grant("leased2").bound == "quota"

    world.push_out()
    assert world.promised() == (6, 6, 6)
    world.run(ask("again", prompt(1), grant=leased(12, quota=full)))
    assert world.grant("again").outcome == "granted"
    assert world.promised()[:2] == (6, 6)
    longer = prompt(1, 12) + prompt(7, 8)
    world.run(ask("longer", longer, grant=leased(20, quota=full)))
    assert (world.grant("longer").tokens, world.grant("longer").bound) == (12, "quota")


def test_a_ceiling_scales_to_the_level() -> None:
    """Seven eighths of the payer's part of the level may be promised."""
    world = LeveledWorld(disk=False, host_keeps_promises=True)  # 120 slots for 40 blocks
    tight = Quota(payer=b"payer", ceiling_blocks=8)
    for number in range(8):
        world.run(ask(f"leased{number}", prompt(number), grant=leased(12, quota=tight)))

    assert world.promised()[0] == 21  # of 24 slots
    assert world.grant("leased7").bound == "ceiling"


def test_another_payers_floor_is_left_free_on_the_level() -> None:
    """Promises and floors together take seven eighths of it."""
    world = LeveledWorld(disk=False, host_keeps_promises=True)
    north = CacheGrant(b"north", Quota(floor_blocks=20))
    world.run(ask("north", prompt(99), grant=north))
    pushed(world, 20)

    assert world.promised()[0] == 105 - 60


def test_a_path_moves_down_from_its_end_up() -> None:
    """While a block is promised on the device, so are those above it."""
    world = with_promise()
    world.disk.is_away = True
    longer = prompt(1, 12) + prompt(7, 9)
    world.run(ask("longer", longer, grant=leased(20)))

    assert world.promised() == (5, 0, 0)
    world.disk.is_away = False
    world.clock.advance(1.0)
    for _ in range(3):
        world.step()
    world.settle()
    assert world.promised() == (5, 5, 0)


def test_several_leases_end_each_at_its_time() -> None:
    """The longer one keeps its blocks, and only those."""
    world = LeveledWorld()
    long = Retention("long", promise_s=1000)
    asked = (LeaseRequest(8, long, "long"), LeaseRequest(20, SHORT, "short"))
    world.run(ask("both", prompt(1, 21), grant=CacheGrant(b"n", PAYER, leases=asked)))
    world.push_out()
    assert world.promised() == (5, 5, 5)

    world.clock.advance(101)
    world.step()
    assert world.promised() == (2, 2, 2)
    world.clock.advance(1000)
    world.step()
    assert world.promised() == (0, 0, 0)
    assert not world.lost


def test_a_read_renews_a_promise_that_moved_down() -> None:
    """As it renews one on the device; the disk is told before the end that it knows."""
    world = with_promise(SHORT)
    world.push_out()
    world.clock.advance(90)
    world.run(ask("again", prompt(1)))
    world.push_out()
    world.clock.advance(90)

    assert world.below(prompt(1))[1] == {"host": 12} or world.below(prompt(1))[1] == {"disk": 12}
    assert world.promised()[0] == 3
    renewed = [one.promise_s for one in world.disk.commands if isinstance(one, Renew)]
    assert renewed[-1] == pytest.approx(100, abs=1)
    left = [one.promise_at_s for one in world.disk.records.values() if one.namespace == b"n"]
    assert min(left) > world.clock()


def test_the_disk_is_told_of_a_lease_that_ends_inside_a_kept_block() -> None:
    """Its last block is promised for longer, though the request committed none."""
    world = with_promise(SHORT)
    long = leased(3, Retention("long", promise_s=1000))
    world.run(ask("part", prompt(1)[:3], grant=long, max_tokens=1))
    world.step()

    first = next(one for i, one in world.disk.records.items() if len(world.disk.path(i)) == 4)
    assert first.promise_at_s == pytest.approx(1000, abs=1)


@pytest.mark.parametrize("tokens", [8, 16])
def test_the_disk_is_told_of_a_lease_over_kept_blocks_that_more_follow(tokens: int) -> None:
    """Those that both requests begin with are promised for longer: here computed again."""
    world = LeveledWorld(host_tokens_min=40, disk_tokens_min=40)  # nothing is worth loading
    world.run(ask("first", prompt(1), grant=leased(12, SHORT)))
    world.push_out()
    further = (*prompt(1)[:8], *prompt(2, 9))
    long = Retention("long", promise_s=1000)
    world.run(ask("more", further, grant=leased(tokens, long)))
    world.step()

    assert world.loaded("more") == {}
    ends = {world.disk.path(i): one.promise_at_s for i, one in world.disk.records.items()}
    assert [ends[further[:4]], ends[further[:8]]] == pytest.approx([1000, 1000], abs=5)


def test_a_lost_record_is_told_once() -> None:
    """Its promise ends; what hangs on it cannot be read either."""
    world = LeveledWorld()
    world.run(ask("first", prompt(1), grant=leased(12)), ask("other", prompt(2), grant=leased(12)))
    world.push_out(60)
    assert world.below(prompt(1))[1] == {"disk": 12}
    middle = next(i for i in world.disk.records if world.disk.path(i) == prompt(1)[:8])
    world.disk.lose(middle)

    assert world.run(ask("again", prompt(1))) == [4]
    assert [(one.namespace, one.blocks) for one in world.lost] == [(b"n", 1)] * 2
    assert world.promised()[0] == 4
    assert world.run(ask("other again", prompt(2))) == [12]
    assert len(world.lost) == 2


def test_a_copy_lost_while_the_device_has_the_block_breaks_nothing() -> None:
    """The promise returns to the device, where it is charged again."""
    world = with_promise(SHORT)
    assert world.promised() == (3, 3, 0)
    world.disk.records.clear()
    for copy in list(world.levels.places):
        if copy.parent is not None and copy.record_id and copy.slot >= 0:
            world.levels.places.strike(copy, copy.slot)
    world.clock.advance(90)
    world.run(ask("again", prompt(1)))  # renews, and learns that the records are gone

    assert not world.lost
    assert world.promised()[0] == 3


def test_a_disk_that_stays_away_loses_what_it_alone_has() -> None:
    """After a minute, once; what is still on the device returns to it."""
    world = LeveledWorld()
    world.run(ask("first", prompt(1), grant=leased(12)), ask("other", prompt(2), grant=leased(12)))
    world.push_out(60)
    world.run(ask("again", prompt(2)))
    world.disk.beat(StorageStats("open"))
    world.step()
    world.disk.is_away = True
    for _ in range(70):
        world.disk.beat(StorageStats("off", "it died"))
        world.clock.advance(1.0)
        world.step()

    assert len(world.lost) == 3
    assert world.promised() == (3, 0, 0) or world.promised() == (3, 3, 0)


@pytest.mark.parametrize("what", ["all", "lease", "prefix"])
def test_an_erasure_ends_promises_on_every_level(what: str) -> None:
    """Nothing of it counts as lost, and its charge is gone at once."""
    world = with_promise()
    world.push_out()
    world.run(ask("half", prompt(1, 9)))
    lease_id = "lease" if what == "lease" else None
    tokens = prompt(1)[:3] if what == "prefix" else None
    world.core.erase(Erase(1, b"n", lease_id, tokens))
    world.written[b"n"] = []

    assert world.promised() == (0, 0, 0)
    world.settle()
    assert not world.lost
    assert world.run(ask("again", prompt(1))) == [0]


def test_a_quote_counts_what_is_promised_below() -> None:
    """As it counts what the device holds."""
    world = with_promise()
    assert _promised_tokens(world.core, prompt(1)) == 12
    world.push_out()

    assert world.below(prompt(1))[0] == 0
    assert _promised_tokens(world.core, prompt(1)) == 12


def test_a_part_of_a_block_holds_no_path_on_the_device() -> None:
    """Levels copy whole blocks, so a promise below is one of whole blocks."""
    world = LeveledWorld()
    world.run(ask("first", prompt(1, 14), grant=leased(14)))

    assert world.grant("first").tokens == 14
    assert world.promised() == (3, 3, 0)


def test_a_request_waits_for_a_promise_that_is_being_stored() -> None:
    """A pool that promises hold for a moment fails no request."""
    world = LeveledWorld(blocks=12)
    world.weather.polls_max = 3
    for number in range(8):
        world.run(ask(f"leased{number}", prompt(number), grant=leased(12)))
        long = ask(f"long{number}", prompt(50 + number, 40), grant=CacheGrant(b"other", PAYER))
        world.run(long)
        assert world.final(f"long{number}").ending == "done"


def test_a_lease_erased_here_leaves_what_another_covers_promised() -> None:
    """The copies go with the one lease; the promise of the other returns to the device, and moves
    down again with new copies."""
    world = LeveledWorld()
    world.run(ask("one", prompt(1), grant=leased(12, lease_id="one")))
    world.run(ask("two", prompt(1, 20), grant=leased(16, lease_id="two")))
    world.core.erase(Erase(1, b"n", "one"))
    world.settle()
    for _ in range(3):
        world.pass_s(1.0)

    assert world.promised() == (4, 4, 0)
    assert world.run(ask("again", prompt(1, 20))) == [19]
    assert not world.lost


def test_what_promises_hold_on_the_device_has_a_bound_of_its_own() -> None:
    """So a disk that takes nothing does not leave the pool to one payer; its promises below are
    not counted there.
    """
    world = LeveledWorld()
    small = Quota(payer=b"payer", promised_blocks_max=60, promised_on_device_max=7)
    for number in range(4):
        world.run(ask(f"kept{number}", prompt(number), grant=leased(12, quota=small)))
    world.disk.is_away = True
    for number in range(4, 8):
        world.run(ask(f"kept{number}", prompt(number), grant=leased(12, quota=small)))

    assert [world.grant(f"kept{n}").tokens for n in range(8)] == [12] * 6 + [4, 0]
    assert world.grant("kept7").bound == "quota"


def _promised_tokens(core: Core, tokens: tuple[int, ...]) -> int:
    return core.peek(Peek(1, b"n", tokens)).promised_tokens
