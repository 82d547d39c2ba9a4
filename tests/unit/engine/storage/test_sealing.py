"""Seals alone: what opens is what was sealed, and no nonce is used twice under one key."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import pytest
import xxhash
from msgspec.structs import replace

from engine.storage.sealing.data_seal import DataSeal
from engine.storage.sealing.key_ring import KeyRing
from engine.storage.sealing.master_key import (
    KEY_BYTES,
    MasterKey,
    MasterKeyRefused,
    make_key_file,
    read_key,
    read_key_file,
)
from engine.storage.sealing.seals import KEYS_NAME, SealRefused
from engine.storage.sealing.unlocking import SealSettings, unlock
from engine.storage.slabs.record import (
    HEADER_BYTES,
    NAME_BYTES_MAX,
    RUN_TOKENS_MAX,
    DamagedRecord,
    decode_header,
    encode_header,
    pack_run,
)
from tests.tables import each_row
from tests.unit.engine.storage.storage_rig import HEADER, A, B

PAYLOAD = random.Random(3).randbytes(5_000)
FIRST = MasterKey(b"1" * KEY_BYTES)


def header_of(record_id: int = 9, names: int = 20, tokens: int = 4) -> bytes:
    """Return a plain header."""
    return encode_header(
        replace(
            HEADER,
            record_id=record_id,
            namespace=b"n" * names,
            payer=b"p" * names,
            run=pack_run(range(tokens)),
            payload_bytes=len(PAYLOAD),
        )
    )


def seal() -> DataSeal:
    """Return a seal with a key of its own."""
    return DataSeal(b"i" * 16, b"k" * 32)


def sealed_with(one: DataSeal, header: bytes | None = None) -> bytearray:
    """Return the bytes of a sealed record, as they lie on disk."""
    parts = one.seal(header_of() if header is None else header, memoryview(PAYLOAD))
    return bytearray(b"".join(parts))


def opened(one: DataSeal, record: bytes | bytearray) -> tuple[bytes, bytes]:
    """Return header and payload of a sealed record."""
    header, payload = one.open(memoryview(record), len(PAYLOAD))
    return header, bytes(payload)


def correct(record: bytearray) -> None:
    """Make the envelope's digest right, as an attacker who changes a record would."""
    check = xxhash.xxh3_64_intdigest(bytes(record[: HEADER_BYTES - 8]))
    record[HEADER_BYTES - 8 : HEADER_BYTES] = struct.pack("<Q", check)


@each_row("names", [0, 20, NAME_BYTES_MAX])
@each_row("tokens", [1, RUN_TOKENS_MAX])
def test_a_record_comes_back_to_the_byte_and_takes_no_more_room(names: int, tokens: int) -> None:
    """The longest names and the longest run have their place too; another object opens it."""
    header = header_of(names=names, tokens=tokens)
    record = sealed_with(seal(), header)

    assert len(record) == HEADER_BYTES + len(PAYLOAD)
    assert opened(seal(), record) == (header, PAYLOAD)
    assert seal().open_header(memoryview(record)[:HEADER_BYTES]) == header


def test_a_sealed_record_shows_nothing_of_what_it_holds() -> None:
    """Neither its header's words nor its payload, and no two seals of it look alike."""
    one = seal()
    records = [sealed_with(one), sealed_with(one), sealed_with(seal())]

    for record in records:
        assert b"n" * 8 not in record
        assert pack_run(range(4)) not in record
        assert PAYLOAD[:16] not in record
    assert len({bytes(record[HEADER_BYTES:]) for record in records}) == 3


