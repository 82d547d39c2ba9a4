"""No wrong byte is served from a damaged disk; a lost index can be rebuilt."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import apsw
import pytest
import xxhash
from msgspec.structs import replace

from engine.moves import RecordId
from engine.storage.folder import FolderLock, FolderRefused
from engine.storage.index.index import RecordIndex, RecordRow
from engine.storage.index.index_file import INDEX_NAME, IndexUnusable
from engine.storage.index.namespace_rows import Scope
from engine.storage.rebuild import (
    Progress,
    RebuiltIndex,
    VerifiedStore,
    clear_folder,
    rebuild_index,
    verify_store,
)
from engine.storage.sealing.master_key import KEY_BYTES, MasterKey
from engine.storage.sealing.unlocking import SealSettings
from engine.storage.slabs.record import (
    HEADER_BYTES,
    DamagedRecord,
    decode_header,
    encode_header,
    place_bytes_of,
)
from tests.unit.engine.storage.local_storage import LocalRig, MakeRig
from tests.unit.engine.storage.storage_rig import (
    HEADER,
    LONG,
    RUN,
    SLOT_BYTES,
    A,
    B,
    content_of,
    path_of,
)

PLACE = place_bytes_of(SLOT_BYTES)
RECORDS = 24
MASTER = MasterKey(b"1" * KEY_BYTES)
ENVIRONMENT = {"SEAL": MASTER.secret.hex()}
Damage = Callable[[bytearray, random.Random], None]


@pytest.fixture(params=["plain", "sealed"])
def rig(make: MakeRig, request: pytest.FixtureRequest) -> LocalRig:
    """Return a store with one slab of `RECORDS` records, each a prefix of its own."""
    master = MASTER if request.param == "sealed" else None
    return make(slab_bytes=RECORDS * PLACE, master=master)


def fill(rig: LocalRig, count: int = RECORDS) -> dict[int, RecordId]:
    """Store records of two namespaces in turn; return their ids by number."""
    return {number: rig.store(owner_of(number), path_of(number))[0] for number in range(count)}


def owner_of(number: int) -> bytes:
    """Return the namespace of a record."""
    return (A, B)[number % 2]


def rebuild(rig: LocalRig) -> RebuiltIndex:
    """Rebuild the index of a closed store, with its keys if it is sealed."""
    seal = None if rig.master is None else SealSettings(key_env="SEAL")
    return rebuild_index(rig.folder, int(rig.clock() * 1_000), seal=seal, environment=ENVIRONMENT)


def verify(rig: LocalRig, progress: Progress = lambda done, total: None) -> VerifiedStore:
    """Verify a closed store, with its keys if it is sealed."""
    seal = None if rig.master is None else SealSettings(key_env="SEAL")
    return verify_store(rig.folder, progress, seal, ENVIRONMENT)


def slab_of(rig: LocalRig) -> Path:
    """Return the only slab."""
    (path,) = rig.folder.glob("*.slab")
    return path


def damage(rig: LocalRig, change: Damage, seed: int) -> None:
    """Change the slab while the store is closed."""
    rig.local.close()
    data = bytearray(slab_of(rig).read_bytes())
    change(data, random.Random(seed))
    slab_of(rig).write_bytes(data)
    rig.start()


def served(rig: LocalRig) -> dict[int, bytes]:
    """Return the records that come back: each must be exact."""
    found = {}
    for number in range(RECORDS):
        ids = rig.found(owner_of(number), path_of(number))
        for data in rig.fetch(owner_of(number), ids):
            if data is not None:
                assert data == content_of(owner_of(number), path_of(number)), number
                found[number] = data
    return found


def flip_a_bit_of_each(data: bytearray, rng: random.Random) -> None:
    """One bit somewhere in each place."""
    for at in range(0, len(data), PLACE):
        bit = rng.randrange(8 * PLACE)
        data[at + bit // 8] ^= 1 << bit % 8


def flip_a_header_bit_of_each(data: bytearray, rng: random.Random) -> None:
    """One bit in what each header says."""
    for at in range(0, len(data), PLACE):
        bit = rng.randrange(8 * 200)
        data[at + bit // 8] ^= 1 << bit % 8


def flip_at(*places: int) -> Damage:
    """One bit at each of these bytes."""

    def flip(data: bytearray, rng: random.Random) -> None:
        for at in places:
            data[at] ^= 1

    return flip


def forge_payloads(data: bytearray, rng: random.Random) -> None:
    """One bit of each payload, under a header whose own digest is right."""
    for at in range(0, len(data), PLACE):
        data[at + HEADER_BYTES + rng.randrange(SLOT_BYTES)] ^= 1
        check = xxhash.xxh3_64_intdigest(bytes(data[at : at + HEADER_BYTES - 8]))
        data[at + HEADER_BYTES - 8 : at + HEADER_BYTES] = struct.pack("<Q", check)


def swap_places(data: bytearray, rng: random.Random) -> None:
    """Every record lies in the place of another namespace's."""
    data[:] = data[PLACE:] + data[:PLACE]


