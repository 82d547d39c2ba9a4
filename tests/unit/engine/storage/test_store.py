"""The disk's decisions: whose records go, what is refused, and what a reopened store knows."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Unpack

import apsw
import pytest

from engine.api import Quota
from engine.moves import ROOT, Fetch, Fetched, SetStoredQuotas
from engine.storage.index.index import RecordIndex, RecordRow
from engine.storage.index.index_file import INDEX_NAME, LOG_BYTES_MAX, IndexUnusable
from engine.storage.sealing.master_key import MasterKey
from engine.storage.slabs.record import place_bytes_of
from engine.storage.slabs.slabs import Place
from engine.storage.space.disk_space import NO_SLAB_MS
from engine.storage.space.eviction_order import PAUSE_MS
from tests.unit.engine.storage.local_storage import LocalRig, MakeRig, run_in_turn
from tests.unit.engine.storage.storage_rig import (
    LONG,
    RUN,
    SLOT_BYTES,
    A,
    B,
    StoreOptions,
    content_of,
    path_of,
)

PLACE = place_bytes_of(SLOT_BYTES)
WIDE = 2**18
"""Bytes of a slot where the number of places matters: more than the index of a test."""
WIDE_PLACE = place_bytes_of(WIDE)
LESS = WIDE - 4_096
"""Bytes of a packed slot: its place does not fit what `room_for` leaves to the index."""


def room_for(places: int, slab_places: int = 0) -> dict[str, int]:
    """Return the settings of a disk with room for so many places, and no more."""
    return {
        "disk_bytes": LOG_BYTES_MAX + places * WIDE_PLACE + WIDE,
        "slab_bytes": (slab_places or places) * WIDE_PLACE,
        "slot_bytes": WIDE,
    }


def scopes_of(rig: LocalRig) -> list[bytes]:
    """Return the namespaces that have a row of their own in the index of a closed store."""
    with closing(apsw.Connection(str(rig.folder / INDEX_NAME))) as index:
        return [name for (name,) in index.execute("select namespace from scopes")]


def fill(
    rig: LocalRig, numbers: Iterable[int], ns: bytes = A, **options: Unpack[StoreOptions]
) -> list[str]:
    """Store prefixes of one run; return the codes."""
    codes = []
    for number in numbers:
        rig.clock.advance(0.01)
        command = rig.store_command(ns, path_of(number), **options)
        codes.append(rig.send_store(command).code)
    return codes


def there(rig: LocalRig, numbers: Iterable[int], ns: bytes = A) -> list[int]:
    """Return the prefixes of one run that are found."""
    return [number for number in numbers if rig.found(ns, path_of(number))]


@pytest.mark.parametrize("master", [None, MasterKey(bytes(32))], ids=["plain", "sealed"])
def test_a_reopened_store_knows_what_it_knew(make: MakeRig, master: MasterKey | None) -> None:
    """Records, limits, promises and leases are on disk, and each opening seals under a new salt."""
    rig = make(master=master)
    ids = rig.store(A, LONG, limit_s=100.0, promise_s=50.0, lease_ids=("one",))
    rig.store(B, LONG)
    rig.clock.advance(10.0)
    rig.reopen()
    more = rig.store(A, path_of(9), parent=ids[4], above=LONG)
    rig.reopen()
    (first, *_) = rig.look(A, LONG)

    assert rig.found(A, (*LONG, *path_of(9))) == [*ids, *more]
    assert (first.limit_s, first.promise_s) == (90.0, 40.0)
    assert rig.fetch(A, [ids[4], *more]) == [
        content_of(A, LONG),
        content_of(A, (*LONG, *path_of(9))),
    ]
    assert sorted(rig.disk.usage.namespaces) == [A, B]
    assert rig.disk.stats().used_bytes == 11 * PLACE
    assert rig.erase(A, lease_id="one").records == 6
    rig.disk.check()


def test_record_ids_are_not_used_again_after_a_restart(make: MakeRig) -> None:
    """Also where the records with the highest ids are gone."""
    rig = make()
    ids = rig.store(A, LONG)
    rig.erase(A)
    rig.reopen()

    assert min(rig.store(A, LONG)) > max(ids)


def test_a_clock_that_went_back_lengthens_no_limit(make: MakeRig) -> None:
    """The store's own time goes on from the latest instant that it has seen."""
    rig = make()
    rig.store(A, LONG[:4], limit_s=100.0)
    rig.clock.advance(60.0)
    rig.disk.maintain()
    rig.wall_offset_s = -3_600.0
    rig.reopen()
    assert rig.look(A, LONG)[0].limit_s == pytest.approx(40.0)

    rig.clock.advance(39.0)
    assert rig.found(A, LONG) != []
    rig.clock.advance(1.0)
    assert rig.found(A, LONG) == []


