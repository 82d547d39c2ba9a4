"""Copies for a model with window groups: which have the blocks of all groups, where loads stand,
and what a failed load leaves.
"""

from __future__ import annotations

from typing import Any

import pytest

from engine.api import CacheGrant, LeaseRequest, Retention
from tests.fake_levels import whole_of
from tests.unit.engine.levels.leveled_worlds import (
    HOUR,
    PAYER,
    LeveledWorld,
    ask,
    leased,
    prompt,
)

WINDOW = 6
LONG = 25


def world(**settings: Any) -> LeveledWorld:
    """Return an engine with group 0 and two groups of a window of six tokens, of four-token
    blocks."""
    windows = (WINDOW, WINDOW)
    more: dict[str, Any] = {"windows": windows, "formats": whole_of(3), "blocks": 120}
    return LeveledWorld(**(more | {"slots": 300} | settings))


def with_promise(**settings: Any) -> LeveledWorld:
    """Return such an engine that has promised the first prompt."""
    own = world(**settings)
    own.run(ask("first", prompt(1, LONG), grant=leased(24)))
    return own


def formats_of(own: LeveledWorld, tokens: tuple[int, ...]) -> list[bool]:
    """Return of each copy of a prompt whether it has the blocks of all groups."""
    copies = own.levels.places.match(b"n", tokens, own.clock())
    return [own.levels.windows.is_whole(copy) for copy in copies]


def emptied(own: LeveledWorld) -> LeveledWorld:
    """Start the next engine: its device is empty, and host memory and disk are what they were."""
    own.restart()
    own.settle()
    return own


def test_the_last_windows_of_a_lease_are_copied_with_all_groups() -> None:
    """And of the rest group 0 alone: that is what a prompt reads that resumes at 20 tokens, the end
    of the last whole block before its own end."""
    own = with_promise()

    assert formats_of(own, prompt(1, LONG)) == [False, False, False, True, True, True]


@pytest.mark.parametrize("level", ["host", "disk"])
def test_a_prefix_comes_back_from_a_level(level: str) -> None:
    """The oracle checks what each query reads, in each group."""
    own = emptied(with_promise(is_kept=level == "host"))

    assert own.run(ask("again", prompt(1, LONG))) == [24]
    assert own.loaded("again") == {level: 24}
    own.check()


def test_a_prefix_without_a_promise_comes_back_after_its_eviction() -> None:
    """Its end is a resume point, whose window blocks are copied before they are evicted."""
    own = world(disk=False)
    own.run(ask("first", prompt(1, LONG)))
    own.push_out(24)
    before = own.below(prompt(1, LONG))

    assert before == (0, {"host": 24})
    assert own.run(ask("again", prompt(1, LONG))) == [24]
    assert own.loaded("again") == {"host": 24}


def test_a_load_ends_where_the_last_windows_are_whole() -> None:
    """A prompt that parts from a copied one resumes nowhere between: it is computed."""
    own = emptied(with_promise(is_kept=True))
    other = (*prompt(1, LONG)[:16], *(1 - token for token in prompt(1, LONG)[16:]))

    assert own.run(ask("other", other)) == [0]
    assert own.run(ask("again", prompt(1, LONG))) == [24]


def test_a_shared_beginning_is_copied_whole_once_prompts_part_there() -> None:
    """A place where prompts part is a resume point; its copy of group 0 is exchanged."""
    own = world(disk=False, is_kept=True)
    shared = prompt(1, LONG)[:16]
    own.run(ask("first", prompt(1, LONG), grant=leased(24)))
    emptied(own)
    before = formats_of(own, (*shared, 0))
    for number in range(2):
        own.run(ask(f"more{number}", (*shared, *prompt(20 + number, 9))))
    own.push_out(24)

    assert before == [False] * 4
    assert formats_of(own, (*shared, 0))[2:] == [True, True]
    assert own.run(ask("last", (*shared, *prompt(40, 9)))) == [16]
    assert own.loaded("last") == {"host": 16}


