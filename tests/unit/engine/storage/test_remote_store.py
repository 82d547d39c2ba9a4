"""The remote store: what is put there comes back to the byte or not at all, and nothing waits for
it longer than its timeout."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Event, Semaphore
from typing import Any, Unpack

import apsw
import pytest

from engine.moves import EraseStored, Fetch, KeepHere
from engine.storage.index.index_file import INDEX_NAME, LOG_BYTES_MAX
from engine.storage.index.remote_rows import object_name
from engine.storage.plans import PlannedRead
from engine.storage.rebuild import EmptiedRemote, empty_remote, rebuild_index, verify_store
from engine.storage.remote.address import RemoteSettings, check_remote_url
from engine.storage.remote.link import LATE, PAUSE_S, THREADS, RemoteLink
from engine.storage.remote.objects import (
    FolderObjects,
    ObjectMissing,
    RemoteFailed,
    RemoteStore,
)
from engine.storage.sealing.master_key import KEY_BYTES, MasterKey
from engine.storage.slabs.record import pack_run, place_bytes_of
from tests.fakes import FakeClock
from tests.tables import each_row
from tests.unit.engine.storage.local_storage import TIMEOUT_S, LocalRig, MakeRig, write_key
from tests.unit.engine.storage.remote_faults import FaultyObjects
from tests.unit.engine.storage.storage_rig import (
    LONG,
    RUN,
    A,
    B,
    DiskRig,
    StoreOptions,
    content_of,
    path_of,
)

MASTER = MasterKey(b"1" * KEY_BYTES)
WIDE = 2**18
"""Bytes of a slot: more than the index of a test, so that the number of places matters."""
PLACE = place_bytes_of(WIDE)


@pytest.fixture
def objects() -> FaultyObjects:
    """Return the remote store."""
    return FaultyObjects()


@pytest.fixture
def make(make: MakeRig, objects: FaultyObjects) -> Iterator[MakeRig]:
    """Return a function that opens a sealed store with a remote one; it has room for so many
    places, if they are given."""
    rigs: list[LocalRig] = []

    def open_rig(places: int = 0, **settings: Any) -> LocalRig:
        if places:
            room = LOG_BYTES_MAX + places * PLACE + WIDE
            settings |= {"disk_bytes": room, "slab_bytes": places * PLACE}
        rigs.append(make(**{"slot_bytes": WIDE, "master": MASTER, "remote": objects} | settings))
        rigs[-1].local.turn()  # which finds the store
        return rigs[-1]

    yield open_rig
    objects.open_all()
    for rig in rigs:
        rig.local.pump()


def wide(namespace: bytes, tokens: tuple[int, ...]) -> bytes:
    """Return what the last run of these tokens has."""
    return content_of(namespace, tokens, WIDE)


def fill(
    rig: LocalRig, numbers: range, namespace: bytes = A, **options: Unpack[StoreOptions]
) -> list[int]:
    """Store prefixes of one run, each a little later, with turns between; return their ids."""
    ids: list[int] = []
    for number in numbers:
        rig.clock.advance(1.0)
        ids += rig.store(namespace, path_of(number), **options)
        rig.local.turn()
    return ids


def levels_of(rig: LocalRig, numbers: range, namespace: bytes = A) -> list[str]:
    """Return where each prefix of one run is; "" for nowhere."""
    found = [rig.look(namespace, path_of(number)) for number in numbers]
    return [runs[0].level if runs else "" for runs in found]


def test_promised_records_are_put_at_once_and_stay_on_disk(
    make: MakeRig, objects: FaultyObjects
) -> None:
    """An object is the sealed record: it shows neither tokens nor KV, nor whose it is."""
    rig = make()
    ids = rig.store(A, LONG, promise_s=60.0)
    rig.store(B, LONG)
    rig.local.turn()

    assert len(objects.objects) == len(ids)
    assert {run.level for run in rig.look(A, LONG)} == {"disk"}
    for data in objects.objects.values():
        assert pack_run(LONG[:RUN]) not in data
        assert A not in data
        assert wide(A, LONG[:RUN])[:32] not in data
    assert rig.far.stats().stored_total == 5
    rig.disk.check()


def test_what_leaves_the_disk_for_room_comes_back_from_the_remote_store(
    make: MakeRig, objects: FaultyObjects
) -> None:
    """Found by the same look, token for token, also after a restart."""
    rig = make(places=8)
    ids = fill(rig, range(16))
    where = levels_of(rig, range(16))
    stats = rig.disk.stats()
    rig.disk.check()
    rig.reopen()
    rig.local.turn()

    assert where.count("remote") >= 8
    assert where[0] == "remote"
    assert stats.dropped_total == 0
    assert stats.records == 16
    assert stats.used_bytes <= 8 * PLACE
    assert levels_of(rig, range(16)) == where
    for number in range(16):
        assert rig.fetch(A, [ids[number]]) == [wide(A, path_of(number))]
    rig.disk.check()


def test_parents_leave_the_disk_after_their_children_and_are_found(make: MakeRig) -> None:
    """A path may lie on both levels; each of its runs says where."""
    rig = make(places=10)
    ids = rig.store(A, LONG)
    fill(rig, range(14), B)
    path = rig.look(A, LONG)

    assert [run.record_id for run in path] == list(ids)
    assert [run.level for run in path] == ["remote"] * 5
    assert rig.fetch(A, ids) == [wide(A, LONG[: at + RUN]) for at in range(0, 20, RUN)]
    rig.disk.check()


@pytest.mark.parametrize("call", ["put", "names"])
def test_without_a_remote_store_the_disk_drops_as_ever(
    make: MakeRig, objects: FaultyObjects, call: str
) -> None:
    """It is away from the beginning, or refuses what is put: hits are lost, and nothing else."""
    objects.fails[call] = "503"
    rig = make(places=8)
    fill(rig, range(16))
    where = levels_of(rig, range(16))

    assert "remote" not in where
    assert where.count("disk") >= 6
    assert rig.disk.stats().dropped_total >= 8
    rig.disk.check()


def test_a_store_that_fails_is_off_until_it_answers_again(
    make: MakeRig, objects: FaultyObjects
) -> None:
    """Three failures in a row; then looks end before it, and fetches fail at once."""
    rig = make(places=8)
    ids = fill(rig, range(16))
    objects.fails["get"] = "500"
    for number in range(3):
        assert rig.fetch(A, [ids[number]]) == [None]
    calls = len(objects.calls)
    assert rig.link.reason == "500"
    assert levels_of(rig, range(3)) == ["", "", ""]
    assert rig.fetch(A, [ids[3]]) == [None]
    assert objects.calls[calls:] == []
    objects.fails.clear()
    rig.local.turn()
    assert objects.calls[calls:] == [], "it is asked again after a pause"
    rig.clock.advance(PAUSE_S)
    rig.local.turn()

    assert rig.link.is_open
    assert rig.fetch(A, ids[:4]) == [wide(A, path_of(number)) for number in range(4)]
    assert rig.disk.stats().damaged_total == 0


def test_failures_of_one_payer_do_not_turn_the_store_off_for_another(
    make: MakeRig, objects: FaultyObjects
) -> None:
    """Three failures of one tenant's objects made all others compute their prefixes again."""
    rig = make(places=8)
    theirs = fill(rig, range(8), payer=b"a")
    ours = fill(rig, range(8, 20), B, payer=b"b")
    remote = [n for n in range(8, 20) if levels_of(rig, range(n, n + 1), B) == ["remote"]]
    gone = [n for n in range(8) if levels_of(rig, range(n, n + 1)) == ["remote"]]
    assert remote
    assert gone
    objects.fails["get"] = "500"
    for _ in range(3):
        assert rig.fetch(A, [theirs[gone[0]]]) == [None]
    objects.fails.clear()
    calls = len(objects.calls)

    assert rig.fetch(A, [theirs[gone[0]]]) == [None]
    assert objects.calls[calls:] == [], "the payer's own works wait for the pause"
    assert levels_of(rig, range(gone[0], gone[0] + 1)) == [""]
    assert levels_of(rig, range(remote[0], remote[0] + 1), B) == ["remote"]
    assert rig.fetch(B, [ours[remote[0] - 8]]) == [wide(B, path_of(remote[0]))]


