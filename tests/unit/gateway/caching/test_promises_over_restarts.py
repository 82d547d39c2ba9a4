"""Promises over the end of an engine, with a disk that holds what was promised.

What comes back is read, billed as read and not broken; what does not is told as without a disk.
"""

from __future__ import annotations

from engine.api import LeaseGrant, LevelWait
from gateway.generation.usage import cache_header
from tests.tables import each_row
from tests.unit.gateway.caching.test_contract import World, started

HOUR_S = 3_600.0


def restarted(*, comes_back: bool) -> World:
    """Return a world whose engine has ended after a write, with a disk that serves."""
    world = World()
    world.has_disk = True
    world.run("abc", {2: "1h"})
    world.epoch = "second"
    if not comes_back:
        world.there.clear()
    return world


def outcome(world: World) -> dict[str, int]:
    """Return the counts of the class, of promises that ended or run."""
    counts = world.contracts.promises.by_class(world.clock())["1h"]
    return {name: counts[name] for name in ("given", "kept", "broken", "running") if counts[name]}


def test_what_comes_back_is_read_and_not_broken() -> None:
    """The request loads it, and it is not computed again."""
    world = restarted(comes_back=True)
    record = world.run("abc", {2: "1h"})

    assert (record.read, record.recomputed_promised) == ({"1h": 20}, 0)
    assert world.last.why_missed() == ""
    assert outcome(world) == {"given": 1, "running": 1}
    world.clock.advance(2 * HOUR_S)
    assert outcome(world) == {"given": 1, "kept": 1}


def test_what_was_not_promised_may_come_back_too() -> None:
    """Then it is a read; else the miss says that the engine has restarted."""
    causes = []
    for comes_back in (True, False):
        world = World()
        world.run("abc", {2: "24h"})
        world.epoch = "second"
        if not comes_back:
            world.there.clear()
        record = world.run("abc", {2: "24h"})
        causes.append((record.read_tokens(), world.last.why_missed()))

    assert causes == [(20, ""), (0, "restarted")]


@each_row(("cached", "breached"), [(20, 0), (11, 0), (10, 10), (0, 20)])
def test_a_part_of_a_block_is_not_kept_below(cached: int, breached: int) -> None:
    """A level has whole blocks: what is computed again at the end of a prefix breaks nothing."""
    world = restarted(comes_back=True)
    record = world.resolve("abc", {2: "1h"}).begin(started(cached))

    assert (record.read, record.recomputed_promised) == ({"1h": 20}, breached)
    assert outcome(world) == ({"given": 1, "broken": 1} if breached else {"given": 1, "running": 1})


def test_promise_without_a_later_read_is_kept_while_a_disk_serves() -> None:
    """Without one, the end of the engine breaks it."""
    kept, broken = restarted(comes_back=True), restarted(comes_back=False)
    broken.has_disk = False
    for world in (kept, broken):
        world.clock.advance(2 * HOUR_S)

    assert outcome(kept) == {"given": 1, "kept": 1}
    assert outcome(broken) == {"given": 1, "broken": 1}


def test_what_came_back_is_of_the_new_engine() -> None:
    """If that engine ends without a disk, the promise is broken; it is told as lost to a restart
    only then."""
    world = restarted(comes_back=True)
    world.run("abc", {2: "1h"})
    world.has_disk, world.epoch = False, "third"
    world.clock.advance(2 * HOUR_S)

    assert outcome(world) == {"given": 1, "broken": 1}


def test_cache_header_tells_tokens_by_level() -> None:
    """Only where something was loaded, and a fidelity that is not exact."""
    world = World()
    contract = world.resolve("abc", {})
    contract.begin(started(20, loaded_tokens=(("disk", 4), ("host", 8))))
    plain = world.resolve("abc", {})
    plain.begin(started(20, [LeaseGrant("", "5m", "granted", 0)]))

    assert cache_header([contract]).endswith("physical=20; device=8; host=8; disk=4")
    contract.wait = LevelWait(0.0124, "disk")
    assert cache_header([contract]).endswith("disk=4; load_ms=12.4")
    contract.wait = LevelWait(0.0, None, 20, "not_worth_loading")
    assert cache_header([contract]).endswith("disk=4"), "nothing was waited for"
    assert cache_header([plain]).endswith("physical=20")
    assert cache_header([contract, plain]).endswith("physical=40; device=28; host=8; disk=4")
    contract.fidelity = "near"
    assert cache_header([contract]).endswith("disk=4; fidelity=near; read_fidelity=exact")
    contract.begin(started(20, loaded_tokens=(("disk", 4),), fidelity="near"))
    assert cache_header([contract, plain]).endswith("fidelity=near; read_fidelity=near")