def test_a_failed_load_leaves_the_table_as_it_was() -> None:
    """What the device had before it is still there; the rest is computed."""
    own = emptied(with_promise(disk=False, is_kept=True))
    own.run(ask("short", prompt(1, LONG)[:13], max_tokens=1))
    own.weather.fails = 1.0
    cached = own.run(ask("again", prompt(1, LONG)))
    own.weather.fails = 0.0

    assert cached == [12]
    own.check()
    assert own.run(ask("last", prompt(1, LONG)))[0] >= 24


def test_a_sequence_that_is_cancelled_while_it_loads_leaves_nothing() -> None:
    """Also not what was set aside for the load."""
    own = emptied(with_promise(disk=False, is_kept=True))
    own.run(ask("short", prompt(1, LONG)[:13], max_tokens=1))
    own.weather.polls_max = 4
    own.submit(ask("again", prompt(1, LONG)))
    own.step_until_loading()
    own.cancel("again")
    own.settle()

    own.check()
    assert own.core.stats().pinned_blocks == 0


LEVELS: dict[str, dict[str, Any]] = {
    "host": {"disk": False, "is_kept": True, "host_keeps_promises": True},
    "disk": {},
}


@pytest.mark.parametrize("level", list(LEVELS))
def test_a_promise_of_all_groups_moves_down_and_outlives_the_device(level: str) -> None:
    """Six runs of group 0, and three of each window group, that resuming before the end reads."""
    own = with_promise(**LEVELS[level])

    assert own.promised() == (12, 12, 0)
    own.push_out(40)
    assert own.promised() == (12, 12, 12)
    assert own.run(ask("again", prompt(1, LONG))) == [24]
    own.check()
    assert own.promised() == (12, 12, 2)  # no query behind 24 reads the first of three runs
    assert not own.lost


@pytest.mark.parametrize("level", list(LEVELS))
def test_a_promise_of_all_groups_outlives_its_engine(level: str) -> None:
    """With its time and its payer's charge; the next engine reads it back."""
    own = emptied(with_promise(**LEVELS[level]))
    own.step()

    assert own.promised() == (12, 12, 12)
    assert own.run(ask("again", prompt(1, LONG), grant=CacheGrant(b"n", PAYER))) == [24]
    own.check()
    own.clock.advance(8_000.0)
    own.step()
    assert own.promised() == (0, 0, 0)
    assert not own.lost


@pytest.mark.parametrize("level", list(LEVELS))
def test_windows_that_are_promised_later_than_their_run_outlive_their_engine(level: str) -> None:
    """A lease ends inside a promised prefix: no run is promised for longer by it, and the level
    learns all the same which window blocks are promised now."""
    own, tokens = world(**LEVELS[level]), prompt(1, LONG)
    own.run(ask("short", tokens[:13]))  # where it ends, the copies of all groups are made
    own.run(ask("first", tokens, grant=leased(24)))
    own.run(ask("inside", tokens, grant=leased(16)))
    assert own.promised() == (16, 16, 0)
    emptied(own)
    own.step()

    assert own.promised() == (16, 16, 16)
    own.check()


@pytest.mark.parametrize("level", list(LEVELS))
def test_more_is_promised_than_the_device_holds(level: str) -> None:
    """Twenty promises of twelve blocks in a pool of sixty: all are read back, none is lost."""
    own = world(blocks=60, slots=400, **LEVELS[level])
    for number in range(20):
        own.run(ask(f"leased{number}", prompt(number, LONG), grant=leased(24)))
    own.push_out(20)

    assert own.promised()[0] > 60 * 7 / 8
    assert own.promised()[0] == own.promised()[1]
    for number in range(20):
        assert own.run(ask(f"again{number}", prompt(number, LONG))) == [24]
    assert not own.lost
    own.check()