def test_no_changed_bit_opens_even_with_a_right_digest() -> None:
    """An attacker who writes to the disk can compute xxh3, but no tag."""
    rng = random.Random(5)
    one, good = seal(), sealed_with(seal())
    places = [rng.randrange(8, 300) for _ in range(200)]
    places += [HEADER_BYTES + rng.randrange(len(PAYLOAD)) for _ in range(200)]
    for at in places:
        record = bytearray(good)
        record[at] ^= 1 << rng.randrange(8)
        correct(record)
        try:
            header, payload = opened(one, record)
        except DamagedRecord:
            continue
        assert at < HEADER_BYTES, "a changed payload never opens"
        assert (decode_header(header), payload) == (decode_header(header_of()), PAYLOAD), (
            "only the zeros behind the tags may change, which say nothing"
        )


def test_parts_of_two_records_do_not_open_together() -> None:
    """Under one key: a payload belongs to the header with which it was sealed."""
    one = seal()
    first, second = sealed_with(one, header_of(9)), sealed_with(one, header_of(10))
    mixed = first[:HEADER_BYTES] + second[HEADER_BYTES:]

    with pytest.raises(DamagedRecord, match="payload's seal is broken"):
        opened(one, mixed)
    with pytest.raises(DamagedRecord, match="another key"):
        opened(DataSeal(b"j" * 16, b"k" * 32), first)
    with pytest.raises(DamagedRecord, match="header's seal is broken"):
        opened(DataSeal(b"i" * 16, b"l" * 32), first)


def test_any_bytes_end_as_damage() -> None:
    """Lengths are read with bounds."""
    rng = random.Random(11)
    one, good = seal(), sealed_with(seal())
    for _ in range(500):
        record = bytearray(good)
        for _ in range(3):
            record[rng.randrange(48, 64)] = rng.choice((0, 1, 0x7F, 0xFF))
        correct(record)
        try:
            opened(one, record)
        except DamagedRecord:
            continue
    for size in (0, 100, HEADER_BYTES - 1):
        with pytest.raises(DamagedRecord):
            opened(one, good[:size])
    with pytest.raises(DamagedRecord):
        one.open(memoryview(good)[:-1], len(PAYLOAD))


def repeated(records: Sequence[bytes]) -> int:
    """Return how many records repeat salt and counter, and with them key and nonce."""
    return len(records) - len({bytes(record[8 + 16 : 8 + 16 + 16 + 8]) for record in records})


def test_no_nonce_is_used_twice_under_one_key() -> None:
    """By threads of one process, nor by the next process with the same data key."""
    one, again = seal(), seal()
    with ThreadPoolExecutor(4) as threads:
        records = list(threads.map(lambda number: sealed_with((one, again)[number % 2]), range(80)))

    assert repeated([bytes(record) for record in records]) == 0
    assert {opened(seal(), record) for record in records} == {(header_of(), PAYLOAD)}


@pytest.mark.parametrize("fault", ["counter", "salt"])
def test_a_nonce_used_twice_would_be_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The control of the test above: a counter that stands still, a salt that is no chance."""
    if fault == "counter":
        monkeypatch.setattr("engine.storage.sealing.data_seal.count", repeat)
        one = again = seal()
    else:
        monkeypatch.setattr("engine.storage.sealing.data_seal.os.urandom", bytes)
        one, again = seal(), seal()

    assert repeated([bytes(sealed_with(one)), bytes(sealed_with(again))]) == 1


def test_rows_hide_runs_and_show_them_below_their_parent_alone() -> None:
    """The same each time, so that a run is found; a row moved elsewhere says nothing."""
    one, told = seal(), pack_run((1, 2, 3, 4)) + b"c" * 16
    hidden = one.hide(7, told)

    assert hidden == seal().hide(7, told)
    assert told[:8] not in hidden
    assert one.show(7, hidden) == told
    assert one.show(8, hidden) == one.show(7, hidden[:-1]) == one.show(7, b"") == b""
    assert one.digest_key != DataSeal(b"i" * 16, b"l" * 32).digest_key


# -- the keys of a store ------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder whose keys are those of A and B, wrapped by the first master key."""
    ring = KeyRing(tmp_path, FIRST, may_make=True)
    ring.seal_for(A)
    ring.seal_for(B)
    ring.close()
    return tmp_path