def test_a_clock_that_jumps_ahead_expires_and_stays_there(make: MakeRig) -> None:
    """Instants already on disk count from the later clock."""
    rig = make()
    rig.store(A, LONG[:4], limit_s=100.0)
    rig.wall_offset_s = 1_000.0
    assert rig.found(A, LONG) == []

    rig.wall_offset_s = 0.0
    assert rig.found(A, LONG) == []


def test_what_has_expired_leaves_the_disk_without_traffic(make: MakeRig) -> None:
    """A limit is a promise to forget, too; everything under it goes along."""
    rig = make()
    ids = rig.store(A, LONG[:8], limit_s=10.0)
    rig.store(A, LONG[8:12], parent=ids[1], above=LONG[:8])
    rig.store(B, LONG[:4])
    rig.clock.advance(11.0)
    rig.disk.maintain()

    stats = rig.disk.stats()
    assert (stats.records, stats.expired_total) == (1, 3)
    assert not rig.storage.has_records(A)


def test_a_full_disk_drops_what_was_used_longest_ago(make: MakeRig) -> None:
    """Never used before used, leaves before what they hang on."""
    rig = make(**room_for(8))
    fill(rig, range(8))
    ids = rig.found(A, path_of(0))
    rig.fetch(A, ids)
    fill(rig, [100])

    assert there(rig, [100])
    assert there(rig, [0]), "it was used"
    assert not there(rig, [1]), "it was not, and is the oldest"


def test_a_parent_outlives_its_children(make: MakeRig) -> None:
    """A prefix whose beginning is gone is worth nothing."""
    rig = make(**room_for(8))
    ids = rig.store(A, LONG)
    rig.clock.advance(1.0)
    for number in range(100, 107):
        fill(rig, [number])
        found = rig.found(A, LONG)
        assert found == list(ids[: len(found)])


def test_nothing_promised_is_dropped(make: MakeRig) -> None:
    """Room that is all promised refuses; the promise ends, and the room is there."""
    rig = make(**room_for(5))
    ids = rig.store(A, LONG, promise_s=60.0)
    assert fill(rig, [1]) == ["full"]
    assert rig.found(A, LONG) == list(ids)

    rig.clock.advance(61.0)
    assert fill(rig, [1]) == [""]


def test_a_stream_of_one_payer_takes_nothing_inside_anothers_floor(make: MakeRig) -> None:
    """And beyond the floor, the payer that is furthest over its share gives first."""
    rig = make(**room_for(10))
    rig.storage.send(SetStoredQuotas((Quota(floor_blocks=4, payer=b"quiet"),)))
    fill(rig, range(4), payer=b"quiet", ns=B)
    assert set(fill(rig, range(100, 150), payer=b"loud")) == {""}

    assert there(rig, range(4), B) == [*range(4)]
    assert rig.disk.stats().records == 10


def test_a_payers_own_stream_replaces_its_own_records(make: MakeRig) -> None:
    """The quiet payer has no floor here, and is under its share all the same."""
    rig = make(**room_for(10))
    fill(rig, range(3), payer=b"quiet", ns=B)
    fill(rig, range(100, 150), payer=b"loud")

    assert there(rig, range(3), B) == [*range(3)]


