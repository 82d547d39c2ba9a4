"""Copies in host memory over the death of an engine: what comes back, with which terms, and what
must not."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from engine.api import AT_REST, AtRest, CacheGrant, Erase, Erased
from engine.errors import InvariantViolation
from engine.levels.host.slot_remains import SlotRemains
from engine.levels.restarts.recovery import Recovery
from engine.moves import StorageStats, StoreRuns
from engine.statistics import LevelStats
from engine.storage.memory.slot_table import SlotTable
from tests.checkers import RuleBroken
from tests.fake_levels import FakeKeptSlots, WriterKilled
from tests.fakes import OracleError
from tests.property.test_levels_machine import prefix_slots
from tests.unit.engine.levels.leveled_worlds import (
    HOUR,
    LIMITED,
    PAYER,
    LeveledWorld,
    ask,
    leased,
    prompt,
)


def world(*, disk: bool = False, **settings: Any) -> LeveledWorld:
    """Return an engine whose host memory outlives it."""
    return LeveledWorld(disk=disk, is_kept=True, **settings)


def with_promise(**settings: Any) -> LeveledWorld:
    """Return such an engine that has promised the first prompt."""
    own = world(**settings)
    own.run(ask("first", prompt(1), grant=leased(13)))
    return own


def host_of(own: LeveledWorld) -> LevelStats:
    """Return the statistics of host memory."""
    return own.core.stats().levels[0]


def kill(own: LeveledWorld, seconds: float = 0.0) -> None:
    """Kill the engine and start the next one."""
    own.clock.advance(seconds)
    own.restart()


def check_slots(own: LeveledWorld) -> None:
    """Check that every copy's slot holds its own prefix, and the table."""
    for copy in own.levels.places:
        path = tuple(token for one in copy.path() for token in one.run)
        if copy.slot >= 0:
            content = own.kept_memory.contents[copy.slot]
            assert content == prefix_slots(copy.namespace, path, len(copy.run))
    own.kept_memory.table.check()


def test_a_prefix_comes_back_from_host_memory() -> None:
    """Without a disk; the answer is checked against the one from nothing."""
    own = with_promise()
    own.push_out()
    held = own.levels.places.accounts.pool.used
    kill(own)

    assert own.below(prompt(1)) == (0, {"host": 12})
    assert own.run(ask("again", prompt(1))) == [12]
    assert own.loaded("again") == {"host": 12}
    assert host_of(own).recovered_total == held
    assert (host_of(own).torn_total, host_of(own).orphaned_total) == (0, 0)


def test_several_engines_in_a_row_hand_on_what_they_have() -> None:
    """Old copies and new ones hang together."""
    own = with_promise()
    kill(own)
    longer = (*prompt(1), *prompt(9, 9))
    own.run(ask("longer", longer, grant=leased(22)))
    kill(own)

    assert own.run(ask("again", longer)) == [20]
    assert own.loaded("again") == {"host": 20}
    check_slots(own)


def test_the_first_load_verifies_and_later_ones_need_not() -> None:
    """A damaged copy is a miss, is counted, and goes with all that hangs on it."""
    own = with_promise(verify_host=10**9)
    own.run(ask("second", prompt(2), grant=leased(13)))
    kill(own)
    (damaged,) = own.levels.places.match(b"n", prompt(1), 0.0)[1:2]
    own.kept_memory.contents[damaged.slot] = (None,) * 4

    assert own.run(ask("again", prompt(1))) == [4]
    assert own.run(ask("whole", prompt(2))) == [12]
    assert host_of(own).damaged_total == 1
    copies = own.levels.places.match(b"n", prompt(2), 0.0)
    assert not any(copy.host is None or copy.host.is_unverified for copy in copies)


def test_limits_and_promises_have_gone_on_running_down() -> None:
    """By the machine's clock, while there was no engine, too."""
    own = world(host_keeps_promises=True)
    own.run(ask("limited", prompt(1), grant=leased(13, LIMITED)))
    own.run(ask("promised", prompt(2), grant=leased(13)))
    own.push_out()
    ends = {
        number: own.levels.places.match(b"n", prompt(number), own.clock())[0] for number in (1, 2)
    }
    assert ends[2].terms is not None
    limit_at_s, promise_at_s = ends[1].limit_at_s, ends[2].terms.promise_at_s
    kill(own, 20.0)

    (one, *_) = own.levels.places.match(b"n", prompt(1), own.clock())
    (two, *_) = own.levels.places.match(b"n", prompt(2), own.clock())
    assert one.limit_at_s == pytest.approx(limit_at_s)
    assert two.terms is not None
    assert two.terms.promise_at_s == pytest.approx(promise_at_s)
    kill(own, 31.0)
    assert own.below(prompt(1)) == (0, {})
    assert own.below(prompt(2)) == (0, {"host": 12})
    assert host_of(own).lapsed_total == 3


