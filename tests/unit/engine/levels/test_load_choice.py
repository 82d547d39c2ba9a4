"""Load or compute: the longest prefix that is no slower to load, and levels that lose are left."""

from __future__ import annotations

import pytest

from engine.api import LevelName
from engine.levels.load_choice import (
    JUDGED_LOADS,
    PAUSE_S,
    TRIAL_S,
    TRIALS_WON,
    LevelPace,
    LoadChoice,
    NotLoaded,
    choose_load,
    first_paces,
)

BLOCK_BYTES = 400_000


LEAST: dict[LevelName, int] = {"host": 1, "disk": 4, "remote": 8}
"""The shortest load that touches a level, in blocks."""
Paces = dict[LevelName, LevelPace]


def paces(host_s: float = 0.001, disk_s: float = 1.0, remote_s: float = 1.0) -> Paces:
    """Return the paces of levels whose blocks take so long."""
    seconds: dict[LevelName, float] = {"host": host_s, "disk": disk_s, "remote": remote_s}
    found = {name: LevelPace(name, [BLOCK_BYTES]) for name in seconds}
    for name, pace in found.items():
        pace.block_s = [seconds[name]]
    return found


def lose(pace: LevelPace, now_s: float) -> None:
    """Let as many loads lose as a level is judged by."""
    for _ in range(JUDGED_LOADS):
        pace.record_load(took_s=0.3, compute_s=0.1, now_s=now_s)


def choose(
    every: Paces,
    *,
    host: int = 0,
    disk: int = 0,
    remote: int = 0,
    block_s: float = 0.01,
    now_s: float = 0.0,
) -> LoadChoice:
    """Choose for so many blocks on each level, where computing takes `block_s` a block."""
    counts: dict[LevelName, int] = {"host": host, "disk": disk, "remote": remote}
    levels = [name for name, count in counts.items() for _ in range(count)]
    return choose_load(levels, every, lambda n: n * block_s, LEAST.__getitem__, now_s)


def is_nothing(choice: LoadChoice, why: NotLoaded) -> bool:
    """Return whether nothing is chosen, for this reason."""
    return choice.blocks == 0 and choice.why == why


def test_a_faster_level_is_loaded_whole() -> None:
    """Its time and that of computing are told, for the deadline and the regret."""
    choice = choose(paces(), host=32)

    assert (choice.blocks, choice.why) == (32, None)
    assert choice.load_s == pytest.approx(0.033)
    assert choice.compute_s == pytest.approx(0.32)


def test_a_slower_level_is_not_loaded() -> None:
    """The disk of one machine loses against its device."""
    assert is_nothing(choose(paces(disk_s=0.02), disk=32), "slower")


def test_only_the_part_that_pays_is_loaded() -> None:
    """A run of blocks on host goes on with blocks on a slow disk."""
    choice = choose(paces(), host=16, disk=16)

    assert (choice.blocks, choice.why) == (16, "slower")


def test_a_short_prefix_on_disk_is_not_worth_a_fetch() -> None:
    """The least lengths differ by level."""
    fast = paces(0.0001, 0.0001)

    assert is_nothing(choose(fast, disk=3, block_s=0.1), "short")
    assert choose(fast, disk=4, block_s=0.1).blocks == 4
    assert choose(fast, host=3, block_s=0.1).blocks == 3


def test_a_queue_counts_as_time() -> None:
    """What others are loading comes first."""
    busy = paces()
    busy["host"].queued = [1000]

    assert is_nothing(choose(busy, host=32), "slower")


def test_a_level_whose_loads_keep_losing_is_left_alone() -> None:
    """After a pause it has one trial at a time, until three win."""
    every = paces()
    lose(every["host"], 10.0)

    assert every["host"].regret_s == pytest.approx(0.2 * JUDGED_LOADS)
    assert is_nothing(choose(every, host=32, now_s=10.0 + PAUSE_S - 1), "paused")
    now_s = 10.0 + PAUSE_S
    for _ in range(TRIALS_WON):
        assert choose(every, host=32, now_s=now_s).blocks == 32
        every["host"].record_load(took_s=0.01, compute_s=0.1, now_s=now_s)
        now_s += TRIAL_S
    assert choose(every, host=32, now_s=now_s - TRIAL_S).blocks == 32


