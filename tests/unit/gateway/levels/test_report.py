"""What operators see of the levels: sizes, owners, flows, and whether they are worth it."""

from __future__ import annotations

from msgspec.structs import replace

from engine.config import LevelsConfig
from engine.statistics import NOT_ANSWERED, LevelStats, NamespaceStats, Stats
from gateway.levels.level_history import MINUTES, LevelHistory
from gateway.levels.report import (
    SWITCH_ON,
    EngineLevels,
    levels_report,
    sum_levels,
    tenants_report,
    unkept_tokens,
)
from tenancy.types import MINUTE_MS
from tests.fakes import ENGINE_INFO
from tests.unit.gateway.levels.reported_levels import DISK, HOST, STATS

INFO = replace(ENGINE_INFO, kv_bytes_per_block=160)
ON = LevelsConfig(host_mib=1, disk_gib=2.0)


def of(stats: Stats, promised_blocks: int = 0) -> EngineLevels:
    """Return the levels of one engine."""
    return EngineLevels("m", INFO, stats, promised_blocks)


def test_levels_of_several_models_are_one_of_each() -> None:
    """Counts add up; the state is the worst one, with its reason, and the rate the best."""
    other = replace(HOST, state="off", reason="no memory", bytes_per_s=5_000.0, blocks=1)
    two = [of(STATS), EngineLevels("n", INFO, replace(STATS, levels=(other,)), 2)]
    device, host, disk = levels_report(ON, "", two, lambda name: None)["levels"]

    assert (host["state"], host["reason"]) == ("off", "no memory")
    assert (host["blocks"], host["capacity_bytes"], host["bytes_per_s"]) == (5, 2_000, 5_000)
    assert (device["capacity_bytes"], device["promised_bytes"]) == (2 * 8 * 160, 2 * 160)
    assert disk["blocks"] == 90
    assert host["worth"] is None
    assert [one.payers for one in sum_levels([(DISK,), (DISK,)])] == [DISK.payers * 2]
    assert host["not_loaded"] == {"slower": 2, "late": 4}
    assert host["uncopied_total"] == 6
    assert host["copies"] == [
        {"fidelity": "exact", "blocks": 4, "bytes": 640},
        {"fidelity": "near", "blocks": 4, "bytes": 160},
    ]


def test_the_device_is_a_level_too() -> None:
    """Then all bytes of the cache are in one table, and tokens found add up."""
    found = levels_report(ON, "/kv", [of(STATS, 3)], lambda name: 7)
    device, host, disk = found["levels"]

    assert (device["capacity_bytes"], device["free_bytes"]) == (8 * 160, 2 * 160)
    assert device["promised_bytes"] == 3 * 160
    assert [one["loaded_tokens_total"] for one in found["levels"]] == [88, 80, 32]
    assert (host["free_bytes"], host["since_ms"]) == (600, 7)
    assert (disk["state"], disk["reason"]) == ("full", "less than 2 GiB free")
    assert "payers" not in disk
    assert (found["is_on"], found["switch_on"], found["folder"]) == (True, None, "/kv")
    assert (found["is_sealed"], found["remote"]) == (False, None)
    assert found["write_bytes_per_day_max"] == 2 * 2**30


def test_a_disk_does_not_keep_the_part_of_a_block() -> None:
    """The device alone does."""
    assert unkept_tokens(STATS, INFO) == INFO.block_size - 1
    assert unkept_tokens(Stats(), INFO) == unkept_tokens(STATS, None) == 0


def test_a_level_that_has_not_answered_yet_is_starting() -> None:
    """Operators read "off" as a fault to look into."""
    asked = LevelStats("disk", "off", NOT_ANSWERED)
    failed = LevelStats("host", "off", "no memory")
    stats = replace(STATS, levels=(failed, asked))
    _, host, disk = levels_report(ON, "", [of(stats)], lambda name: None)["levels"]

    assert (disk["state"], disk["reason"]) == ("starting", NOT_ANSWERED)
    assert host["state"] == "off"


def test_off_says_the_two_lines_that_switch_a_disk_on() -> None:
    found = levels_report(LevelsConfig(), "/kv", [of(Stats(blocks=8))], lambda name: None)

    assert (found["is_on"], found["switch_on"], found["folder"]) == (False, SWITCH_ON, None)
    assert [one["name"] for one in found["levels"]] == ["device"]
    assert (
        levels_report(ON, "", [EngineLevels("m", None, Stats(), 0)], lambda name: None)["levels"]
        == []
    )


