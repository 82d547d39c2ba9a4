"""A sealed store: what lies in its folder shows nothing, opens only with its key, and is shredded
by destroying it."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import apsw
import pytest
import xxhash

from engine.storage.client import StorageClient
from engine.storage.index.index_file import INDEX_NAME, IndexUnusable
from engine.storage.rebuild import clear_folder, rebuild_index, rewrap_keys, verify_store
from engine.storage.sealing.master_key import KEY_BYTES, MasterKey
from engine.storage.sealing.seals import KEYS_NAME, SealRefused
from engine.storage.sealing.unlocking import SealSettings
from engine.storage.slabs.record import HEADER_BYTES, place_bytes_of
from tests.fakes import FakeClock
from tests.unit.engine.storage.local_storage import LocalRig
from tests.unit.engine.storage.storage_rig import RUN, SLOT_BYTES, A, B, DiskRig, content_of

LONG = tuple(range(70_000, 70_000 + 5 * RUN))
MASTER, OTHER = MasterKey(b"1" * KEY_BYTES), MasterKey(b"2" * KEY_BYTES)
KEY = SealSettings(key_env="SEAL")
ENVIRONMENT = {"SEAL": MASTER.secret.hex()}
PLACE = place_bytes_of(SLOT_BYTES)
MakeRig = Callable[..., LocalRig]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRig]:
    """Return a function that opens a store; it is closed at the end."""
    rigs: list[LocalRig] = []

    def open_rig(name: str = "levels", master: MasterKey | None = MASTER) -> LocalRig:
        rigs.append(LocalRig(tmp_path / name, master=master, slab_bytes=24 * PLACE))
        return rigs[-1]

    yield open_rig
    for rig in rigs:
        rig.close()


def bytes_at_rest(folder: Path) -> bytes:
    """Return all bytes of all files of a folder but its lock, which has the id of a process."""
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "lock")


def what_shows(folder: Path) -> set[str]:
    """Return what of the stored prefix can be read in a folder."""
    data, shown = bytes_at_rest(folder), set[str]()
    for at in range(0, len(LONG), RUN):
        content = content_of(A, LONG[: at + RUN])
        if any(content[i : i + 16] in data for i in range(0, SLOT_BYTES, 512)):
            shown.add("kv")
        if xxhash.xxh3_128_digest(content) in data:
            shown.add("digest")
        run = LONG[at : at + RUN]
        # Pairs: four bytes of a single token may occur in a megabyte of ciphertext by chance.
        if any(struct.pack("<2I", *pair) in data for pair in pairwise(run)):
            shown.add("tokens")
    return shown


def test_the_bytes_on_disk_show_neither_kv_nor_tokens(make: MakeRig) -> None:
    """In no file, while it is open and after; a plain store shows all, so the search finds it."""
    sealed, plain = make("sealed"), make("plain", master=None)
    for rig in (sealed, plain):
        rig.store(A, LONG, lease_ids=("one",), promise_s=50.0)

    assert what_shows(sealed.folder) == set()
    assert what_shows(plain.folder) == {"kv", "digest", "tokens"}
    sealed.local.close()
    assert what_shows(sealed.folder) == set()
    sealed.start()
    assert sealed.fetch(A, sealed.found(A, LONG)[4:]) == [content_of(A, LONG)]


def test_a_reopened_store_knows_what_it_knew(make: MakeRig) -> None:
    """Under another salt; old records open all the same."""
    rig = make()
    ids = rig.store(A, LONG, limit_s=100.0, lease_ids=("one",))
    rig.reopen()
    more = rig.store(A, (1, 2, 3, 4), parent=ids[4], above=LONG)
    rig.reopen()

    assert rig.found(A, [*LONG, 1, 2, 3, 4]) == [*ids, *more]
    assert rig.fetch(A, [ids[0], more[0]]) == [
        content_of(A, LONG[:RUN]),
        content_of(A, [*LONG, 1, 2, 3, 4]),
    ]
    rig.disk.check()


def forge(data: bytearray, rng: random.Random) -> None:
    """Change a bit of each payload, and make the envelope's digest right."""
    for at in range(0, len(data), PLACE):
        data[at + HEADER_BYTES + rng.randrange(SLOT_BYTES)] ^= 1
        check = xxhash.xxh3_64_intdigest(bytes(data[at : at + HEADER_BYTES - 8]))
        data[at + HEADER_BYTES - 8 : at + HEADER_BYTES] = struct.pack("<Q", check)