def test_an_erased_namespace_stays_erased() -> None:
    """No entry and no byte of it is left when the erasure is answered."""
    own = with_promise()
    own.run(ask("other", prompt(3), grant=replace(leased(13), namespace=b"other")))
    answers: list[object] = []
    own.core.erase(Erase(1, b"n"), answers.append)

    assert answers
    assert not any(
        part and part[0] == b"n" for content in own.kept_memory.contents for part in content
    )
    assert bytes(own.kept_memory.memory).count(b"lease"), "the control: another namespace's lease"
    kill(own)
    assert own.below(prompt(1)) == (0, {})
    assert host_of(own).recovered_total == 3


def test_an_erased_lease_stays_erased() -> None:
    """The next engine knows which copies a lease covers."""
    own = world()
    own.run(ask("first", prompt(1), grant=leased(13, lease_id="mine")))
    own.run(ask("second", prompt(2), grant=leased(13, lease_id="yours")))
    kill(own)
    own.core.erase(Erase(1, b"n", lease_id="mine"))
    own.settle()

    assert own.below(prompt(1)) == (0, {})
    assert own.below(prompt(2)) == (0, {"host": 12})


def test_an_erasure_reaches_what_is_not_in_the_tree_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The namespaces are known at once."""
    own = world()
    for number in (1, 2, 3):
        own.run(ask(f"first{number}", prompt(number), grant=leased(13)))
    monkeypatch.setattr("engine.levels.levels.AT_START", 2)
    kill(own)

    assert own.levels.is_busy
    assert own.levels.namespaces() == [b"n"]
    assert own.levels.host_bytes(b"n") == own.levels.places.accounts.pool.used * 1000
    own.core.erase(Erase(1, b"n"))
    own.settle()
    assert own.levels.places.accounts.pool.used == 0


def half_recovered(monkeypatch: pytest.MonkeyPatch, *, disk: bool = False) -> LeveledWorld:
    """Return an engine that recovers a copy a turn: three prefixes of n, and one of another."""
    own = world(disk=disk)
    for number in (1, 2, 3):
        own.run(ask(f"first{number}", prompt(number), grant=leased(13)))
    own.run(ask("other", prompt(1), grant=replace(leased(13), namespace=b"other")))
    monkeypatch.setattr("engine.levels.levels.AT_START", 1)
    step = Recovery.step
    monkeypatch.setattr(Recovery, "step", lambda self, now_s, most=1: step(self, now_s, 1))
    kill(own)
    return own


@pytest.mark.parametrize("disk", [False, True])
def test_an_erasure_in_the_middle_of_a_recovery_takes_turns(
    monkeypatch: pytest.MonkeyPatch, *, disk: bool
) -> None:
    """It is answered once, when nothing is left, with all that goes; nothing of it is found before,
    and what comes later of that namespace stays.
    """
    own = half_recovered(monkeypatch, disk=disk)
    before, answers = own.levels.host_bytes(b"n"), list[Erased]()
    for call_id in (1, 2):
        own.core.erase(Erase(call_id, b"n"), answers.append)
    is_open = not answers and own.levels.host_bytes(b"n") > 0
    found = own.below(prompt(1))
    own.run(ask("later", prompt(4), grant=leased(13)))
    own.settle()
    left = [own.kept_memory.table.read(slot) for slot in range(own.kept_memory.table.slots)]
    prefixes = [one.run for one in left if one is not None and one.namespace == b"n"]

    assert is_open
    assert found == (0, {})
    assert sorted(one.call_id for one in answers) == [1, 2]
    assert sum(one.levels[0].bytes for one in answers) == before
    assert sum(one.levels[0].blocks for one in answers) * 1000 == before
    assert len(answers[0].levels) == 1 + disk
    assert len(prefixes) == 3
    assert own.below(prompt(4))[1] or own.peek(b"n", prompt(4))
    kill(own)
    own.settle()
    assert own.below(prompt(1)) == (0, {})
    assert own.levels.host_bytes(b"other") == 3000


def test_an_erasure_of_a_part_brings_its_namespace_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is named is known by the tree; other namespaces keep their turns."""
    own = half_recovered(monkeypatch)
    answers = list[Erased]()
    own.core.erase(Erase(1, b"n", tokens=prompt(1)[:12]), answers.append)

    assert answers
    assert own.below(prompt(1)) == (0, {"host": 8})
    assert own.below(prompt(2)) == (0, {"host": 12})
    assert own.levels.is_busy
    own.settle()
    assert own.levels.host_bytes(b"other") == 3000


def test_no_slot_is_given_out_before_the_old_storage_process_has_ended() -> None:
    """Copies that lie there are loaded all the same."""
    own = with_promise()
    own.kept_memory.is_shared = True
    kill(own)
    used = own.levels.places.accounts.pool.used
    own.run(ask("other", prompt(5), grant=leased(13)))

    assert own.levels.places.accounts.pool.used == used
    assert own.run(ask("again", prompt(1))) == [12]
    own.kept_memory.is_shared = False
    own.run(ask("more", prompt(6), grant=leased(13)))
    assert own.levels.places.accounts.pool.used > used