def opened_link(objects: FaultyObjects, clock: FakeClock) -> RemoteLink:
    """Return a link to a store that has answered."""
    link = RemoteLink(lambda: objects, clock, TIMEOUT_S)
    link.tick()
    settle(link)
    assert link.is_open
    return link


def settle(link: RemoteLink) -> None:
    """Wait until a work has ended, and run what follows."""
    assert select.select([link.wake_fd], [], [], 10)[0], "no work has ended"
    for then in link.take_ended():
        then()


def fail(link: RemoteLink, payer: bytes, times: int) -> None:
    def work(store: RemoteStore) -> None:
        raise RemoteFailed("500")

    for _ in range(times):
        link.run(payer, work, lambda failure: None)
        settle(link)


def test_a_store_that_fails_for_two_payers_is_off_for_all(objects: FaultyObjects) -> None:
    """Otherwise each of many tenants would wait for three timeouts of a store that is away."""
    with closing(opened_link(objects, FakeClock(0.0))) as link:
        fail(link, b"a", 3)
        link.run(b"c", lambda store: None, lambda failure: None)
        settle(link)  # a success in between: the failures are that payer's own
        fail(link, b"b", 3)
        assert link.is_open_for(b"c")
        assert not link.is_open_for(b"b")
        fail(link, b"d", 3)

        assert not link.is_open_for(b"c")


