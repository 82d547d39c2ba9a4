"""Copies for a model with window groups: which have the blocks of all groups, where loads stand,
and what a failed load leaves.
"""

from __future__ import annotations

from typing import Any

import pytest

from engine.api import CacheGrant
from tests.fake_levels import whole_of
from tests.unit.engine.levels.leveled_worlds import PAYER, LeveledWorld, ask, leased, prompt

WINDOW = 6
LONG = 25


def world(**settings: Any) -> LeveledWorld:
    """Return an engine with group 0 and two groups of a window of six tokens, of four-token
    blocks."""
    windows = (WINDOW, WINDOW)
    more: dict[str, Any] = {"windows": windows, "formats": whole_of(3), "blocks": 120}
    return LeveledWorld(**(more | {"slots": 300} | settings))


def formats_of(own: LeveledWorld, tokens: tuple[int, ...]) -> list[bool]:
    """Return of each copy of a prompt whether it has the blocks of all groups."""
    copies = own.levels.book.prefixes.match(b"n", tokens, own.clock())
    return [own.levels.windows.is_whole(copy) for copy in copies]


def emptied(own: LeveledWorld) -> LeveledWorld:
    """Start the next engine: its device is empty, and host memory and disk are what they were."""
    own.restart()
    own.settle()
    return own


def test_the_last_windows_of_a_lease_are_copied_with_all_groups() -> None:
    """And of the rest group 0 alone: that is what a resume at its end reads."""
    own = world()
    own.run(ask("first", prompt(1, LONG), grant=leased(24)))

    assert formats_of(own, prompt(1, LONG)) == [False, False, False, False, True, True]


@pytest.mark.parametrize("level", ["host", "disk"])
def test_a_prefix_comes_back_from_a_level(level: str) -> None:
    """The oracle checks what each query reads, in each group."""
    own = world(is_kept=level == "host")
    own.run(ask("first", prompt(1, LONG), grant=leased(24)))
    emptied(own)

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
    own = world(is_kept=True)
    own.run(ask("first", prompt(1, LONG), grant=leased(24)))
    emptied(own)
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
    own = world(disk=False, is_kept=True)
    own.run(ask("first", prompt(1, LONG), grant=leased(24)))
    emptied(own)
    own.run(ask("short", prompt(1, LONG)[:13], max_tokens=1))
    own.weather.fails = 1.0
    cached = own.run(ask("again", prompt(1, LONG)))
    own.weather.fails = 0.0

    assert cached == [12]
    own.check()
    assert own.run(ask("last", prompt(1, LONG)))[0] >= 24


def test_a_sequence_that_is_cancelled_while_it_loads_leaves_nothing() -> None:
    """Also not what was set aside for the load."""
    own = world(disk=False, is_kept=True)
    own.run(ask("first", prompt(1, LONG), grant=leased(24)))
    emptied(own)
    own.run(ask("short", prompt(1, LONG)[:13], max_tokens=1))
    own.weather.polls_max = 4
    own.submit(ask("again", prompt(1, LONG)))
    own.step_until_loading()
    own.cancel("again")
    own.settle()

    own.check()
    assert own.core.stats().pinned_blocks == 0


def test_promises_stay_on_the_device() -> None:
    """Their blocks have copies, which are promised on disk and come back after a restart."""
    own = world()
    own.run(ask("first", prompt(1, LONG), grant=leased(24)))
    use = own.cache.use(b"n")

    assert (sum(use.promised.values()), use.below) == (10, 0)
    assert own.disk is not None
    assert all(record.promise_at_s > 1_000 for record in own.disk.records.values())
    own.restart()
    own.settle()
    assert sum(own.cache.use(b"n").promised.values()) == 0
    assert own.run(ask("again", prompt(1, LONG), grant=CacheGrant(b"n", PAYER))) == [24]