def test_worth_is_told_by_measured_rates() -> None:
    """Copies of 100 bytes for 16 tokens, at 1,000 a second, against 50 tokens a second; and without
    a rate there is nothing to tell."""
    stats = replace(STATS, prefill_tokens_per_s=50.0)
    _, host, disk = levels_report(ON, "", [of(stats)], lambda name: None)["levels"]
    _, unmeasured, _ = levels_report(ON, "", [of(STATS)], lambda name: None)["levels"]

    worth = host["worth"]
    assert (worth["load_us_per_token"], worth["compute_us_per_token"]) == (6_250, 20_000)
    assert worth["tokens_min"] == 1
    assert disk["worth"] is None
    assert unmeasured["worth"] is None


def test_bytes_by_tenant_and_level_most_first() -> None:
    """Blocks of a namespace belong to its tenant, copies to the payer; others are left out."""
    first = NamespaceStats(b"1a", 3, 0, 0, 0, {"5m": 4}, promised_below=3, promised_away=3)
    spaces = [first, NamespaceStats(b"2", 1, 0, 0, 0)]
    spaces += [NamespaceStats(b"1b", 2, 0, 0, 0), NamespaceStats(b"?", 9, 0, 0, 0)]
    stats = replace(STATS, levels=(HOST, replace(DISK, payers=(*DISK.payers, DISK.payers[0]))))

    def owner_of(namespace: bytes) -> int | None:
        return int(namespace[:1]) if namespace[:1].isdigit() else None

    named = {1: "ada", 2: "bob"}.__getitem__
    rows = tenants_report(stats.levels, [(one, 160) for one in spaces], owner_of, named)

    assert [row["tenant"] for row in rows] == ["ada", "bob"]
    assert rows[0]["levels"] == {
        "device": {"used_bytes": 5 * 160, "promised_bytes": 160},
        "disk": {"used_bytes": 16_000, "promised_bytes": 1_000},
    }
    assert rows[1]["bytes"] == 160 + 1_000


def counts(**fields: int) -> Stats:
    """Return a heartbeat with totals of the host level."""
    host = replace(LevelStats("host", "open"), **fields)
    return Stats(device_tokens_total=99 * fields["loaded_tokens_total"], levels=(host,))


def test_history_has_each_minutes_own_counts() -> None:
    """Several heartbeats of a minute are one; a new engine's totals begin at 0."""
    history = LevelHistory()
    history.update([("m", counts(loaded_tokens_total=5, offloaded_total=1))], 0)
    history.update([("m", counts(loaded_tokens_total=7, offloaded_total=4))], MINUTE_MS - 1)
    history.update([("m", counts(loaded_tokens_total=9, offloaded_total=4))], MINUTE_MS)
    history.update([("m", counts(loaded_tokens_total=3, offloaded_total=2))], 3 * MINUTE_MS)
    found = history.minutes()

    assert found["minute"] == [0, 1, 3]
    assert found["host"] == [7, 2, 3]
    assert found["device"] == [7 * 99, 2 * 99, 3 * 99]
    assert found["device_host"] == [4, 0, 2]
    assert found["disk"] == [0, 0, 0]


def test_an_engine_that_begins_again_leaves_the_others_minute_alone() -> None:
    """Sums over engines would fall with one of them, and all of the others would count again."""
    history = LevelHistory()
    for first, second in ((5, 70), (6, 75), (1, 76)):
        engines = {"m": first, "n": second}
        history.update(
            [(name, counts(loaded_tokens_total=total)) for name, total in engines.items()], 0
        )

    assert history.minutes()["host"] == [5 + 70 + 1 + 5 + 1 + 1]


def test_history_counts_nothing_twice_when_the_storage_begins_again() -> None:
    """While it is away the remote store is not reported, and its totals begin at 0."""
    remote = LevelStats("remote", "open", stored_total=8, loaded_tokens_total=40)
    begun = replace(remote, stored_total=1)
    history = LevelHistory()
    for levels in ((HOST, remote), (HOST,), (HOST, begun)):
        history.update([("m", replace(STATS, levels=levels))], 0)
    found = history.minutes()

    assert (found["device"], found["host"], found["remote"]) == ([88], [80], [40])
    assert (found["device_host"], found["disk_remote"]) == ([9], [9])


def test_history_is_bounded_and_empty_without_levels() -> None:
    history = LevelHistory()
    history.update([("m", Stats(device_tokens_total=5))], 0)
    assert history.minutes()["minute"] == []
    for minute in range(2 * MINUTES):
        history.update([("m", counts(loaded_tokens_total=minute))], minute * MINUTE_MS)

    assert history.minutes()["minute"] == list(range(MINUTES, 2 * MINUTES))


def test_state_has_its_beginning() -> None:
    """An operator wants to know since when a level is off."""
    history = LevelHistory()
    history.update([("m", STATS)], 5)
    history.update([("m", STATS)], 6)
    history.update([("m", replace(STATS, levels=(replace(HOST, state="off"), DISK)))], 7)

    assert (history.since_ms("host"), history.since_ms("disk")) == (7, 5)
    assert history.since_ms("remote") is None