def test_works_without_a_thread_are_no_failures_of_their_payer(objects: FaultyObjects) -> None:
    """One payer's objects that hang hold all threads; the works behind them are late as well."""
    clock, gate, begun = FakeClock(0.0), Event(), Semaphore(0)
    told: list[str] = []

    def hang(store: RemoteStore) -> None:
        begun.release()
        gate.wait(10)

    with closing(opened_link(objects, clock)) as link:
        for _ in range(THREADS):
            link.run(b"a", hang, told.append)
        for _ in range(THREADS):
            assert begun.acquire(timeout=10)
        for _ in range(3):
            link.run(b"b", lambda store: None, told.append)
        clock.advance(TIMEOUT_S)
        link.tick()
        gate.set()

        assert told == [LATE] * (THREADS + 3)
        assert not link.is_open_for(b"a")
        assert link.is_open_for(b"b")


def test_a_promised_record_whose_put_failed_is_put_later(
    make: MakeRig, objects: FaultyObjects
) -> None:
    """One failure, or a store that is off for a while: nothing is forgotten."""
    rig = make()
    objects.fails["put"] = "500"
    ids = rig.store(A, LONG, promise_s=600.0)
    rig.local.turn()
    rig.local.turn()
    assert rig.link.reason == "500"
    objects.fails.clear()
    rig.clock.advance(PAUSE_S)
    rig.local.turn()
    rig.local.turn()

    assert len(objects.objects) == len(ids)


def test_a_slow_answer_is_a_miss_at_its_deadline_and_fills_no_slot(
    make: MakeRig, objects: FaultyObjects
) -> None:
    """The slot may have another owner by then."""
    rig = make(places=8)
    ids = fill(rig, range(16))
    objects.shut("get")
    (plan,) = rig.disk.plan_fetch(Fetch(rig.call_id(), A, (ids[0],), (3,), WIDE))
    assert isinstance(plan, PlannedRead)
    ended: list[str] = []
    rig.arena.view(3, WIDE)[:] = b"another" + bytes(WIDE - 7)
    assert rig.disk.fetch_remote(plan, lambda: ended.append(plan.verdict))
    objects.await_call()
    rig.clock.advance(TIMEOUT_S)
    rig.link.tick()
    objects.open_all()
    rig.fetch(A, [ids[15]])
    rig.fetch(A, [ids[1]])

    assert ended == ["failed"]
    assert bytes(rig.arena.view(3, WIDE)[:7]) == b"another"
    assert not rig.disk.finish_read(plan).is_done
    assert rig.link.failed_total == 1
    assert rig.fetch(A, [ids[0]]) == [wide(A, path_of(0))], "it is not struck for being slow"


Lie = Callable[[dict[str, bytes], str, bytes], bytes]


def next_object(objects: dict[str, bytes], name: str, data: bytes) -> bytes:
    """Return the next object, of the same namespace or of another."""
    names = sorted(objects)
    return objects[names[(names.index(name) + 1) % len(names)]]


