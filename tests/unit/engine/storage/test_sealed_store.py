"""A sealed store: what lies in its folder shows nothing, opens only with its key, and is shredded
by destroying it."""

from __future__ import annotations

import shutil
import struct
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path

import apsw
import pytest
import xxhash

from engine.storage.index.index_file import IndexUnusable
from engine.storage.rebuild import rebuild_index, rewrap_keys
from engine.storage.sealing.master_key import KEY_BYTES, MasterKey
from engine.storage.sealing.seals import KEYS_NAME, SealRefused
from engine.storage.sealing.unlocking import SealSettings
from tests.fakes import FakeClock
from tests.unit.engine.storage.local_storage import MakeRig, write_key
from tests.unit.engine.storage.storage_rig import RUN, SLOT_BYTES, A, B, DiskRig, content_of

LONG = tuple(range(70_000, 70_000 + 5 * RUN))
MASTER, OTHER = MasterKey(b"1" * KEY_BYTES), MasterKey(b"2" * KEY_BYTES)
KEY = SealSettings(key_env="SEAL")
ENVIRONMENT = {"SEAL": MASTER.secret.hex()}


@pytest.fixture
def make(make: MakeRig) -> MakeRig:
    """Return a function that opens a sealed store."""
    return partial(make, master=MASTER)


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


def test_nothing_is_rebuilt_without_the_keys(make: MakeRig) -> None:
    """Nor touched; what is rebuilt with them shows as little as before."""
    rig = make()
    rig.store(A, LONG)
    rig.local.close()
    before = bytes_at_rest(rig.folder)
    for seal in (None, SealSettings(key_env="NONE")):
        with pytest.raises(Exception, match=r"engine\.levels|no variable NONE"):
            rebuild_index(rig.folder, 0, seal=seal, environment=ENVIRONMENT)
    assert bytes_at_rest(rig.folder) == before
    rebuild_index(rig.folder, 0, seal=KEY, environment=ENVIRONMENT)
    rig.start()

    assert len(rig.found(A, LONG)) == 5
    assert what_shows(rig.folder) == set()


def test_a_master_key_is_replaced_without_reading_a_record(make: MakeRig, tmp_path: Path) -> None:
    """The former one opens nothing after it."""
    rig = make()
    ids = rig.store(A, LONG)
    rig.local.close()
    (slab,) = rig.folder.glob("*.slab")
    records = slab.read_bytes()
    former = write_key(tmp_path / "former", MASTER).key_file
    third = write_key(tmp_path / "third", MasterKey(b"3" * KEY_BYTES)).key_file
    environment = {"SEAL": OTHER.secret.hex()}
    wrong = SealSettings(key_env="SEAL", key_file_before=third)
    before = bytes_at_rest(rig.folder)
    with pytest.raises(SealRefused, match=f"expected {MASTER.fingerprint}. Nothing was changed"):
        rewrap_keys(rig.folder, wrong, environment)
    assert bytes_at_rest(rig.folder) == before

    seal = SealSettings(key_env="SEAL", key_file_before=former)
    assert rewrap_keys(rig.folder, seal, environment) == 1
    assert rewrap_keys(rig.folder, seal, environment) == 0
    assert slab.read_bytes() == records
    with pytest.raises(SealRefused, match="does not open"):
        rig.start()
    rig.master = OTHER
    rig.start()
    assert rig.fetch(A, ids[4:]) == [content_of(A, LONG)]


def test_the_process_is_off_with_a_reason_while_the_key_is_wrong(tmp_path: Path) -> None:
    """And serves with the right one; its environment has the key."""
    clock = FakeClock(1_000.0)

    def process_with(master: MasterKey) -> closing[DiskRig]:
        seal = write_key(tmp_path / "key", master)
        return closing(DiskRig(tmp_path / "levels", clock, seal=seal))

    with process_with(MASTER) as rig:
        ids = rig.store(A, LONG)
        assert rig.await_stats().state == "open"
    with process_with(OTHER) as rig:
        off = rig.await_state("off")
        assert f"expected {MASTER.fingerprint}" in off.reason
        assert rig.found(A, LONG) == []
        assert rig.erase(A).code == "closed"
    with process_with(MASTER) as rig:
        assert rig.found(A, LONG) == list(ids), "an erasure that failed has erased nothing"
        assert rig.erase(A).is_shredded


def test_the_key_goes_with_a_namespace_whose_records_went_before(make: MakeRig) -> None:
    """They went by an erasure of their lease; copies in backups still open with it until then."""
    rig = make()
    rig.store(A, LONG, lease_ids=("lease",))
    assert rig.erase(A, lease_id="lease").records == 5
    receipt = rig.erase(A)
    rig.local.close()
    with closing(apsw.Connection(str(rig.folder / KEYS_NAME))) as db:
        ((keys,),) = db.execute("select count(*) from keys").fetchall()
    rig.start()

    assert (receipt.is_shredded, keys) == (True, 0)
