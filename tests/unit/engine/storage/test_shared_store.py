"""Replicas of a model share a remote store: put once, found by name, fetched as from a peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from engine.moves import (
    EraseStored,
    FetchedRun,
    FetchRuns,
    KeepHere,
    Look,
    Looked,
    SlotFormat,
    StopFetch,
)
from engine.storage.remote.address import RemoteSettings, open_remote
from engine.storage.remote.objects import check_proof
from engine.storage.sealing.master_key import MasterKey
from engine.storage.sealing.unlocking import shared_proof
from tests.fakes import FakeClock
from tests.unit.engine.storage.local_storage import write_key
from tests.unit.engine.storage.remote_faults import FaultyObjects
from tests.unit.engine.storage.shared_rig import (
    MASTER,
    MODEL,
    OWN,
    Owner,
    await_remote,
    check_processes,
    owners_of,
)
from tests.unit.engine.storage.storage_rig import LONG, RUN, SLOT_BYTES, A, B, DiskRig

RUNS = len(LONG) // RUN
Lie = Callable[[str, bytes], bytes]


@pytest.fixture
def objects() -> FaultyObjects:
    """Return the store that all share."""
    return FaultyObjects()


@pytest.fixture
def two(tmp_path: Path, objects: FaultyObjects) -> Iterator[list[Owner]]:
    """Return two owners of one store."""
    with owners_of(tmp_path, objects) as owners:
        yield owners


def runs_in(objects: FaultyObjects) -> list[str]:
    """Return the names of the runs in a store."""
    return [name for name in objects.objects if "/o/" in name]


def test_what_one_owner_has_stored_another_one_fetches(two: list[Owner]) -> None:
    """All of it, with the bytes and the digests that were stored."""
    one, other = two
    one.store(A, LONG)
    one.settle()
    assert other.offered(LONG) == RUNS
    assert other.whys(LONG) == [""] * RUNS


def test_names_and_bytes_tell_nothing_and_are_the_same_for_every_replica(
    two: list[Owner], objects: FaultyObjects
) -> None:
    """A path is put by one owner alone; the other one's copy is neither put nor counted."""
    one, other = two
    one.store(A, LONG)
    one.settle()
    before = dict(objects.objects)
    other.store(A, LONG)
    other.settle()
    assert {name: objects.objects[name] for name in runs_in(objects)} == {
        name: data for name, data in before.items() if "/o/" in name
    }
    assert len(runs_in(objects)) == RUNS
    assert (one.far.put_total, other.far.put_total) == (RUNS, 0)
    assert other.far.stats().used_bytes == 0
    assert not any(A in data or A.hex() in name for name, data in objects.objects.items())


def test_a_race_of_two_owners_puts_each_run_once(two: list[Owner], objects: FaultyObjects) -> None:
    """Neither knows yet what the other one has put."""
    for owner in two:
        assert owner.offered(LONG) == 0  # both have read that there is nothing
        owner.store(A, LONG)
    for owner in two:
        owner.local.turn()
    for owner in two:
        owner.settle()
    assert sum(owner.far.put_total for owner in two) == len(runs_in(objects)) == RUNS


def test_what_is_behind_the_own_copies_is_offered_and_fetched(two: list[Owner]) -> None:
    """A look tells how many runs more there are, a fetch begins behind the first ones."""
    one, other = two
    one.store(A, LONG)
    one.settle()
    other.store(A, LONG[: 2 * RUN])
    assert other.offered(LONG) == RUNS - 2
    assert other.whys(LONG, first=2) == [""] * (RUNS - 2)