LIES: dict[str, Lie] = {
    "another bit": lambda objects, name, data: flipped(data, 9_000),
    "another object": next_object,
    "it ends early": lambda objects, name, data: data[:-5_000],
    "it is empty": lambda objects, name, data: b"",
    "it was forgotten": lambda objects, name, data: bytes(len(data)),
}


def flipped(data: bytes, at: int) -> bytes:
    """Return bytes of which one bit is another."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lying_store_is_found_out_before_a_byte_is_served(
    make: MakeRig, objects: FaultyObjects, lie: Lie
) -> None:
    """Each lie is a miss, counted, and its object is deleted; another tenant's object too."""
    rig = make(places=8)
    for number in range(16):
        fill(rig, range(number, number + 1), (A, B)[number % 2])
    far = [n for n in range(16) if levels_of(rig, range(n, n + 1), (A, B)[n % 2]) == ["remote"]]
    objects.lie = partial(lie, objects.objects)
    for number in far:
        name = (A, B)[number % 2]
        assert rig.fetch(name, rig.found(name, path_of(number))) == [None]
        assert rig.found(name, path_of(number)) == []
    before = len(objects.objects)
    rig.local.turn()

    assert rig.far.damaged_total == len(far) > 0
    assert len(objects.objects) == before - len(far)
    assert rig.disk.stats().damaged_total == len(far)
    rig.disk.check()


def test_a_lost_object_is_a_miss(make: MakeRig, objects: FaultyObjects) -> None:
    """Somebody has emptied the bucket: its rows go one by one."""
    rig = make(places=8)
    ids = fill(rig, range(16))
    objects.objects.clear()

    assert rig.fetch(A, [ids[0]]) == [None]
    assert levels_of(rig, range(2)) == ["", "remote"]
    assert rig.link.is_open, "a store that says so works"


def test_an_erasure_deletes_objects_before_it_is_answered(
    make: MakeRig, objects: FaultyObjects
) -> None:
    """Of the lease or prefix that is named, or all of the namespace, whose key is destroyed too."""
    rig = make()
    rig.store(A, LONG, promise_s=60.0, lease_ids=("one",))
    rig.store(B, LONG, promise_s=60.0)
    rig.local.turn()
    part = rig.erase(A, tokens=LONG[: 3 * RUN])
    after_part = len(objects.objects)
    rest = rig.erase(A)

    assert (part.code, part.records, after_part) == ("", 3, 7)
    assert (rest.code, rest.is_shredded, len(objects.objects)) == ("", True, 5)
    assert len(rig.found(B, LONG)) == 5


def test_what_cannot_be_deleted_is_pending_until_it_is(
    make: MakeRig, objects: FaultyObjects
) -> None:
    """Over a restart too; meanwhile no look finds it, and the deletion is tried again."""
    rig = make()
    rig.store(A, LONG, promise_s=60.0)
    rig.local.turn()
    objects.fails["delete"] = "503"
    first = rig.erase(A, tokens=LONG[:RUN])
    rig.reopen()
    rig.local.turn()
    again = rig.erase(A, tokens=LONG[:RUN])
    pending = rig.far.stats().pending_erasures
    objects.fails.clear()
    rig.clock.advance(PAUSE_S + 6.0)
    rig.local.turn()
    rig.clock.advance(6.0)
    rig.local.turn()
    last = rig.erase(A, tokens=LONG[:RUN])

    assert (first.code, first.records) == ("pending", 5)
    assert (again.code, again.records, pending) == ("pending", 0, 5)
    assert rig.found(A, LONG) == []
    assert (last.code, objects.objects) == ("", {})
    assert rig.far.stats().pending_erasures == 0


@pytest.mark.parametrize("word", ["erased", "kept here"])
def test_an_object_that_comes_too_late_is_deleted(
    make: MakeRig, objects: FaultyObjects, word: str
) -> None:
    """Its put had begun before the word came, and has a tombstone from its beginning."""
    rig = make()
    objects.shut("put")
    (record_id,) = rig.store(A, LONG[:RUN], promise_s=60.0)
    rig.disk.maintain()
    objects.await_call()
    if word == "erased":
        rig.disk.erase(EraseStored(rig.call_id(), A))
    else:
        rig.storage.send(KeepHere((A,)))
    objects.open_all()
    rig.local.pump()
    was_there = len(objects.objects)
    rig.local.turn()

    assert (was_there, objects.objects) == (1, {})
    left = [None] if word == "erased" else [wide(A, LONG[:RUN])]
    assert rig.fetch(A, [record_id]) == left
    rig.disk.check()