@pytest.mark.parametrize("level", list(LEVELS))
def test_a_promise_of_all_groups_asked_for_again_is_charged_once(level: str) -> None:
    """Whether the device has its blocks or a level alone."""
    own = with_promise(**LEVELS[level])
    own.run(ask("here", prompt(1, LONG), grant=leased(24)))
    own.push_out(40)
    own.run(ask("below", prompt(1, LONG), grant=leased(24)))

    assert [own.grant(name).outcome for name in ("here", "below")] == ["granted"] * 2
    assert own.promised()[:2] == (12, 12)


@pytest.mark.parametrize("level", list(LEVELS))
def test_a_longer_promise_leaves_the_windows_before_it_below(level: str) -> None:
    """A conversation's next turn: its runs return to the device, and move down with the new ones;
    a window block that the device has let go is promised where it is."""
    own = with_promise(**LEVELS[level])
    own.push_out(40)
    longer = prompt(1, LONG) + prompt(7, 12)
    own.run(ask("longer", longer, grant=leased(36)))

    assert own.grant("longer").outcome == "granted"
    assert own.promised()[:2] == (9 + 6 + 6, 9 + 6 + 6)
    own.push_out(40)
    assert own.run(ask("again", longer)) == [36]
    own.clock.advance(8_000.0)
    own.step()
    assert own.promised() == (0, 0, 0)
    assert not own.lost
    own.check()


def test_a_lost_copy_of_all_groups_is_told_for_each_block() -> None:
    """A run's block, and those of two window groups."""
    own = with_promise()
    own.restart()
    own.settle()
    last = next(i for i in own.disk.records if own.disk.path(i) == prompt(1, LONG)[:24])
    own.disk.lose(last)
    own.run(ask("again", prompt(1, LONG)))

    assert sum(one.blocks for one in own.lost) == 3
    assert own.promised()[0] == 9
    own.check()


@pytest.mark.parametrize(("end", "outcome"), [(12, "granted"), (16, "clipped")])
def test_no_part_of_a_window_is_below_where_a_record_has_group_0_alone(
    end: int, outcome: str
) -> None:
    """A record is not exchanged: a window of which a part is below would be resumed nowhere. So all
    of it stays on the device, and where a part is below already, no promise is granted over it."""
    own = with_promise(is_kept=True)
    shared = prompt(1, LONG)[:end]
    emptied(own)
    own.run(ask("part", (*shared, *prompt(20, 9))))
    own.run(ask("lease", (*shared, *prompt(21, 9)), grant=leased(end, lease_id="part")))
    own.push_out(40)

    assert own.grant("lease").outcome == outcome
    granted = 12 if outcome == "granted" else 8
    use = own.cache.use(b"n")
    runs, windows = granted // 4, 3 if outcome == "granted" else 2
    assert sum(use.promised.values()) - use.below == runs + 2 * windows
    found = own.cache.peek(b"n", (*shared[:granted], 2), own.clock())
    assert found.cached_tokens == granted
    own.check()


def test_copies_of_all_groups_keep_no_more_room_than_promises_may() -> None:
    """Where the windows of a shorter lease are over, a copy still has their blocks, for as long as
    its run is promised: what has no room beside those stays on the device.
    """
    own = world(blocks=400, slots=200, disk=False, host_keeps_promises=True)
    short = Retention("short", promise_s=100)
    for number in range(12):
        ends = LeaseRequest(24, short, f"short{number}"), LeaseRequest(36, HOUR, f"hour{number}")
        wanted = CacheGrant(b"n", PAYER, leases=ends)
        own.run(ask(f"leased{number}", prompt(number, 37), grant=wanted))
        own.clock.advance(101.0)
        own.step()
    kept = [copy for copy in own.levels.places if copy.keeps_promise]

    room = sum(own.levels.places.format_of(copy.slot).slot_bytes for copy in kept) // 1000
    assert 150 < room <= 200 * 7 / 8
    all_in_all, below, _ = own.promised()
    assert all_in_all > below > 100
    assert not own.lost