def digest_keys(folder: Path) -> list[bytes]:
    """Return what tells the data keys of A and B apart; open them for it."""
    ring = KeyRing(folder, FIRST)
    found = [ring.seal_for(name).digest_key for name in (A, B) if ring.seal_of(name) is not None]
    ring.close()
    return found


def test_keys_are_there_again_and_lie_wrapped(folder: Path) -> None:
    """One of its own for each namespace; the file shows neither them nor the master key."""
    first = digest_keys(folder)

    assert first == digest_keys(folder)
    assert len(set(first)) == 2
    assert FIRST.secret not in (folder / KEYS_NAME).read_bytes()
    assert (folder / KEYS_NAME).stat().st_mode & 0o077 == 0


def test_a_destroyed_key_is_gone_for_good(folder: Path) -> None:
    """Durably; the next one of that namespace is another."""
    (first, second) = digest_keys(folder)
    ring = KeyRing(folder, FIRST)
    wrapped = (folder / KEYS_NAME).read_bytes()
    ring.destroy(A)
    ring.destroy(b"never there")
    ring.close()
    gone = KeyRing(folder, FIRST)

    assert gone.seal_of(A) is None
    assert gone.seal_for(A).digest_key != first
    assert gone.seal_for(B).digest_key == second
    gone.keep_only({A})
    assert gone.seal_of(A) is not None
    assert gone.seal_of(B) is None
    gone.close()
    assert wrapped != (folder / KEYS_NAME).read_bytes()


def test_keys_are_not_made_where_there_are_copies(tmp_path: Path) -> None:
    """A store without its keys is refused and kept."""
    (tmp_path / "4096-000001.slab").touch()
    key_file = tmp_path / "key"
    make_key_file(key_file)
    with pytest.raises(SealRefused, match="`trunkline levels clear` begins anew"):
        unlock(tmp_path, SealSettings(str(key_file)), {})

    assert not (tmp_path / KEYS_NAME).exists()


# -- the master key -----------------------------------------------------------------------------


def test_a_key_file_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    """64 hexadecimal digits; a key is never replaced by chance."""
    key = make_key_file(tmp_path / "key")

    assert read_key_file(tmp_path / "key").secret == key.secret
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o400
    assert key.secret.hex() not in f"{key!r}"
    with pytest.raises(MasterKeyRefused, match="exists"):
        make_key_file(tmp_path / "key")
    assert read_key_file(tmp_path / "key").secret == key.secret


def test_a_key_comes_from_the_environment_too() -> None:
    """As secret stores hand it over."""
    environment = {"SEAL": FIRST.secret.hex() + "\n"}

    assert read_key("", "SEAL", environment).secret == FIRST.secret
    with pytest.raises(MasterKeyRefused, match="no variable OTHER"):
        read_key("", "OTHER", environment)
    with pytest.raises(MasterKeyRefused, match=r"expected engine\.levels\.key_file"):
        read_key("", "", environment)


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("ab" * 32, 0o440, "expected 0400"),
        ("ab" * 31, 0o400, "has 62 characters and is not a key"),
        ("zz" * 32, 0o400, "expected 64 hexadecimal digits"),
        ("", 0o400, "has 0 characters"),
        ("ab " * 32, 0o400, "is not a key"),
    ],
)
def test_a_key_file_that_is_none_is_refused(
    tmp_path: Path, text: str, mode: int, message: str
) -> None:
    """Nor is a key that others may read; the message does not say what the file has."""
    file = tmp_path / "key"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(MasterKeyRefused, match=message) as refused:
        read_key_file(file)

    assert not text or text not in refused.value.message


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """At once, also where reading would wait."""
    with pytest.raises(MasterKeyRefused, match="is not a regular file"):
        read_key_file(tmp_path)
    with pytest.raises(MasterKeyRefused, match="cannot be read: No such file"):
        read_key_file(tmp_path / "none")
