"""What a request is told of the levels below the device: how long it waited for its load, and why a
level did not bring what it had.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.api import LevelName, LevelWait
from engine.levels.level_use import LevelUse
from engine.moves import StorageStats
from tests.unit.engine.levels.leveled_worlds import LeveledWorld, ask, leased, prompt


def on_host(**settings: Any) -> LeveledWorld:
    """Return an engine without a disk, whose first prompt only host memory has."""
    world = LeveledWorld(disk=False, verify_host=1, **settings)
    world.run(ask("first", prompt(1)))
    world.push_out()
    return world


def on_disk(**settings: Any) -> LeveledWorld:
    """Return an engine whose first prompt only the disk has."""
    world = LeveledWorld(**settings)
    world.run(ask("first", prompt(1), grant=leased(13)))
    world.forget_promises()
    world.restart()
    return world


def not_loaded(world: LeveledWorld) -> dict[str, dict[str, int]]:
    """Return the prompts that were not loaded as far as a level had them, by level and reason."""
    return {one.name: one.not_loaded for one in world.core.stats().levels}


def test_a_request_without_copies_is_told_nothing() -> None:
    """As without levels."""
    world = on_host()

    assert world.started("first").wait is None


@pytest.mark.parametrize(("make", "level"), [(on_host, "host"), (on_disk, "disk")])
def test_a_load_is_told_with_its_time_and_level(
    make: Callable[..., LeveledWorld], level: str
) -> None:
    """Beside the time in the queue, of which it is a part."""
    world = make()
    world.weather.polls_max = 4
    world.submit(ask("again", prompt(1)))
    while not world.levels.loads.moves:
        world.step()
    world.clock.advance(0.125)
    world.settle()
    wait = world.wait("again")

    assert (world.cached("again"), wait.level) == (12, level)
    assert (wait.missed_tokens, wait.cause) == (0, "")
    assert 0.125 <= wait.load_s <= world.final("again").usage.queue_s


def test_a_failed_load_says_so() -> None:
    """What it should have brought is counted, though it is computed."""
    world = on_host()
    world.weather.fails = 1.0
    world.run(ask("again", prompt(1)))
    wait = world.wait("again")

    assert (wait.level, wait.missed_tokens, wait.cause) == ("host", 12, "level_failed")
    assert not_loaded(world) == {"host": {"failed": 1}}


def test_damaged_bytes_in_host_memory_say_so() -> None:
    """The second run is damaged: the first one counts, and the level counts the damage."""
    world = on_host()
    copies = world.levels.places.match(b"n", prompt(1), world.clock())
    world.memory.contents[copies[1].slot] = (None,) * 4
    world.run(ask("again", prompt(1)))

    wait = world.wait("again")
    assert (wait.missed_tokens, wait.cause, world.cached("again")) == (8, "damaged", 4)
    assert [one.damaged_total for one in world.core.stats().levels] == [1]
    assert not_loaded(world) == {"host": {"damaged": 1}}


def test_a_damaged_record_says_so() -> None:
    """A record that is gone is no damage."""
    for is_damaging, cause in ((True, "damaged"), (False, "level_failed")):
        world = on_disk()
        world.weather.fails, world.weather.is_damaging = 1.0, is_damaging
        world.run(ask("again", prompt(1)))

        assert world.wait("again").cause == cause


@pytest.mark.parametrize("depth", [1, 2])
def test_a_load_beyond_its_deadline_came_too_late(depth: int) -> None:
    """A transfer engine that hangs holds its blocks, and no request. The wait is told, too."""
    world = on_host(depth=depth)
    world.weather.polls_max = 10**6
    world.chance.seed(1)
    world.submit(ask("again", prompt(1)))
    world.step_until_loading()
    world.clock.advance(0.3)
    for _ in range(12):
        world.step()

    wait = world.wait("again")
    assert (wait.cause, wait.missed_tokens) == ("level_failed", 12)
    assert wait.load_s >= 0.3
    assert not_loaded(world) == {"host": {"late": 1}}
    assert world.streams["again"].finished is not None
    assert len(world.levels.loads) == 1


def test_a_disk_that_does_not_answer_in_time_came_too_late() -> None:
    """It costs `look_ms`, and may have had all of the prompt but its last token."""
    world = on_disk(look_ms=20.0)
    world.weather.polls_max = 10**6
    world.chance.seed(4)
    world.submit(ask("again", prompt(1)))
    world.step()
    is_waiting = world.core.stats().loading == 1
    world.clock.advance(0.021)
    for _ in range(4):
        world.step()

    assert is_waiting
    assert world.cached("again") == 0
    assert world.wait("again") == LevelWait(0.0, None, 12, "level_failed")
    assert not_loaded(world)["disk"] == {"late": 1}


def test_a_disk_that_is_off_could_not_be_asked() -> None:
    """It has records of the namespace, and answers every look with nothing."""
    world = on_disk()
    world.disk.is_deaf = True
    world.disk.beat(StorageStats("off", "the disk is gone"))
    world.step()
    world.run(ask("again", prompt(1)))
    world.disk.beat(StorageStats("open"))
    world.step()
    world.run(ask("other", prompt(2)))

    assert world.wait("again") == LevelWait(0.0, None, 12, "level_failed")
    assert world.wait("other") == LevelWait(), "it answers, and has nothing"


def test_a_prefix_that_is_too_short_to_load_says_so() -> None:
    """Computing was predicted to be faster; nothing was waited for."""
    world = on_host(host_tokens_min=16)
    world.run(ask("again", prompt(1)))

    assert world.wait("again") == LevelWait(0.0, None, 12, "not_worth_loading")
    assert not_loaded(world) == {"host": {"short": 1}}


def test_of_several_causes_the_gravest_is_told() -> None:
    """A damaged copy in front of a part that was not worth loading is what to look into."""
    use = LevelUse()
    use.know(48)
    for cause in ("not_worth_loading", "damaged", "level_failed"):
        use.miss(cause)
    use.wait(0.5, "disk")
    use.wait(0.25, "host")

    assert use.told(16) == LevelWait(0.75, "disk", 32, "damaged")
    assert use.told(48) == LevelWait(0.75, "disk", 0, "")


@pytest.mark.parametrize("levels", [("remote", "disk", "host"), ("host", "disk", "remote")])
def test_a_wait_is_told_with_its_slowest_level(levels: tuple[LevelName, ...]) -> None:
    """Whichever load came last: a sequence that was preempted may have had several."""
    use = LevelUse()
    for name in levels:
        use.wait(0.5, name)

    assert use.told(0) == LevelWait(1.5, "remote", 0, "")