def test_a_paused_disk_leaves_what_host_has() -> None:
    """The run of blocks ends at the first that only the disk has."""
    every = paces(disk_s=0.001)
    lose(every["disk"], 10.0)

    choice = choose(every, host=8, disk=8, now_s=11.0)

    assert (choice.blocks, choice.why) == (8, "paused")


def test_a_pace_follows_what_is_measured() -> None:
    """Old measurements fade."""
    host = paces()["host"]
    for _ in range(100):
        host.record_block(0.002)

    assert host.block_s == pytest.approx([0.002], rel=0.01)
    assert host.bytes_per_s == pytest.approx(BLOCK_BYTES / 0.002, rel=0.01)


def test_each_format_has_a_pace_of_its_own() -> None:
    """A packed copy is cheaper to fetch and dearer to unpack: what one took says nothing of it."""
    host, disk = LevelPace("host", [400, 216]), LevelPace("disk", [400, 216])
    assert disk.block_s[1] == pytest.approx(0.54 * disk.block_s[0])
    assert host.block_s[1] == host.block_s[0], "until it is measured"
    for _ in range(100):
        host.record_block(0.004, 1)
        disk.record_block(0.001, 1)

    def choose_of(form: int) -> LoadChoice:
        levels: list[LevelName] = ["disk"] * 8
        every = paces() | {"host": host, "disk": disk}
        return choose_load(levels, every, lambda blocks: blocks * 0.003, lambda level: 1, 0.0, form)

    assert is_nothing(choose_of(1), "slower"), "unpacking it takes longer than computing"
    assert choose_of(0).blocks == 8
    assert host.bytes_per_s == pytest.approx(216 / 0.004, rel=0.01)
    host.queued[1] = 3
    assert host.seconds(1, 0) == pytest.approx(0.012, rel=0.01)


def test_the_remote_store_has_a_pace_and_a_least_of_its_own() -> None:
    """A fast disk says nothing of it; what it is too slow for is computed."""
    fast, slow = (paces(disk_s=0.002, remote_s=seconds) for seconds in (0.005, 0.02))

    assert choose(fast, remote=32).blocks == 32
    assert is_nothing(choose(slow, remote=32), "slower")
    assert is_nothing(choose(fast, remote=7), "short")
    assert choose(slow, host=16, remote=16).blocks >= 16


def test_a_remote_store_that_loses_is_left_alone() -> None:
    """As any level; host memory serves on."""
    every = paces(disk_s=0.002, remote_s=0.005)
    lose(every["remote"], 0.0)

    assert choose(every, host=4, remote=28, now_s=1.0).blocks == 4
    assert choose(every, host=4, remote=28, now_s=PAUSE_S).blocks == 32


def test_what_computes_fast_tries_a_disk_that_was_never_measured() -> None:
    """On a GPU a token is computed in 26 us. With the rate of a slow disk nothing would be loaded,
    and nothing measured; once it is, a slow disk is left alone.
    """
    block = 16 * 131_072
    unmeasured = first_paces([block], 4, 25e9)
    disk, first_s = unmeasured["disk"], unmeasured["disk"].block_s[0]
    first = choose(unmeasured, disk=512, block_s=16 * 25.7e-6)
    for _ in range(512):
        disk.record_block(4 * block / 0.5e9)

    assert first.blocks == 512
    assert choose(unmeasured, disk=512, block_s=16 * 25.7e-6).blocks == 0
    assert LevelPace("disk", [block], 4).block_s[0] / 16 > 25.7e-6 > first_s / 16