def test_a_weight_gives_more_room(make: MakeRig) -> None:
    """With three times the weight, three times as much stays."""
    rig = make(**room_for(12))
    rig.storage.send(SetStoredQuotas((Quota(weight=3.0, payer=b"heavy"),)))
    for number in range(60):
        fill(rig, [number], payer=b"heavy", ns=A)
        fill(rig, [number], payer=b"light", ns=B)
    used = {payer.payer: payer.used // WIDE_PLACE for payer in rig.disk.stats().payers}

    assert used == {b"heavy": 9, b"light": 3}


def test_a_ceiling_holds_where_there_is_room(make: MakeRig) -> None:
    """The payer's own oldest record makes way; promised ones do not."""
    rig = make()
    rig.storage.send(SetStoredQuotas((Quota(ceiling_blocks=2, payer=b"payer"),)))
    assert fill(rig, range(5)) == [""] * 5
    assert there(rig, range(5)) == [3, 4]

    rig.store(A, LONG[:8], promise_s=60.0, payer=b"payer")
    refused = rig.send_store(rig.store_command(A, path_of(9), payer=b"payer"))
    assert refused.code == "over_quota"


def test_a_ceiling_counts_records_of_a_size_that_is_used_no_more(make: MakeRig) -> None:
    """They go first, so that their payer is not shut out by what no reader takes any more."""
    rig = make(other_bytes=(SLOT_BYTES // 2,))
    rig.storage.send(SetStoredQuotas((Quota(ceiling_blocks=2, payer=b"payer"),)))
    assert fill(rig, range(2)) == [""] * 2
    rig.close()
    other = make(slot_bytes=SLOT_BYTES // 2)
    other.storage.send(SetStoredQuotas((Quota(ceiling_blocks=4, payer=b"payer"),)))

    assert fill(other, range(10, 14)) == [""] * 4
    assert there(other, range(12, 14)) == [*range(12, 14)]
    other.disk.check()


def test_the_days_write_budget_refuses_all_but_promises(make: MakeRig) -> None:
    """Wear is bounded; tomorrow is another day, and a restart is not."""
    rig = make(write_bytes_per_day=3 * PLACE)
    assert fill(rig, range(1, 5)) == ["", "", "", "write_budget"]
    rig.reopen()
    assert fill(rig, [9]) == ["write_budget"]
    rig.store(A, LONG[:4], promise_s=60.0)

    assert rig.disk.stats().written_bytes_today == 4 * PLACE
    rig.clock.advance(86_400.0)
    assert fill(rig, [9]) == [""]


def test_a_batch_stays_inside_the_days_write_budget(make: MakeRig) -> None:
    """What it is about to write counts before it is written."""
    rig = make(write_bytes_per_day=3 * PLACE)
    stored = rig.send_store(rig.store_command(A, LONG))

    assert (len(stored.record_ids), stored.code) == (3, "write_budget")
    assert rig.disk.stats().written_bytes_today == 3 * PLACE


def test_a_new_slab_is_synced_beside_the_main_thread_and_before_its_rows(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan waits for no sync; a batch does, for its slabs and for the folder that names them."""
    synced = list[Path]()
    monkeypatch.setattr("engine.storage.slabs.slabs.sync_folder", synced.append)
    rig = make()
    rig.faults.fails["sync"] = errno.ENOSPC
    batch = rig.disk.writer.plan([rig.store_command(A, path_of(1))])
    assert (synced, batch.stores[0].code) == ([], "")
    rig.disk.writer.write(batch, run_in_turn)
    assert (synced, rig.disk.writer.commit(batch)[0].code) == ([], "write_failed")

    rig.clock.advance(NO_SLAB_MS / 1_000 + 1.0)
    rig.disk.maintain()
    rig.faults.fails.clear()
    assert fill(rig, [2, 3]) == ["", ""]
    assert synced == [rig.folder]


def test_a_namespace_without_records_is_forgotten_in_the_next_maintenance(make: MakeRig) -> None:
    """Its scope goes while the store is open; not one that a batch under way writes to."""
    rig = make()
    rig.store(A, LONG[:4], limit_s=10.0)
    rig.store(B, LONG[:4], limit_s=10.0)
    rig.clock.advance(11.0)
    batch = rig.disk.writer.plan([rig.store_command(B, path_of(1))])
    rig.disk.maintain()
    rig.disk.writer.write(batch, run_in_turn)
    assert rig.disk.writer.commit(batch)[0].code == ""
    assert there(rig, [1], B)
    rig.local.close()

    assert scopes_of(rig) == [B]
    rig.start()


def test_a_batch_stores_a_run_once(make: MakeRig) -> None:
    """Two requests with one beginning arrive together."""
    rig = make()
    first, second = rig.store_command(A, LONG), rig.store_command(A, LONG)
    batch = rig.disk.writer.plan([first, second])
    rig.disk.writer.write(batch, run_in_turn)
    one, two = rig.disk.writer.commit(batch)

    assert one.record_ids == two.record_ids
    assert rig.disk.stats().records == 5


def test_a_parent_that_goes_while_its_child_is_written_takes_the_child_along(
    make: MakeRig,
) -> None:
    """No record without its parent; the place is free again."""
    rig = make()
    (top,) = rig.store(A, LONG[:4], limit_s=10.0)
    batch = rig.disk.writer.plan([rig.store_command(A, LONG[4:8], parent=top, above=LONG[:4])])
    rig.disk.writer.write(batch, run_in_turn)
    rig.disk._drop([top])
    (outcome,) = rig.disk.writer.commit(batch)

    assert (outcome.record_ids, outcome.code) == ((), "no_parent")
    assert rig.disk.stats().used_bytes == 0


@pytest.mark.parametrize("what", ["namespace", "lease", "prefix"])
def test_a_store_that_ends_after_an_erasure_brings_nothing(make: MakeRig, what: str) -> None:
    """Whatever was erased of its namespace."""
    rig = make()
    batch = rig.disk.writer.plan([rig.store_command(A, LONG), rig.store_command(B, LONG)])
    rig.disk.writer.write(batch, run_in_turn)
    rig.erase(
        A,
        lease_id="any" if what == "lease" else None,
        tokens=LONG[:4] if what == "prefix" else None,
    )
    erased, kept = rig.disk.writer.commit(batch)

    assert (erased.record_ids, erased.code) == ((), "erased")
    assert len(kept.record_ids) == 5
    assert rig.found(A, LONG) == []


def test_a_fetch_that_ends_after_an_erasure_brings_nothing(make: MakeRig) -> None:
    """And its place is not written anew while it is read."""
    rig = make()
    ids = rig.store(A, LONG[:4])
    (plan,) = rig.disk.plan_fetch(Fetch(1, A, ids, (9,), SLOT_BYTES))
    assert not isinstance(plan, Fetched)
    rig.erase(A)
    rig.store(B, LONG)
    rig.disk.reader.read(plan)

    assert rig.disk.finish_read(plan).is_done is False
    assert plan.verdict == "done"


def test_calls_that_take_few_bytes_are_repeated(make: MakeRig) -> None:
    """POSIX allows them, and a record is whole all the same."""
    rig = make()
    rig.faults.bytes_max = 1_000
    ids = rig.store(A, LONG)

    assert rig.fetch(A, ids[4:]) == [content_of(A, LONG)]


def test_a_disk_without_room_for_a_slab_is_full_until_there_is_some(make: MakeRig) -> None:
    """What is stored is served on; the next attempt is a minute later."""
    rig = make(slab_bytes=4 * PLACE)
    fill(rig, range(4))
    rig.faults.fails["lay_out"] = errno.ENOSPC
    assert fill(rig, [10]) == [""], "the oldest record makes way in the slab there is"
    stats = rig.disk.stats()
    assert (stats.state, "No space left" in stats.reason) == ("full", True)
    assert fill(rig, [11]) == ["full"]
    assert there(rig, [3])

    rig.disk.maintain()
    assert rig.disk.stats().state == "open", "below 90 % of what it has"
    assert fill(rig, [12]) == [""]
    rig.faults.fails.clear()
    rig.clock.advance(NO_SLAB_MS / 1_000 + 1)
    fill(rig, range(20, 26))
    assert rig.disk.stats().records > 4


def test_a_disk_without_any_room_refuses_and_serves_on(make: MakeRig) -> None:
    """Not one slab could be made."""
    rig = make()
    rig.faults.fails["lay_out"] = errno.ENOSPC

    assert fill(rig, [1, 2]) == ["full", "full"]
    rig.disk.maintain()
    assert rig.disk.stats().state == "full"
    assert rig.found(A, path_of(1)) == []
    rig.faults.fails.clear()
    rig.clock.advance(NO_SLAB_MS / 1_000 + 1)
    rig.disk.maintain()
    assert fill(rig, [1]) == [""]


def test_a_full_disk_under_a_write_fails_that_store(make: MakeRig) -> None:
    """A file system may give less than it laid out."""
    rig = make()
    fill(rig, range(3))
    rig.faults.fails["write"] = errno.ENOSPC

    assert fill(rig, [10]) == ["write_failed"]
    assert rig.disk.stats().state == "full"
    assert there(rig, [2])


def test_a_failed_read_is_a_miss_and_no_damage(make: MakeRig) -> None:
    """The record may be read when the disk is back."""
    rig = make()
    ids = rig.store(A, LONG[:4])
    rig.faults.fails["read"] = errno.EIO
    assert rig.fetch(A, ids) == [None]
    rig.faults.fails.clear()

    assert rig.fetch(A, ids) == [content_of(A, LONG[:4])]
    assert rig.disk.stats().damaged_total == 0


def test_a_failed_wipe_keeps_the_places_dirty(make: MakeRig) -> None:
    """They are wiped at the next attempt."""
    rig = make()
    rig.store(A, LONG)
    rig.faults.fails["erase"] = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        rig.erase(A)
    rig.faults.fails.clear()
    rig.reopen()
    rig.local.wipe()

    data = b"".join(path.read_bytes() for path in rig.folder.glob("*.slab"))
    assert data.count(0) == len(data)


def test_a_wipe_drops_nothing_and_grows_nothing(make: MakeRig) -> None:
    """After each start all free places are wiped; a store meanwhile takes another free one."""
    rig = make(**room_for(8))
    fill(rig, range(4))
    rig.reopen()
    places = rig.disk.slabs.take_dirty()
    assert fill(rig, [10, 11]) == ["", ""]
    assert fill(rig, [12]) == ["full"], "for a moment"
    rig.disk.slabs.wipe(places)
    rig.disk.slabs.put_wiped(places, is_wiped=True)

    assert fill(rig, [12]) == [""]
    assert there(rig, [0, 1, 2, 3, 10, 11, 12]) == [0, 1, 2, 3, 10, 11, 12]
    assert len(list(rig.folder.glob("*.slab"))) == 1


def test_records_of_another_size_age_out(make: MakeRig) -> None:
    """Another model's records keep their room for seven days without use."""
    rig = make(**room_for(8, slab_places=4))
    fill(rig, range(8))
    rig.close()
    small = room_for(8) | {"slot_bytes": SLOT_BYTES, "slab_bytes": 4 * PLACE}
    other = make(**small | {"disk_bytes": small["disk_bytes"] - WIDE})
    assert there(other, [0])
    assert other.fetch(A, other.found(A, path_of(0))) == [None]

    fill(other, range(1_000, 1_090))
    assert not there(other, [0]), "the present size had no place at all"
    assert there(other, [7]), "seven days have not passed"
    other.clock.advance(8 * 86_400.0)
    fill(other, range(3_000, 3_010))
    assert not there(other, [7])


def packed(rig: LocalRig, numbers: Iterable[int], payer: bytes = b"payer") -> list[str]:
    """Store packed prefixes of one run; return the codes."""
    return fill(rig, numbers, B, payer=payer, fidelity="near", slot_bytes=LESS)


def test_packed_records_take_the_room_of_their_size(make: MakeRig) -> None:
    """In slabs of their own, counted by fidelity, also after the store was opened again."""
    rig = make(**room_for(8), other_bytes=(LESS,))
    assert fill(rig, range(3)) == packed(rig, range(3)) == [""] * 3
    small = place_bytes_of(LESS)
    for _ in range(2):
        stats = rig.disk.stats()
        kinds = {one.fidelity: (one.blocks, one.bytes) for one in stats.copies}
        assert kinds == {"exact": (3, 3 * WIDE_PLACE), "near": (3, 3 * small)}
        assert stats.used_bytes == 3 * (WIDE_PLACE + small)
        rig.disk.check()
        rig.reopen()


def test_a_size_without_a_place_gets_the_slab_that_was_used_longest_ago(make: MakeRig) -> None:
    """The first packed record finds the disk full of others; after that each size keeps to its own
    slabs, while the others are used."""
    rig = make(**room_for(8), other_bytes=(LESS,))
    assert fill(rig, range(8)) == [""] * 8
    assert packed(rig, range(2)) == ["", ""]
    rig.disk.check()

    assert not there(rig, [0])
    assert there(rig, [7])
    kept = there(rig, range(8))
    for number in kept:
        assert rig.fetch(A, rig.found(A, path_of(number))) != [None]
    assert packed(rig, range(10, 20)) == [""] * 10
    assert there(rig, range(8)) == kept


def test_a_slab_that_is_colder_than_what_would_go_gives_its_room(make: MakeRig) -> None:
    """Otherwise a format that is used no more would keep its part of the disk for a week. A search
    that found nothing is not repeated at once, since it reads all rows of the other slabs."""
    rig = make(**room_for(8), other_bytes=(LESS,))
    fill(rig, range(8))
    packed(rig, range(2))
    kept = there(rig, range(8))
    for number in kept:
        assert rig.fetch(A, rig.found(A, path_of(number))) != [None]
    rig.clock.advance(PAUSE_MS / 1_000)
    packed(rig, range(10, 12))
    assert there(rig, range(8)) == kept, "used later"
    packed(rig, range(20, 22))
    assert there(rig, range(8)) == kept, "not searched again"
    rig.clock.advance(PAUSE_MS / 1_000)
    packed(rig, range(30, 32))

    assert len(there(rig, range(8))) == len(kept) - 2
    rig.disk.check()


def test_a_slab_with_bytes_inside_a_floor_is_not_taken_for_another_size(make: MakeRig) -> None:
    """Nor one with a promise."""
    rig = make(**room_for(4), other_bytes=(LESS,))
    rig.storage.send(SetStoredQuotas((Quota(floor_blocks=3, payer=b"payer"),)))
    assert fill(rig, range(3)) == [""] * 3
    rig.store(A, path_of(100), promise_s=60.0, payer=b"q")

    assert packed(rig, [0], b"other") == ["full"]
    assert there(rig, range(3)) == [*range(3)]


def test_a_disk_that_was_made_smaller_gives_its_room_back(make: MakeRig) -> None:
    """By whole slabs; those with promises stay until these have ended."""
    rig = make(**room_for(8, slab_places=2))
    fill(rig, range(1, 8))
    rig.store(A, LONG[:4], promise_s=60.0)
    rig.close()
    smaller = make(**room_for(8, slab_places=2) | {"disk_bytes": 5 * WIDE_PLACE})
    for _ in range(4):
        smaller.disk.maintain()

    size = sum(path.stat().st_size for path in smaller.folder.glob("*.slab"))
    assert size == 4 * WIDE_PLACE
    assert smaller.found(A, LONG[:4]) != []
    assert smaller.disk.stats().used_bytes <= 0.95 * 5 * WIDE_PLACE
    smaller.disk.check()


def test_a_smaller_disk_drops_no_more_than_it_must_while_places_are_wiped(make: MakeRig) -> None:
    """A slab with places in other hands goes later; the next one is not emptied instead."""
    rig = make(**room_for(8, slab_places=2))
    ids = [rig.store(A, path_of(number))[0] for number in range(1, 9)]
    rig.disk._drop(ids[1::2])
    wiped = list[Place]()
    while places := rig.disk.slabs.take_dirty():
        wiped += places
    assert len({place.slab for place in wiped}) == 4
    rig.settings.disk_bytes = 7 * WIDE_PLACE
    rig.disk.maintain()
    assert there(rig, (1, 3, 5, 7)) == [1, 3, 5]
    rig.disk.slabs.put_wiped(wiped, is_wiped=True)
    rig.disk.maintain()

    assert len(list(rig.folder.glob("*.slab"))) == 3
    assert there(rig, (1, 3, 5)) == [1, 3, 5]
    rig.disk.check()


def test_a_smaller_disk_keeps_a_slab_above_a_promise(make: MakeRig) -> None:
    """A promised record in another slab hangs on one of its records."""
    rig = make(**room_for(4, slab_places=1))
    rig.store(A, path_of(1))
    (free,) = rig.store(A, path_of(2))
    (top,) = rig.store(A, LONG[:RUN])
    rig.erase(A, tokens=path_of(2))
    below = rig.store(A, LONG[RUN : 2 * RUN], parent=top, above=LONG[:RUN], promise_s=60.0)
    assert free != top
    rig.settings.disk_bytes = 2 * WIDE_PLACE
    rig.disk.maintain()

    assert rig.found(A, LONG[: 2 * RUN]) == [top, *below]


def test_a_slab_with_a_damaged_place_gives_its_room_too(make: MakeRig) -> None:
    """A place out of use would otherwise keep the room of its slab until the next start."""
    rig = make(**room_for(4), other_bytes=(LESS,))
    fill(rig, range(4))
    first, *_ = sorted(rig.folder.glob("*.slab"))
    with first.open("r+b") as file:
        for at in (8_192, WIDE_PLACE + 8_192):
            file.seek(at)
            file.write(b"no bytes of this record")
    for number in (0, 1):
        assert rig.fetch(A, rig.found(A, path_of(number))) == [None]
    rig.disk.check()

    assert packed(rig, [0]) == [""]
    assert not first.exists()
    assert there(rig, [2, 3]) == [2, 3]
    rig.disk.check()


def test_what_is_dropped_ahead_of_need_holds_up_no_look(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be much of it: it is dropped over some seconds."""
    monkeypatch.setattr("engine.storage.space.disk_space.DROP_AHEAD_TURNS", 3)
    rig = make(slab_bytes=64 * PLACE)
    rig.store(A, LONG, promise_s=60.0)  # which keeps the only slab
    fill(rig, range(1_000, 1_020))
    rig.settings.disk_bytes = PLACE
    records = []
    for _ in range(8):
        rig.disk.maintain()
        records.append(rig.disk.stats().records)

    assert records == [22, 19, 16, 13, 10, 7, 5, 5]


def test_files_and_folder_are_the_owners_alone(make: MakeRig) -> None:
    """They say what prompts said."""
    rig = make()
    rig.store(A, LONG, promise_s=1.0)

    modes = {path.name: path.stat().st_mode & 0o777 for path in rig.folder.iterdir()}
    assert set(modes.values()) == {0o600}
    assert len(modes) >= 3


def test_erased_bytes_and_tokens_are_in_no_file(make: MakeRig) -> None:
    """Neither the KV nor the tokens, in no place, page or log."""
    rig = make()
    tokens = (0x5EC2E711, 0x5EC2E712, 0x5EC2E713, 0x5EC2E714)
    kept = (1, 2, 3, 0x0D15EA5E)
    rig.store(b"marked namespace", tokens)
    rig.store(b"marked namespace", tokens, limit_s=1.0)
    rig.store(B, kept)
    markers = [
        content_of(b"marked namespace", tokens)[:64],
        b"marked namespace",
        tokens[2].to_bytes(4, "little"),
    ]

    def holds(marker: bytes) -> bool:
        return any(marker in path.read_bytes() for path in rig.folder.iterdir())

    assert all(map(holds, markers)), "the control: they are there before"
    rig.erase(b"marked namespace")
    assert not any(map(holds, markers))
    assert holds(kept[3].to_bytes(4, "little"))


def test_an_index_of_another_version_is_not_changed(make: MakeRig) -> None:
    """A newer program's store is left alone; the message says the way out."""
    rig = make()
    rig.store(A, LONG)
    rig.disk._index.file.db.execute("pragma user_version=7")
    rig.local.close()
    before = {path.name: path.read_bytes() for path in rig.folder.iterdir()}
    with pytest.raises(IndexUnusable, match=r"version 7; expected 1.*trunkline levels init"):
        rig.open(rig.arena)

    assert {path.name: path.read_bytes() for path in rig.folder.iterdir()} == before


def test_slabs_without_an_index_are_not_overwritten(make: MakeRig) -> None:
    """They can be rebuilt."""
    rig = make()
    rig.store(A, LONG)
    rig.local.close()
    for path in rig.folder.glob("index.db*"):
        path.unlink()
    with pytest.raises(IndexUnusable, match="trunkline levels rebuild"):
        rig.open(rig.arena)

    assert not (rig.folder / "index.db").exists()


def test_a_long_change_ticks(tmp_path: Path) -> None:
    """The heartbeat goes on while a large namespace is erased."""
    ticks: list[int] = []
    with closing(
        RecordIndex(tmp_path / "index.db", may_make=True, tick=lambda: ticks.append(1))
    ) as index:
        with index.file.change():
            scope, payer_id = index.names.scope_for(A), index.names.payer_id(b"p")
            for number in range(1, 8_001):
                run = number.to_bytes(16, "little")
                row = RecordRow(
                    number, scope.scope_id, ROOT, run, payer_id, 1, number, 1, 1, b"", 0, 9, 0
                )
                index.insert(row, scope, 1)
        ticks.clear()
        with index.file.change():
            assert len(index.delete_under(range(1, 8_001))) == 8_000

        assert ticks


def test_bad_commands_are_refused_one_by_one(make: MakeRig) -> None:
    """Names and tokens that no engine sends."""
    rig = make()
    long_name = rig.store_command(b"n" * 2_000, LONG)
    short_run = rig.store_command(A, LONG[:3])
    no_token = rig.store_command(A, (-1, 2**33, 0, 0))

    for command in (long_name, short_run, no_token):
        assert rig.send_store(command).code == "write_failed"
    assert rig.look(A, (-1, 0, 0, 2**40)) == ()
    assert rig.erase(A, tokens=(-1,)).records == 0
    assert rig.disk.stats().records == 0
    assert rig.found(A, LONG) == []
    assert rig.store(A, LONG[:4], parent=ROOT)