def swap_payloads(data: bytearray, rng: random.Random) -> None:
    """Every header is in its place, with the bytes of another one."""
    payloads = [data[at + HEADER_BYTES : at + PLACE] for at in range(0, len(data), PLACE)]
    for number in range(len(payloads)):
        at = number * PLACE + HEADER_BYTES
        data[at : at + len(payloads[0])] = payloads[number - 1]


def forge_headers(data: bytearray, rng: random.Random) -> None:
    """A sound header of another record, whose digest is right; in a sealed store, a plain one."""
    for at in range(0, len(data), PLACE):
        try:
            header = decode_header(bytes(data[at : at + HEADER_BYTES]))
        except DamagedRecord:
            header = HEADER
        forged = replace(header, record_id=header.record_id + 1)
        data[at : at + HEADER_BYTES] = encode_header(forged)


def zero(data: bytearray, rng: random.Random) -> None:
    """The disk forgot all of it."""
    data[:] = bytes(len(data))


@pytest.mark.parametrize(
    "change",
    [
        flip_a_bit_of_each,
        flip_a_header_bit_of_each,
        swap_places,
        swap_payloads,
        forge_payloads,
        forge_headers,
        zero,
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_damage_is_found_before_a_byte_is_served(rig: LocalRig, change: Damage, seed: int) -> None:
    """Each damaged record is a miss, counted once and struck from the index."""
    fill(rig)
    damage(rig, change, seed)

    assert served(rig) == {}
    assert rig.disk.stats().damaged_total == RECORDS
    assert rig.disk.stats().records == 0


@pytest.mark.parametrize("bit", range(16))
def test_each_bit_of_a_number_counts(rig: LocalRig, bit: int) -> None:
    """Of a number in bf16, the last bit as well as the sign."""
    fill(rig, 2)

    def flip(data: bytearray, rng: random.Random) -> None:
        data[HEADER_BYTES + 2 * rng.randrange(SLOT_BYTES // 2) + bit // 8] ^= 1 << bit % 8

    damage(rig, flip, bit)

    assert served(rig).keys() == {1}


def test_a_damaged_record_takes_what_hangs_on_it(rig: LocalRig) -> None:
    """A prefix without a run is none."""
    ids = rig.store(A, LONG)
    damage(rig, flip_at(PLACE + HEADER_BYTES), 0)

    assert rig.fetch(A, [ids[1]]) == [None]
    assert rig.found(A, LONG) == [ids[0]]


def test_a_damaged_place_is_not_used_again(rig: LocalRig) -> None:
    """It returned other bytes than it was given."""
    fill(rig, 1)
    damage(rig, flip_a_bit_of_each, 1)
    served(rig)
    fill(rig)

    assert len(list(rig.folder.glob("*.slab"))) == 2


@pytest.mark.parametrize("length", [0, 100, PLACE, 5 * PLACE + 17])
def test_a_truncated_slab_loses_what_it_lost(rig: LocalRig, length: int) -> None:
    """Rows beyond its end are dropped when it is opened."""
    fill(rig)
    rig.local.close()
    with slab_of(rig).open("r+b") as file:
        file.truncate(length)
    rig.start()

    assert len(served(rig)) == length // PLACE
    assert rig.disk.stats().records == length // PLACE


def test_an_index_older_than_its_slabs_serves_nothing_wrong(rig: LocalRig) -> None:
    """A restored backup: each place that was written anew contradicts its row."""
    fill(rig, 4)
    rig.local.close()
    shutil.copy(rig.folder / INDEX_NAME, rig.folder / "old")
    rig.start()
    for number in range(4):
        rig.erase(owner_of(number), tokens=path_of(number))
        rig.store(B, path_of(number))
    rig.local.close()
    shutil.move(rig.folder / "old", rig.folder / INDEX_NAME)
    rig.start()

    assert served(rig) == {}
    assert rig.disk.stats().damaged_total == 4


def test_a_lost_index_is_rebuilt_from_the_slabs(rig: LocalRig) -> None:
    """With parents, payers, limits and promises; leases are gone."""
    ids = rig.store(A, LONG, limit_s=100.0, promise_s=50.0, lease_ids=("one",))
    rig.store(B, path_of(1), limit_s=1.0)
    rig.store(B, path_of(2), payer=b"other")
    rig.local.close()
    for path in rig.folder.glob(f"{INDEX_NAME}*"):
        path.unlink()
    rig.clock.advance(10.0)
    outcome = rebuild(rig)
    rig.start()

    assert (outcome.records, outcome.left_out) == (6, 1)
    assert rig.found(A, LONG) == list(ids)
    assert (rig.look(A, LONG)[0].limit_s, rig.look(A, LONG)[0].promise_s) == (90.0, 40.0)
    assert rig.fetch(A, ids[4:]) == [content_of(A, LONG)]
    assert {payer.payer for payer in rig.disk.stats().payers} == {b"payer", b"other"}
    assert rig.erase(A, lease_id="one").records == 0
    assert min(rig.store(B, path_of(3))) > max(ids)


def test_a_rebuild_brings_back_nothing_that_was_erased(rig: LocalRig) -> None:
    """Erased places hold zeros, and a run that was stored anew counts once."""
    rig.store(A, LONG)
    rig.erase(A)
    (again,) = rig.store(A, LONG[:RUN])
    rig.local.close()
    outcome = rebuild(rig)
    rig.start()

    assert outcome.records == 1
    assert rig.found(A, LONG) == [again]


def test_a_rebuild_leaves_damage_and_orphans_out(rig: LocalRig) -> None:
    """A header that is unsound, and what hangs on its record."""
    rig.store(A, LONG)
    damage(rig, flip_at(PLACE + 20), 0)
    rig.local.close()

    assert rebuild(rig).records == 1
    rig.start()


def test_a_rebuild_that_ends_early_leaves_no_part_of_an_index(
    rig: LocalRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server would take it for all there is, and wipe the places of the rest."""
    fill(rig)
    rig.local.close()
    for path in rig.folder.glob(f"{INDEX_NAME}*"):
        path.unlink()
    insert = RecordIndex.insert

    def fail_late(self: RecordIndex, row: RecordRow, scope: Scope, now_ms: int) -> None:
        if row.record_id > RECORDS // 2:
            raise apsw.FullError("planted")
        insert(self, row, scope, now_ms)

    monkeypatch.setattr("engine.storage.rebuild.REBUILD_BATCH", 4)
    with monkeypatch.context() as patch:
        patch.setattr(RecordIndex, "insert", fail_late)
        with pytest.raises(apsw.FullError):
            rebuild(rig)
    with pytest.raises(IndexUnusable, match="trunkline levels rebuild"):
        rig.start()
    assert rebuild(rig).records == RECORDS
    rig.start()

    assert len(served(rig)) == RECORDS
    assert {path.name for path in rig.folder.glob("*.rebuilt*")} == set()


def test_a_verification_reads_everything_and_strikes_damage(rig: LocalRig) -> None:
    """And says how much that was."""
    fill(rig)
    damage(rig, flip_at(*(number * PLACE + HEADER_BYTES + 100 for number in (3, 7))), 0)
    rig.local.close()
    told: list[tuple[int, int]] = []
    outcome = verify(rig, lambda done, total: told.append((done, total)))
    rig.start()

    assert (outcome.records, outcome.damaged) == (RECORDS, 2)
    assert told[-1] == (RECORDS, RECORDS)
    assert served(rig).keys() == set(range(RECORDS)) - {3, 7}


def test_a_verification_strikes_a_record_that_contradicts_its_row(rig: LocalRig) -> None:
    """In what a fetch compares, the fidelity too."""
    fill(rig, 2)
    rig.local.close()
    with closing(apsw.Connection(str(rig.folder / INDEX_NAME))) as index:
        index.execute("update records set fidelity=1 where rec_id=1")
    outcome = verify(rig)
    rig.start()

    assert (outcome.records, outcome.damaged) == (2, 1)
    assert served(rig).keys() == {1}


def test_a_cleared_folder_begins_anew(rig: LocalRig) -> None:
    """What is not the store's stays."""
    fill(rig)
    rig.local.close()
    (rig.folder / "notes.txt").write_text("mine")

    assert clear_folder(rig.folder) > RECORDS * PLACE
    assert sorted(path.name for path in rig.folder.iterdir()) == ["lock", "notes.txt"], "no key"
    rig.start()
    assert rig.disk.stats().records == 0


def test_nothing_is_done_to_the_store_of_a_running_server(rig: LocalRig) -> None:
    """Each command needs the folder for itself."""
    lock = FolderLock(rig.folder)
    for work in (clear_folder, verify_store, lambda folder: rebuild_index(folder, 0)):
        with pytest.raises(FolderRefused, match="in use by process"):
            work(rig.folder)
    lock.close()
    with pytest.raises(FolderRefused, match="does not exist"):
        clear_folder(rig.folder / "nothing")


def test_a_file_that_is_no_index_is_refused_and_kept(rig: LocalRig) -> None:
    """It may be someone's."""
    rig.local.close()
    path = rig.folder / INDEX_NAME
    path.write_bytes(random.Random(1).randbytes(20_000))
    with pytest.raises(apsw.NotADBError):
        rig.open(rig.arena)

    assert path.read_bytes() == random.Random(1).randbytes(20_000)
    path.unlink()
    rig.start()


def test_a_header_says_what_it_was_given() -> None:
    """To the byte, in 4,096 of them."""
    data = encode_header(HEADER)

    assert len(data) == HEADER_BYTES
    assert decode_header(data) == HEADER


def test_no_bytes_make_the_parser_fail_otherwise() -> None:
    """Lengths are read with bounds; a seeded search over files with right digests."""
    rng = random.Random(7)
    good = encode_header(HEADER)
    for _ in range(3_000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(8, 160)
            data[at] = rng.choice((0, 1, 17, 0x7F, 0xFF))
        body = bytes(data[:-8])
        data[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
        try:
            header = decode_header(bytes(data))
        except DamagedRecord:
            continue
        assert len(header.run) <= 1_024
        assert header.parent < header.record_id
    for size in (0, 8, 4_095):
        with pytest.raises(DamagedRecord):
            decode_header(good[:size])


def test_names_that_do_not_fit_a_header_are_refused() -> None:
    """The store checks before; this is the last border."""
    with pytest.raises(ValueError, match="expected at most 1024 bytes"):
        encode_header(replace(HEADER, namespace=b"n" * 1_025))