def test_a_death_in_the_middle_of_a_put_leaves_no_object(
    make: MakeRig, objects: FaultyObjects
) -> None:
    """The next process finds its tombstone, and puts it anew as what is promised."""
    rig = make()
    rig.store(A, LONG[:RUN], promise_s=60.0)
    store = rig.disk
    store.maintain()
    rig.local.link = None  # its outcome is never taken
    rig.reopen()
    stray = set(objects.objects)
    rig.local.turn()
    rig.local.turn()

    assert len(stray) <= 1
    assert len(objects.objects) == 1
    assert rig.far.stats().pending_erasures == 0


def test_a_bound_is_kept_by_giving_up_what_was_not_used(
    make: MakeRig, objects: FaultyObjects
) -> None:
    """The least recently used first; what is used stays."""
    rig = make(places=8, remote_bytes=6 * PLACE)
    ids = fill(rig, range(20))
    for _ in range(6):
        rig.clock.advance(10.0)
        rig.local.turn()

    assert len(objects.objects) <= 6
    assert levels_of(rig, range(1)) == [""]
    assert rig.fetch(A, [ids[19]]) == [wide(A, path_of(19))]
    rig.disk.check()


def test_what_expires_is_deleted_there_too(make: MakeRig, objects: FaultyObjects) -> None:
    """A limit holds on every level."""
    rig = make()
    rig.store(A, LONG, limit_s=50.0, promise_s=50.0)
    rig.local.turn()
    there = len(objects.objects)
    rig.clock.advance(60.0)
    rig.local.turn()
    rig.local.turn()

    assert (there, objects.objects) == (5, {})


def test_without_its_address_the_rows_stay_and_nothing_is_found_there(
    make: MakeRig, objects: FaultyObjects
) -> None:
    """Who sets it again has everything back."""
    rig = make(places=8)
    fill(rig, range(16))
    where = levels_of(rig, range(16))
    rig.remote = None
    rig.reopen()
    without = levels_of(rig, range(16))
    rig.remote = objects
    rig.reopen()
    rig.local.turn()

    assert without == ["" if one == "remote" else one for one in where]
    assert levels_of(rig, range(16)) == where


# -- what may not leave the machine -------------------------------------------------------------


def owners_of(objects: FaultyObjects) -> set[str]:
    """Return the part of the objects' names that says the namespace."""
    return {name.split("/")[1] for name in objects.objects}


def test_what_may_not_leave_is_put_at_no_time(make: MakeRig, objects: FaultyObjects) -> None:
    """Promised, renewed, next to be dropped, or found by a new process: it rests on the disk or
    nowhere. Another namespace's is put beside it all the while.
    """
    rig = make(places=8)
    promised = fill(rig, range(2), promise_s=600.0, may_leave=False)
    for number in range(2, 8):
        fill(rig, range(number, number + 1), may_leave=False)
        rig.store(B, path_of(number))
        rig.local.turn()
    rig.renew(A, promised, promise_s=900.0)
    rig.local.turn()
    rig.reopen()
    for _ in range(4):
        rig.clock.advance(1.0)
        rig.local.turn()
    here, there = levels_of(rig, range(8)), levels_of(rig, range(2, 8), B)

    assert here[:2] == ["disk", "disk"]
    assert set(here) == {"disk", ""}
    assert there.count("remote") >= 4
    assert len(owners_of(objects)) == 1
    rig.disk.check()


def test_who_may_not_leave_any_more_stays(make: MakeRig, objects: FaultyObjects) -> None:
    """Whatever earlier stores said, or say that were under way; a new process knows it. What is
    there is found as before, until it is erased.
    """
    rig = make()
    before = rig.store(A, LONG, promise_s=60.0)
    rig.local.turn()
    rig.storage.send(KeepHere((A, b"unknown")))
    after = rig.store(A, path_of(70), promise_s=60.0)  # it was sent before, and came late
    rig.renew(A, [*before, *after], promise_s=90.0)
    rig.local.turn()
    count = len(objects.objects)
    rig.reopen()
    rig.local.turn()

    assert (count, len(objects.objects)) == (5, 5)
    assert rig.fetch(A, after) == [wide(A, path_of(70))]
    assert rig.erase(A).code == ""
    assert objects.objects == {}