@pytest.mark.parametrize("at_rest", AT_REST)
def test_what_may_not_rest_on_disk_is_not_stored_after_a_restart(at_rest: AtRest) -> None:
    """Though none of its requests has come to the new engine; what may is stored, and the storage
    is told whether it may go on to a remote store.
    """
    own = world(disk=True)
    own.disk.is_away = True
    own.run(ask("first", prompt(1), grant=leased(13, lease_id="early")))
    own.run(ask("second", prompt(2), grant=replace(leased(13), at_rest=at_rest)))
    kill(own)
    own.disk.beat(StorageStats("open"))
    own.run(ask("other", prompt(3), grant=CacheGrant(b"other", PAYER)))

    stores = [one for one in own.disk.commands if isinstance(one, StoreRuns)]
    assert len(own.stored()) == (0 if at_rest == "never" else 2)
    assert {one.may_leave for one in stores if one.namespace == b"n"} <= {at_rest == "remote"}
    assert own.below(prompt(1)) == (0, {"host": 12})


def test_quotas_hold_for_recovered_copies() -> None:
    """They are the payer's before any of its requests comes."""
    own = with_promise()
    own.run(ask("other", prompt(2), grant=replace(leased(13), quota=replace(PAYER, payer=b"p2"))))
    kill(own)

    assert {one.payer: one.used for one in host_of(own).payers} == {b"payer": 3000, b"p2": 3000}


def test_what_hangs_on_nothing_is_dropped() -> None:
    """A copy whose parent is gone can never be matched."""
    own = with_promise()
    middle = own.levels.places.match(b"n", prompt(1), 0.0)[1]
    own.kept_memory.table.clear(middle.slot)
    kill(own)
    own.settle()

    assert own.below(prompt(1)) == (0, {"host": 4})
    assert (host_of(own).recovered_total, host_of(own).orphaned_total) == (1, 1)
    assert own.levels.places.accounts.pool.used == 1


def scenario(own: LeveledWorld) -> None:
    """Write, renew, drop for room, expire and erase."""
    for number in range(4):
        own.run(ask(f"a{number}", prompt(number), grant=leased(13, lease_id=f"lease{number}")))
    own.run(ask("b", prompt(1), grant=leased(9, HOUR, "shorter")))
    own.run(ask("c", prompt(7), grant=leased(13, LIMITED)))
    own.clock.advance(60.0)
    own.core.erase(Erase(1, b"n", lease_id="lease2"))
    own.push_out(3)
    own.core.erase(Erase(2, b"other"))
    own.settle()


def test_an_engine_killed_at_any_write_leaves_only_right_copies() -> None:
    """Before it, in the middle of it, and after it; answers stay those from nothing."""
    own = world(slots=14)
    scenario(own)
    writes = own.kept_memory.memory.writes
    for kill_at in range(0, writes, 9):
        check_killed(kill_at, kill_at % 40)

    assert writes > 50


@pytest.mark.slow
def test_an_engine_killed_in_each_part_of_any_write_leaves_only_right_copies() -> None:
    """The same, everywhere."""
    own = world(slots=14)
    scenario(own)
    for kill_at in range(own.kept_memory.memory.writes - 1):  # the first is before the scenario
        for part in (0, 5, 30):
            check_killed(kill_at, part)


def check_killed(kill_at: int, part: int) -> None:
    """Kill an engine in this write, and ask the next one for everything."""
    own = world(slots=14)
    memory = own.kept_memory.memory
    memory.left, memory.bytes_left = kill_at, part
    with pytest.raises(WriterKilled):
        scenario(own)
    kill(own)
    own.settle()
    check_slots(own)
    for number in range(8):
        own.run(ask(f"again{number}", prompt(number)))


@pytest.mark.parametrize(
    "fault", ["clears nothing", "forgets limits", "wipes nothing", "gives out at once"]
)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above can fail."""
    if fault == "clears nothing":
        monkeypatch.setattr(SlotTable, "clear", lambda self, slot: None)
        check = test_an_erased_namespace_stays_erased
    elif fault == "forgets limits":
        read = SlotTable.read

        def endless(self: SlotTable, slot: int) -> Any:
            entry = read(self, slot)
            return None if entry is None else replace(entry, limit_at_s=float("inf"))

        monkeypatch.setattr(SlotTable, "read", endless)
        check = test_limits_and_promises_have_gone_on_running_down
    elif fault == "wipes nothing":
        monkeypatch.setattr(SlotRemains, "soil", lambda self, namespace: None)
        check = test_an_erased_namespace_stays_erased
    else:
        monkeypatch.setattr(FakeKeptSlots, "is_alone", lambda self: True)
        check = test_no_slot_is_given_out_before_the_old_storage_process_has_ended
    with pytest.raises((AssertionError, InvariantViolation, RuleBroken, OracleError)):
        check()
