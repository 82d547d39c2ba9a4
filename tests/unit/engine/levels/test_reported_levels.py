"""What operators learn of levels: whose bytes, what was chosen, what only the disk has."""

from __future__ import annotations

from msgspec.structs import replace

from engine.api import Erase
from engine.client.namespace_stats import NamespaceTable
from tests.unit.engine.levels.leveled_worlds import LeveledWorld, ask, leased, prompt


def test_the_disks_namespaces_are_known_after_a_restart() -> None:
    """Otherwise an erasure would not find what only the disk has."""
    world = LeveledWorld()
    world.run(ask("first", prompt(1), grant=leased(13)))
    world.restart()
    core = world.core
    table = NamespaceTable()
    table.add(core.stats(names=core.namespaces()).changed)

    (space,) = table
    assert (space.namespace, space.blocks, space.is_stored) == (b"n", 0, True)

    core.erase(Erase(1, b"n"))
    world.settle()
    table.add(core.stats(names=[b"n"]).changed)
    assert list(table) == []


def test_what_a_tenant_keeps_off_the_disk_is_not_stored() -> None:
    """Host memory may have it; promised or not, used again or not."""
    world = LeveledWorld()
    never = replace(leased(13), at_rest="never")
    for name in ("first", "again"):
        world.run(ask(name, prompt(1), grant=never))
    world.push_out()

    assert world.stored() == set()
    assert world.levels.host_bytes(b"n") > 0
    world.run(ask("allowed", prompt(2), grant=leased(13)))
    assert world.stored() == set(), "nothing more of a namespace that has forbidden it"


def test_statistics_tell_owners_and_choices() -> None:
    """Bytes by payer, and for how many prompts loading was chosen."""
    world = LeveledWorld()
    world.run(ask("first", prompt(1)))
    world.push_out()
    world.run(ask("again", prompt(1)))
    host, disk = world.core.stats().levels

    assert {one.payer: one.used for one in host.payers} == {b"payer": host.used_bytes}
    assert (host.chosen_total, host.declined_total) == (1, 0)
    assert (disk.chosen_total, disk.pending_erasures) == (0, 0)
    world.core.erase(Erase(1, b"n"))
    assert world.core.stats().levels[1].pending_erasures == 1


def test_blocks_that_are_evicted_without_a_copy_are_counted() -> None:
    """Where copies are not made in time, prefixes are computed again, and nothing else tells."""
    copied, uncopied = LeveledWorld(disk=False), LeveledWorld(disk=False)
    uncopied.weather.fails = 1.0
    for world in (copied, uncopied):
        world.run(ask("first", prompt(1)))
        world.push_out()
    kept, lost = (world.core.stats().levels[0] for world in (copied, uncopied))

    assert uncopied.core.cache.stats().evicted_blocks_total >= lost.uncopied_total > 10
    assert kept.uncopied_total < lost.uncopied_total / 2


def test_memory_that_a_device_does_not_reach_is_no_room() -> None:
    """It is told, with how much it is; the level stays open."""
    world = LeveledWorld(disk=False)
    before = world.core.stats().levels[0]
    world.memory.unusable_bytes = 4_096
    after = world.core.stats().levels[0]

    assert (before.state, before.reason) == ("open", "")
    assert (after.state, after.reason) == ("open", "4,096 bytes of it could not be pinned")
    assert after.capacity_bytes == before.capacity_bytes - 4_096