def swap(data: bytearray, rng: random.Random) -> None:
    """Every record lies in the place of another one: half of them of another namespace."""
    data[:] = data[PLACE:] + data[:PLACE]


@pytest.mark.parametrize("change", [forge, swap])
def test_what_an_attacker_writes_is_never_served(
    make: MakeRig, change: Callable[[bytearray, random.Random], None]
) -> None:
    """A disk that lies costs hits."""
    rig = make()
    for number in range(24):
        rig.store((A, B)[number % 2], (number, 1, 2, 3))
    rig.local.close()
    (slab,) = rig.folder.glob("*.slab")
    data = bytearray(slab.read_bytes())
    change(data, random.Random(1))
    slab.write_bytes(data)
    rig.start()

    for number in range(24):
        name = (A, B)[number % 2]
        assert rig.fetch(name, rig.found(name, (number, 1, 2, 3))) == [None]
    assert rig.disk.stats().damaged_total == 24


def test_a_wrong_key_serves_nothing_and_destroys_nothing(make: MakeRig) -> None:
    """With the right one everything is there again."""
    rig = make()
    ids = rig.store(A, LONG)
    rig.local.close()
    before = bytes_at_rest(rig.folder)
    for master, message in ((OTHER, "does not open"), (None, "are sealed")):
        rig.master = master
        with pytest.raises((SealRefused, IndexUnusable), match=message):
            rig.start()
        assert bytes_at_rest(rig.folder) == before
    rig.master = MASTER
    rig.start()

    assert rig.found(A, LONG) == list(ids)


def test_plain_copies_are_not_taken_for_sealed_ones(make: MakeRig) -> None:
    """Who switches sealing on wants nothing at rest that is plain."""
    rig = make(master=None)
    rig.store(A, LONG)
    rig.local.close()
    rig.master = MASTER
    with pytest.raises(SealRefused, match="missing"):
        rig.start()
    shutil.rmtree(rig.folder)
    rig.folder.mkdir(mode=0o700)
    rig.start()

    assert rig.found(A, LONG) == []


def test_an_erased_namespace_is_shredded_in_every_backup(make: MakeRig, tmp_path: Path) -> None:
    """Index and slabs of before do not bring it back; others do not notice."""
    rig = make()
    rig.store(A, LONG)
    ids = rig.store(B, LONG)
    rig.local.close()
    shutil.copytree(rig.folder, tmp_path / "backup")
    rig.start()
    receipt = rig.erase(A)
    rig.local.close()
    for path in (tmp_path / "backup").iterdir():
        if not path.name.startswith(KEYS_NAME):
            shutil.copy(path, rig.folder / path.name)
    rig.start()

    assert (receipt.is_shredded, receipt.records) == (True, 5)
    assert rig.found(A, LONG) == []
    assert rig.found(B, LONG) == list(ids)
    assert rig.fetch(B, ids[4:]) == [content_of(B, LONG)]
    rig.disk.check()


def test_what_is_stored_after_an_erasure_has_a_new_key(make: MakeRig) -> None:
    """The namespace lives on."""
    rig = make()
    rig.store(A, LONG)
    rig.erase(A)
    ids = rig.store(A, LONG)
    rig.reopen()

    assert rig.fetch(A, ids[4:]) == [content_of(A, LONG)]


def test_the_erasure_of_a_part_shreds_nothing(make: MakeRig) -> None:
    """A lease or a prefix: its rows are gone and its bytes wiped, the key serves the rest."""
    rig = make()
    ids = rig.store(A, LONG)
    one = rig.erase(A, tokens=LONG[: 3 * RUN])
    other = rig.erase(A, lease_id="none")

    assert (one.is_shredded, one.records, other.is_shredded) == (False, 3, False)
    assert rig.found(A, LONG) == list(ids[:2])


def test_a_lost_index_is_rebuilt_with_the_keys(make: MakeRig) -> None:
    """Without them nothing is touched."""
    rig = make()
    ids = rig.store(A, LONG, limit_s=100.0)
    rig.store(B, LONG)
    rig.local.close()
    before = bytes_at_rest(rig.folder)
    for seal in (None, SealSettings(key_env="NONE")):
        with pytest.raises(Exception, match=r"engine\.levels|no variable NONE"):
            rebuild_index(rig.folder, 0, seal=seal, environment=ENVIRONMENT)
    assert bytes_at_rest(rig.folder) == before
    for path in rig.folder.glob(f"{INDEX_NAME}*"):
        path.unlink()
    now_ms = int(rig.clock() * 1_000)
    outcome = rebuild_index(rig.folder, now_ms, seal=KEY, environment=ENVIRONMENT)
    rig.start()

    assert (outcome.records, outcome.left_out) == (10, 0)
    assert rig.found(A, LONG) == list(ids)
    assert rig.fetch(A, ids[4:]) == [content_of(A, LONG)]
    assert what_shows(rig.folder) == set()