@pytest.mark.parametrize("what", ["namespace", "key", "model", "format"])
def test_others_find_nothing(
    what: str, tmp_path: Path, two: list[Owner], objects: FaultyObjects
) -> None:
    """Another namespace, master key, model or format has other names, or is refused."""
    one, other = two
    one.store(A, LONG)
    one.settle()
    master = MasterKey(bytes(32)) if what == "key" else one.master
    assert master is not None
    half = SlotFormat("int8c", SLOT_BYTES // 2, "near")
    form = (half,) if what == "format" else ()
    model = "another" if what == "model" else f"{MODEL}"
    with owners_of(tmp_path / what, objects, 1, master=master, model=model) as (stranger,):
        namespace = B if what == "namespace" else A
        assert stranger.offered(LONG, namespace, *form) == 0
        found = stranger.fetch_runs(LONG, 0, namespace, *form)
        assert [run.why for run in found] == ["lacking"] * RUNS
    assert other.offered(LONG) == RUNS


def about_runs(lie: Lie) -> Lie:
    """Return a lie about runs, which tells the truth about manifests."""
    return lambda name, data: lie(name, data) if "/o/" in name else data


def test_damaged_moved_and_foreign_objects_fill_no_slot(
    two: list[Owner], objects: FaultyObjects
) -> None:
    """A fetch ends where the bytes are not those of the run that was wanted."""
    one, other = two
    one.store(A, LONG)
    one.settle()
    assert other.offered(LONG) == RUNS
    names = runs_in(objects)
    lies: dict[str, Lie] = {
        "flipped": lambda name, data: data[:-1] + bytes([data[-1] ^ 1]),
        "short": lambda name, data: data[:-1],
        "empty": lambda name, data: b"",
        "moved": lambda name, data: objects.objects[names[name == names[0]]],
    }
    for lie in lies.values():
        objects.lie = about_runs(lie)
        assert "damaged" in other.whys(LONG)
    objects.lie = lambda name, data: data
    assert other.whys(LONG) == [""] * RUNS


def test_a_manifest_that_is_damaged_or_foreign_is_ignored(
    two: list[Owner], objects: FaultyObjects
) -> None:
    """It counts, and what others list is found."""
    one, other = two
    one.store(A, LONG)
    one.settle()
    (name,) = (name for name in objects.objects if "/m/" in name)
    copied = name.rsplit("/", 1)[0] + "/" + "f" * 32
    objects.objects[copied] = objects.objects[name]
    objects.objects[copied[:-1] + "0"] = b"none of ours"
    assert other.offered(LONG) == RUNS
    assert other.far.stats().damaged_total == 2


def test_what_is_gone_from_the_store_is_computed(two: list[Owner], objects: FaultyObjects) -> None:
    """A manifest may list what an erasure elsewhere has deleted."""
    one, other = two
    above = one.store(A, LONG[: 2 * RUN])
    one.settle()
    first = runs_in(objects)
    one.store(A, LONG[2 * RUN :], parent=above[-1], above=LONG[: 2 * RUN])
    one.settle()
    assert other.offered(LONG) == RUNS
    for name in set(runs_in(objects)).difference(first):
        del objects.objects[name]
    assert other.whys(LONG) == ["", "", "lacking", "lacking", "lacking"]
    assert other.offered(LONG) == 2
    other.store(A, LONG)
    other.settle()
    assert 1 <= other.far.put_total <= RUNS - 2  # what was missed is there again


def test_a_limit_ends_what_is_offered_and_renewals_are_listed(two: list[Owner]) -> None:
    """No object is written again for it."""
    one, other = two
    records = one.store(A, LONG, limit_s=60.0)
    one.settle()
    assert other.offered(LONG) == RUNS
    (run, *_) = other.fetch_runs(LONG)
    assert run.limit_s is not None
    assert 0 < run.limit_s <= 60.0
    one.renew(A, records, limit_s=600.0)
    one.settle(10)
    other.clock.advance(100.0)
    assert other.offered(LONG) == RUNS
    one.clock.advance(1_000.0)
    assert other.offered(LONG) == 0


@pytest.mark.parametrize("part", ["all", "lease", "prefix"])
def test_an_erasure_deletes_all_of_the_namespace_and_brings_nothing_back(
    part: str, two: list[Owner], objects: FaultyObjects
) -> None:
    """Objects and manifests of every owner; other namespaces keep theirs."""
    one, other = two
    one.store(A, LONG, lease_ids=("lease",))
    one.store(B, LONG)
    one.settle()
    assert other.offered(LONG) == RUNS
    lease_id, tokens = {"lease": ("lease", None), "prefix": (None, LONG[:RUN])}.get(
        part, (None, None)
    )
    told = one.erased_shared(A, lease_id, tokens)
    assert (told.objects, told.code) == (RUNS + 1, "")
    assert told.bytes > RUNS * SLOT_BYTES
    assert len(runs_in(objects)) == RUNS
    assert other.whys(LONG) == ["lacking"] * RUNS
    other.erased_shared(A)
    assert other.offered(LONG) == 0
    one.settle()
    assert len(runs_in(objects)) == RUNS
    assert other.offered(LONG, B) == RUNS
    one.store(A, LONG)
    one.settle()
    assert other.offered(LONG) == RUNS


def test_an_erasure_reaches_what_went_before_the_namespace_had_to_stay(
    two: list[Owner], objects: FaultyObjects
) -> None:
    """Also what another owner has put, which may be gone by now."""
    one, other = two
    one.store(A, LONG)
    one.settle()
    other.store(A, LONG)
    other.settle()
    other.storage.send(KeepHere((A,)))
    other.settle()

    other.erased_shared()

    assert runs_in(objects) == []


def test_an_erasure_that_the_store_does_not_answer_is_pending_and_made_up_for(
    two: list[Owner], objects: FaultyObjects
) -> None:
    """Also after a restart; the namespace counts as held until then."""
    one, other = two
    one.store(A, LONG)
    one.settle()
    assert other.offered(LONG) == RUNS
    objects.fails["clear"] = "the store is closed today"
    told = one.erased_shared()
    assert told.code == "the store is closed today"
    assert one.local.store.usage.is_kept(A)
    one.reopen()
    assert one.local.store.usage.is_kept(A)
    objects.fails.clear()
    one.settle()
    assert runs_in(objects) == []
    assert not one.local.store.usage.is_kept(A)


def test_an_erasure_while_a_put_is_under_way_leaves_nothing(
    two: list[Owner], objects: FaultyObjects
) -> None:
    """The put ends after the erasure has come, and its object is deleted."""
    one, _ = two
    one.offered(LONG)
    one.store(A, LONG)
    objects.shut("put")
    one.disk.maintain()
    objects.await_call()
    told = list[bool]()
    one.disk.erase(EraseStored(one.call_id(), A))
    one.far.settle(A, lambda: told.append(True))
    assert told == []
    objects.open_all()
    one.local.pump()
    one.settle()
    assert told == [True]
    assert objects.objects == {}


def test_the_bound_is_of_one_owner_and_its_coldest_go_first(
    tmp_path: Path, objects: FaultyObjects
) -> None:
    """What is over it is taken out of the manifest before it is deleted."""
    with owners_of(tmp_path, objects, remote_bytes=4 * 12_288) as (one, other):
        one.store(A, LONG)
        one.settle(40)
        assert len(runs_in(objects)) <= 4
        assert one.far.stats().used_bytes <= 4 * 12_288
        other.store(B, LONG[: 3 * RUN])
        other.settle()
        assert other.far.put_total == 3


def test_what_may_not_leave_is_not_put(two: list[Owner], objects: FaultyObjects) -> None:
    """At rest elsewhere is a tenant's word."""
    one, _ = two
    one.store(A, LONG, may_leave=False)
    one.settle()
    assert objects.objects == {}
    objects.fails["clear"] = "it is not asked"
    assert one.erase(A).shared is None


def test_a_restart_lists_what_is_there_and_puts_nothing_again(
    two: list[Owner], objects: FaultyObjects
) -> None:
    """Also what another owner has put."""
    one, other = two
    one.store(A, LONG[: 2 * RUN])
    one.settle()
    other.store(A, LONG)
    other.settle()
    assert other.far.put_total == RUNS - 2
    before = {name: objects.objects[name] for name in runs_in(objects)}
    for owner in two:
        owner.reopen()
        owner.settle()
        assert owner.far.put_total == 0
    assert before == {name: objects.objects[name] for name in runs_in(objects)}


def test_a_fetch_that_is_stopped_or_late_has_all_its_outcomes(
    two: list[Owner], objects: FaultyObjects
) -> None:
    """What comes after its end fills no slot."""
    one, other = two
    one.store(A, LONG)
    one.settle()
    assert other.offered(LONG) == RUNS
    shared = other.disk.shared
    assert shared is not None
    for end in ("stopped", "late", "lost"):
        objects.shut("get")
        command = FetchRuns(other.call_id(), None, A, LONG, 0, tuple(range(RUNS)), OWN, 1.0)
        for slot in command.slots:
            other.arena.view(slot, SLOT_BYTES)[:] = bytes(SLOT_BYTES)
        shared.reads.fetch(command)
        objects.await_call()
        if end == "stopped":
            other.storage.send(StopFetch(command.call_id))
        elif end == "late":
            other.clock.advance(2.0)
            shared.reads.tick()
        else:
            shared.reads.fail_all()
        found = other.storage.poll()
        objects.open_all()
        other.local.pump()
        assert found == [FetchedRun(command.call_id, end)] * RUNS
        assert other.storage.poll() == []
        assert not any(any(other.arena.view(slot, SLOT_BYTES)) for slot in command.slots)


def test_a_look_waits_for_manifests_no_longer_than_it_is_told(
    two: list[Owner], objects: FaultyObjects
) -> None:
    """Then it is answered with what is known: here, nothing."""
    one, other = two
    one.store(A, LONG)
    one.settle()
    shared, told = other.disk.shared, list[Looked]()
    assert shared is not None
    objects.shut("names")
    look = Look(1, A, LONG, OWN, 0.015)
    shared.reads.look(look, Looked(1, ()), told.append)
    assert told == []
    assert shared.reads.next_s == other.clock() + 0.015
    other.clock.advance(0.02)
    shared.reads.tick()
    objects.open_all()
    other.local.pump()
    assert told == [Looked(1, ())]
    shared.reads.look(look, Looked(1, ()), told.append)
    assert told[1] == Looked(1, (), RUNS)


def test_a_store_that_was_private_is_left_and_comes_back_as_shared(
    tmp_path: Path, objects: FaultyObjects
) -> None:
    """Objects of the other kind are deleted; records on disk get new ones."""
    clock = FakeClock(10_000.0)
    with owners_of(tmp_path, objects, 1, clock=clock) as (one,):
        one.store(A, LONG, promise_s=600.0)
        one.settle()
        shared = runs_in(objects)
        one.settings.shared_model = ""
        one.reopen()
        one.settle(40)
        assert len(objects.objects) == RUNS + len(
            [name for name in objects.objects if "/m/" in name]
        )
        assert runs_in(objects) == []
        one.settings.shared_model = MODEL
        one.reopen()
        one.settle(40)
        assert sorted(runs_in(objects)) == sorted(shared)
        assert len(one.found(A, LONG)) == RUNS


@pytest.mark.parametrize("is_real", [False, True])
def test_processes_share_a_folder_and_an_erasure_empties_it(tmp_path: Path, is_real: bool) -> None:
    """The whole way over storage processes and their wire."""
    check_processes(tmp_path, f"file://{tmp_path}/far", is_real=is_real)


def test_another_master_key_is_refused_by_name_and_the_disk_serves(tmp_path: Path) -> None:
    """The level is off; nothing is put."""
    far = f"file://{tmp_path}/far"
    remote = RemoteSettings(far, timeout_s=60.0, is_shared=True)
    check_proof(open_remote(far, 60.0), shared_proof(MasterKey(bytes(32))))
    clock = FakeClock(1_000.0)
    key = write_key(tmp_path / "key", MASTER)
    with closing(
        DiskRig(tmp_path / "one", clock, seal=key, remote=remote, model_digest=MODEL)
    ) as rig:
        stats = await_remote(rig, lambda stats: "master key" in stats.reason)
        assert stats.state == "off"
        assert MASTER.fingerprint in stats.reason
        assert MasterKey(bytes(32)).fingerprint in stats.reason
        assert len(rig.store(A, LONG)) == RUNS
        fetch = FetchRuns(rig.call_id(), None, A, LONG, 0, (0,), OWN, 60.0)
        rig.storage.send(fetch)
        assert rig.answers(fetch.call_id) == [FetchedRun(fetch.call_id, "lost")]
