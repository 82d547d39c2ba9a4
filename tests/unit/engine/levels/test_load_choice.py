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


def paces(host_s: float, disk_s: float) -> tuple[LevelPace, LevelPace]:
    """Return the paces of levels whose blocks take so long."""
    host, disk = LevelPace("host", [BLOCK_BYTES]), LevelPace("disk", [BLOCK_BYTES])
    host.block_s, disk.block_s = [host_s], [disk_s]
    return host, disk


def beside(
    host: LevelPace, disk: LevelPace, remote: LevelPace | None = None
) -> dict[LevelName, LevelPace]:
    """Return the paces of all levels, by name."""
    sizes = [BLOCK_BYTES] * len(host.block_s)
    return {"host": host, "disk": disk, "remote": remote or LevelPace("remote", sizes)}


def is_nothing(choice: LoadChoice, why: NotLoaded) -> bool:
    """Return whether nothing is chosen, for this reason."""
    return choice.blocks == 0 and choice.why == why


def choose(
    on_host: list[bool], host: LevelPace, disk: LevelPace, block_s: float, now_s: float = 0.0
) -> LoadChoice:
    """Choose where computing takes `block_s` a block and one block may be loaded."""

    def least(level: LevelName) -> int:
        return {"device": 0, "host": 1, "disk": 4, "remote": 8}[level]

    levels: list[LevelName] = ["host" if one else "disk" for one in on_host]
    return choose_load(levels, beside(host, disk), lambda blocks: blocks * block_s, least, now_s)


def test_a_faster_level_is_loaded_whole() -> None:
    """Its time and that of computing are told, for the deadline and the regret."""
    choice = choose([True] * 32, *paces(0.001, 1.0), block_s=0.01)

    assert (choice.blocks, choice.why) == (32, None)
    assert choice.load_s == pytest.approx(0.033)
    assert choice.compute_s == pytest.approx(0.32)


def test_a_slower_level_is_not_loaded() -> None:
    """The disk of one machine loses against its device."""
    assert is_nothing(choose([False] * 32, *paces(0.001, 0.02), block_s=0.01), "slower")


def test_only_the_part_that_pays_is_loaded() -> None:
    """A run of blocks on host goes on with blocks on a slow disk."""
    choice = choose([True] * 16 + [False] * 16, *paces(0.001, 1.0), block_s=0.01)

    assert (choice.blocks, choice.why) == (16, "slower")


def test_a_short_prefix_on_disk_is_not_worth_a_fetch() -> None:
    """The least lengths differ by level."""
    fast = paces(0.0001, 0.0001)

    assert is_nothing(choose([False] * 3, *fast, block_s=0.1), "short")
    assert choose([False] * 4, *fast, block_s=0.1).blocks == 4
    assert choose([True] * 3, *fast, block_s=0.1).blocks == 3


def test_a_queue_counts_as_time() -> None:
    """What others are loading comes first."""
    host, disk = paces(0.001, 1.0)
    host.queued = [1000]

    assert is_nothing(choose([True] * 32, host, disk, block_s=0.01), "slower")


def test_a_level_whose_loads_keep_losing_is_left_alone() -> None:
    """After a pause it has one trial at a time, until three win."""
    host, disk = paces(0.001, 1.0)
    for _ in range(JUDGED_LOADS):
        host.record_load(took_s=0.3, compute_s=0.1, now_s=10.0)

    assert host.regret_s == pytest.approx(0.2 * JUDGED_LOADS)
    assert is_nothing(choose([True] * 32, host, disk, 0.01, now_s=10.0 + PAUSE_S - 1), "paused")
    now_s = 10.0 + PAUSE_S
    for _ in range(TRIALS_WON):
        assert choose([True] * 32, host, disk, 0.01, now_s).blocks == 32
        host.record_load(took_s=0.01, compute_s=0.1, now_s=now_s)
        now_s += TRIAL_S
    assert choose([True] * 32, host, disk, 0.01, now_s - TRIAL_S).blocks == 32


def test_a_paused_disk_leaves_what_host_has() -> None:
    """The run of blocks ends at the first that only the disk has."""
    host, disk = paces(0.001, 0.001)
    for _ in range(JUDGED_LOADS):
        disk.record_load(took_s=0.3, compute_s=0.1, now_s=10.0)

    choice = choose([True] * 8 + [False] * 8, host, disk, 0.01, now_s=11.0)

    assert (choice.blocks, choice.why) == (8, "paused")


def test_a_pace_follows_what_is_measured() -> None:
    """Old measurements fade."""
    host, _ = paces(0.001, 1.0)
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
        every = beside(host, disk)
        return choose_load(levels, every, lambda blocks: blocks * 0.003, lambda level: 1, 0.0, form)

    assert is_nothing(choose_of(1), "slower"), "unpacking it takes longer than computing"
    assert choose_of(0).blocks == 8
    assert host.bytes_per_s == pytest.approx(216 / 0.004, rel=0.01)
    host.queued[1] = 3
    assert host.seconds(1, 0) == pytest.approx(0.012, rel=0.01)


def far(count: int, remote: LevelPace, on_host: int = 0, now_s: float = 0.0) -> LoadChoice:
    """Choose for blocks of which all but the first `on_host` lie in the remote store; computing a
    block takes 10 ms."""
    host, disk = paces(0.001, 0.002)
    levels: list[LevelName] = ["host"] * on_host
    levels += ["remote"] * (count - on_host)
    least = {"device": 0, "host": 1, "disk": 4, "remote": 8}
    every = beside(host, disk, remote)
    return choose_load(
        levels, every, lambda blocks: blocks * 0.01, lambda level: least[level], now_s
    )


def remote_pace(block_s: float) -> LevelPace:
    """Return the pace of a remote store."""
    pace = LevelPace("remote", [BLOCK_BYTES])
    pace.block_s[0] = block_s
    return pace


def test_the_remote_store_has_a_pace_and_a_least_of_its_own() -> None:
    """A fast disk says nothing of it; what it is too slow for is computed."""
    assert far(32, remote_pace(0.005)).blocks == 32
    assert is_nothing(far(32, remote_pace(0.02)), "slower")
    assert is_nothing(far(7, remote_pace(0.005)), "short")
    assert far(32, remote_pace(0.02), on_host=16).blocks >= 16


def test_a_remote_store_that_loses_is_left_alone() -> None:
    """As any level; host memory serves on."""
    pace = remote_pace(0.005)
    for _ in range(JUDGED_LOADS):
        pace.record_load(2.0, 1.0, 0.0)

    assert far(32, pace, on_host=4, now_s=1.0).blocks == 4
    assert far(32, pace, on_host=4, now_s=PAUSE_S).blocks == 32


def test_what_computes_fast_tries_a_disk_that_was_never_measured() -> None:
    """On a GPU a token is computed in 26 us. With the rate of a slow disk nothing would be loaded,
    and nothing measured; once it is, a slow disk is left alone.
    """
    block = 16 * 131_072
    paces = first_paces([block], 4, 25e9)
    disk = paces["disk"]
    first_s = disk.block_s[0]

    def choose() -> int:
        levels: list[LevelName] = ["disk"] * 512
        return choose_load(levels, paces, lambda n: n * 16 * 25.7e-6, lambda level: 16, 0.0).blocks

    first = choose()
    for _ in range(512):
        disk.record_block(4 * block / 0.5e9)

    assert first == 512
    assert choose() == 0
    assert LevelPace("disk", [block], 4).block_s[0] / 16 > 25.7e-6 > first_s / 16