def test_a_verification_reads_sealed_records(make: MakeRig) -> None:
    """And strikes those that do not open."""
    rig = make()
    for number in range(6):
        rig.store(A, (number, 1, 2, 3))
    rig.local.close()
    (slab,) = rig.folder.glob("*.slab")
    with slab.open("r+b") as file:
        file.seek(2 * PLACE + HEADER_BYTES)
        file.write(b"other bytes")
    outcome = verify_store(rig.folder, seal=KEY, environment=ENVIRONMENT)
    rig.start()

    assert (outcome.records, outcome.damaged) == (6, 1)
    assert [bool(rig.found(A, (number, 1, 2, 3))) for number in range(4)] == [1, 1, 0, 1]


def test_a_master_key_is_replaced_without_reading_a_record(make: MakeRig, tmp_path: Path) -> None:
    """The former one opens nothing after it."""
    rig = make()
    ids = rig.store(A, LONG)
    rig.local.close()
    (slab,) = rig.folder.glob("*.slab")
    before = slab.read_bytes()
    former = tmp_path / "former"
    former.write_text(MASTER.secret.hex())
    former.chmod(0o400)
    seal = SealSettings(key_env="SEAL", key_file_before=str(former))
    environment = {"SEAL": OTHER.secret.hex()}

    assert rewrap_keys(rig.folder, seal, environment) == 1
    assert rewrap_keys(rig.folder, seal, environment) == 0
    assert slab.read_bytes() == before
    with pytest.raises(SealRefused, match="does not open"):
        rig.start()
    rig.master = OTHER
    rig.start()
    assert rig.fetch(A, ids[4:]) == [content_of(A, LONG)]


def test_a_cleared_folder_keeps_no_key(make: MakeRig) -> None:
    """What a backup has of it stays closed."""
    rig = make()
    rig.store(A, LONG)
    rig.local.close()
    clear_folder(rig.folder)

    assert sorted(path.name for path in rig.folder.iterdir()) == ["lock"]
    rig.start()


def test_the_process_is_off_with_a_reason_while_the_key_is_wrong(tmp_path: Path) -> None:
    """And serves with the right one; its environment has the key."""
    file = tmp_path / "key"
    file.write_text(MASTER.secret.hex())
    file.chmod(0o400)
    clock = FakeClock(1_000.0)
    with closing(DiskRig(tmp_path / "levels", clock, seal=SealSettings(str(file)))) as rig:
        ids = rig.store(A, LONG)
        assert rig.await_stats().state == "open"
    file.chmod(0o600)
    file.write_text(OTHER.secret.hex())
    with closing(DiskRig(tmp_path / "levels", clock, seal=SealSettings(str(file)))) as rig:
        off = rig.await_state("off")
        assert f"expected {MASTER.fingerprint}" in off.reason
        assert rig.found(A, LONG) == []
        assert rig.erase(A).code == "closed"
    file.write_text(MASTER.secret.hex())
    with closing(DiskRig(tmp_path / "levels", clock, seal=SealSettings(str(file)))) as rig:
        assert isinstance(rig.client, StorageClient)
        assert rig.found(A, LONG) == list(ids), "an erasure that failed has erased nothing"
        assert rig.erase(A).is_shredded


def test_the_key_goes_with_a_namespace_whose_records_went_before(make: MakeRig) -> None:
    """They went by an erasure of their lease; copies in backups still open with it until then."""
    rig = make()
    rig.store(A, LONG, lease_ids=("lease",))
    assert rig.erase(A, lease_id="lease").records == 5
    key = b"select count(*) from keys"
    receipt = rig.erase(A)
    rig.local.close()
    with closing(apsw.Connection(str(rig.folder / KEYS_NAME))) as db:
        ((keys,),) = db.execute(key.decode()).fetchall()
    rig.start()

    assert (receipt.is_shredded, keys) == (True, 0)