def test_an_erasure_leaves_no_word_of_who_may_leave(make: MakeRig) -> None:
    """The index has no row of the namespace; the next store says it anew."""
    rig = make()
    rig.store(A, LONG)
    rig.store(B, LONG)
    rig.erase(A)
    rig.local.close()
    with closing(apsw.Connection(str(rig.folder / INDEX_NAME))) as index:
        rows = index.execute("select count(*) from leaving").fetchall()

    assert rows == [(1,)]


# -- while no server runs -----------------------------------------------------------------------


@pytest.fixture
def offline(make: MakeRig, tmp_path: Path) -> LocalRig:
    """Return a closed store with 16 records, half of them in a folder as the remote store."""
    rig = make(places=8, remote=FolderObjects(tmp_path / "far"))
    fill(rig, range(16))
    rig.local.close()
    return rig


def objects_in(folder: Path) -> list[Path]:
    """Return the objects of a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_verification_reads_objects_too(offline: LocalRig, tmp_path: Path) -> None:
    """One that is not what its row says is dropped, one that is missing too."""
    far = RemoteSettings(f"file://{tmp_path}/far")
    seal = write_key(tmp_path / "key", MASTER)
    sound = verify_store(offline.folder, seal=seal, remote=far)
    first, second = objects_in(tmp_path / "far")[:2]
    first.write_bytes(first.read_bytes()[:-5_000] + bytes(5_000))
    second.unlink()
    without = verify_store(offline.folder, seal=seal)
    damaged = verify_store(offline.folder, seal=seal, remote=far)
    offline.start()
    offline.local.turn()

    assert (sound.records, sound.damaged) == (16, 0)
    assert without.damaged == 0
    assert (damaged.records, damaged.damaged) == (16, 2)
    assert levels_of(offline, range(3)) == ["", "", "remote"]
    assert first not in objects_in(tmp_path / "far"), "its tombstone is carried out"


def test_neither_a_rebuilt_nor_a_cleared_store_keeps_objects(
    offline: LocalRig, tmp_path: Path
) -> None:
    """A new index knows no tombstones, so that an erased object might come back with it."""
    far = RemoteSettings(f"file://{tmp_path}/far")
    (tmp_path / "far" / "another").mkdir()
    (tmp_path / "far" / "another" / "object").touch()
    count = len(objects_in(tmp_path / "far")) - 1
    for path in offline.folder.glob("index.db*"):
        path.unlink()
    outcome = rebuild_index(offline.folder, 0, seal=write_key(tmp_path / "key", MASTER))
    emptied = empty_remote(offline.folder, far)
    again = empty_remote(offline.folder, far)

    assert outcome.records + count >= 16
    assert emptied == EmptiedRemote(count)
    assert again == EmptiedRemote(0)
    assert empty_remote(offline.folder, None) is None
    assert [path.name for path in objects_in(tmp_path / "far")] == ["object"]


# -- the process --------------------------------------------------------------------------------


def await_objects(rig: DiskRig, count: int) -> None:
    """Wait until so many records were put."""
    while (stats := rig.await_stats()).remote is None or stats.remote.stored_total < count:
        pass


def test_the_process_puts_deletes_and_tells(tmp_path: Path) -> None:
    """Over a folder as a remote store, by its address."""
    remote = RemoteSettings(f"file://{tmp_path}/far", timeout_s=60.0)
    with closing(
        DiskRig(
            tmp_path / "levels",
            FakeClock(1_000.0),
            seal=write_key(tmp_path / "key", MASTER),
            remote=remote,
        )
    ) as rig:
        rig.store(A, LONG, promise_s=60.0)
        await_objects(rig, 5)
        files = objects_in(tmp_path / "far")
        receipt = rig.erase(A, tokens=LONG[:RUN])

        assert len(files) == 5
        assert (receipt.code, receipt.records) == ("", 5)
        assert objects_in(tmp_path / "far") == []


def test_an_erasure_is_pending_at_the_deadline_of_a_store_that_hangs(tmp_path: Path) -> None:
    """Its answer waits no longer; other commands do not wait at all."""
    objects, passed_s = FaultyObjects(), [0.0]

    class Hangs(Event):
        """A gate behind which the deadline passes at once."""

        def wait(self, timeout: float | None = None) -> bool:
            passed_s.append(60.0)
            return super().wait(timeout)

    gate, remote = Hangs(), RemoteSettings("s3://bucket", timeout_s=60.0)
    with closing(
        DiskRig(
            tmp_path / "levels",
            FakeClock(1_000.0),
            monotonic_s=lambda: time.monotonic() + sum(passed_s),
            seal=write_key(tmp_path / "key", MASTER),
            remote=remote,
            objects=objects,
        )
    ) as rig:
        rig.store(A, LONG, promise_s=60.0)
        await_objects(rig, 5)
        objects.shut("delete", gate)
        receipt = rig.erase(A, tokens=LONG[:RUN])
        assert rig.found(A, LONG) == []
        assert len(rig.store(B, LONG)) == 5
        assert objects.objects
        objects.open_all()

    assert (receipt.code, receipt.records) == ("pending", 5)


# -- objects ------------------------------------------------------------------------------------


def test_a_folder_keeps_objects_whole_or_not_at_all(tmp_path: Path) -> None:
    """For this user alone; a name that is not there is said so, and its deletion is none."""
    store = FolderObjects(tmp_path / "far")
    name = object_name("store", 7, 3)
    store.put(name, memoryview(b"content"))

    assert bytes(store.get(name, 100)) == b"content"
    assert bytes(store.get(name, 3)) == b"con"
    assert store.names("store/", 9) == [name]
    assert store.names("other/", 9) == []
    assert (tmp_path / "far").stat().st_mode & 0o077 == 0
    store.delete([name, "store/none"])
    with pytest.raises(ObjectMissing):
        store.get(name, 1)
    assert FolderObjects(tmp_path / "new").names("probe/", 9) == []
    assert not (tmp_path / "new").exists(), "asking makes nothing"
    with pytest.raises(RemoteFailed, match="does not exist"):
        FolderObjects(tmp_path / "none" / "new").names("probe/", 9)


def test_a_folder_deletes_what_a_death_in_a_put_has_left(tmp_path: Path) -> None:
    """A part without its name is no object, and holds a record's bytes all the same."""
    store = FolderObjects(tmp_path / "far")
    name = object_name("store", 7, 3)
    store.put(name, memoryview(b"content"))
    part = tmp_path / "far" / f"{name}.part"
    (tmp_path / "far" / name).rename(part)
    store.delete([name])

    assert not part.exists()


def test_a_folder_makes_its_entries_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that a power cut takes back would lose a record that has no place any more, and one
    that it brings back would be one that was erased."""
    synced: list[Path] = []
    monkeypatch.setattr("engine.storage.remote.objects.sync_folder", synced.append)
    store, far = FolderObjects(tmp_path / "far"), tmp_path / "far"
    store.put("store/00/07", memoryview(b"content"))
    assert synced == [tmp_path, far, far / "store", far / "store" / "00"]
    synced.clear()
    store.put("store/00/08", memoryview(b"content"))
    store.delete(["store/00/07", "store/00/08"])

    assert synced == [far / "store" / "00"] * 2


@each_row(
    ("url", "told"),
    [
        ("s3://bucket/prefix", ""),
        ("gs://bucket", ""),
        ("az://container", ""),
        ("file:///far", ""),
        ("file://far", "expected file:///FOLDER"),
        ("file:///", "expected file:///FOLDER"),
        ("s3:///prefix", "no bucket"),
        ("http://host/x", "scheme 'http'; expected one of file, s3, gs, az"),
        ("memory:///", "scheme 'memory'"),
        ("s3://key:secret@bucket", "expected them in the environment"),
        ("bucket", "scheme ''"),
        ("s3://[", "not an address"),
    ],
)
def test_an_address_is_checked_without_being_asked(url: str, told: str) -> None:
    """And a password in it is not quoted."""
    problem = check_remote_url(url)

    assert (problem == "") == (told == "")
    assert told in problem
    assert "secret" not in problem
