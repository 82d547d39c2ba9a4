"""The objects of a shared store: runs that any replica of a model may read, and who has which.

    proof                        which master key the store is of
    FOLDER/m/OWNER               the manifest of one owner: its objects in this namespace
    FOLDER/o/NAME                a run, sealed

An owner is one store on disk. A run's name is a keyed chain digest of its path, so each replica
finds it without an index. Names only find: a run proves itself by its sealed header, which has the
parent's name, the tokens and the format. Pure: bytes in, values out, with bounds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import xxhash
from msgspec import Struct

from engine.storage.sealing.seals import SharedNamespace
from engine.storage.slabs.record import HEADER_BYTES, DamagedRecord, pack_run

NAME_BYTES: Final = 32
ROOT_NAME: Final = b""
ENTRIES_MAX: Final = 65_536
"""Objects that a manifest lists: of one owner, in one namespace."""
_RUN = struct.Struct("<8s32sQB16s")
_RUN_MAGIC, _MANIFEST_MAGIC = b"TLKVSHR1", b"TLKVMAN1"
_MANIFEST = struct.Struct("<8s64sQI")
_ENTRY = struct.Struct(f"<{NAME_BYTES}sIBQ")
_CHECK = struct.Struct("<Q")
MANIFEST_BYTES_MAX: Final = HEADER_BYTES + ENTRIES_MAX * _ENTRY.size


class SharedEntry(Struct, frozen=True, gc=False):
    """An object as a manifest lists it. `fidelity`: by its index; `limit_ms`: the wall clock's
    instant from which on it is not matched."""

    payload_bytes: int
    fidelity: int
    limit_ms: int


Entries = Mapping[bytes, SharedEntry]
"""Objects by the name of their run."""


def object_path(folder: str, name: bytes) -> str:
    """Return where a run lies."""
    return f"{folder}/o/{name.hex()}"


def manifest_path(folder: str, owner: str) -> str:
    """Return where an owner's manifest lies."""
    return f"{folder}/m/{owner}"


def chain(shared: SharedNamespace, tokens: Sequence[int], run_tokens: int) -> list[bytes]:
    """Return the names of the whole runs of `tokens`, up to one that cannot be packed. About 2 us
    a run."""
    names, parent = list[bytes](), ROOT_NAME
    for at in range(0, len(tokens) - run_tokens + 1, run_tokens):
        try:
            parent = shared.name(parent, pack_run(tokens[at : at + run_tokens]))
        except struct.error:
            break
        names.append(parent)
    return names


def encode_run(parent: bytes, run: bytes, payload_bytes: int, fidelity: int, check: bytes) -> bytes:
    """Return the plain header of a packed run below the run of name `parent`. `check`: the xxh3-128
    digest of its payload."""
    said = _RUN.pack(_RUN_MAGIC, parent, payload_bytes, fidelity, check)
    return _padded(said + struct.pack("<H", len(run)) + run)


def open_run(
    shared: SharedNamespace, sealed: memoryview, parent: bytes, run: bytes, entry: SharedEntry
) -> tuple[memoryview, bytes]:
    """Return the payload of an object, good until this thread's next call, and its digest.

    Raises DamagedRecord unless it is this run, below this parent, in this format.
    """
    header, payload = shared.seal.open(sealed, entry.payload_bytes)
    check = _RUN.unpack_from(header)[4]
    if header != encode_run(parent, run, entry.payload_bytes, entry.fidelity, check):
        raise DamagedRecord("the object is of another run")
    if xxhash.xxh3_128_digest(payload) != check:
        raise DamagedRecord("the payload's digest is wrong")
    return payload, check


def seal_manifest(
    shared: SharedNamespace, owner: str, now_ms: int, entries: Iterable[tuple[bytes, SharedEntry]]
) -> memoryview:
    """Return an owner's manifest, sealed. `entries`: at most `ENTRIES_MAX`, at least one."""
    packed = b"".join(
        _ENTRY.pack(name, one.payload_bytes, one.fidelity, one.limit_ms) for name, one in entries
    )
    count = len(packed) // _ENTRY.size
    header = _padded(_MANIFEST.pack(_MANIFEST_MAGIC, owner.encode(), now_ms, count))
    head, payload = shared.seal.seal(header, memoryview(packed))
    return memoryview(head + payload)


def open_manifest(shared: SharedNamespace, owner: str, sealed: memoryview) -> Entries:
    """Return what an owner's manifest lists. Raises DamagedRecord for anything else."""
    size = len(sealed) - HEADER_BYTES
    if not 0 < size <= ENTRIES_MAX * _ENTRY.size or size % _ENTRY.size:
        raise DamagedRecord(f"manifest with {size} bytes of entries")
    header, payload = shared.seal.open(sealed, size)
    magic, whose, _, count = _MANIFEST.unpack_from(header)
    if magic != _MANIFEST_MAGIC or whose.rstrip(b"\0") != owner.encode():
        raise DamagedRecord("the manifest is of another owner")
    if count * _ENTRY.size != size:
        raise DamagedRecord(f"manifest of {count} entries in {size} bytes")
    return {name: SharedEntry(*told) for name, *told in _ENTRY.iter_unpack(payload)}


def _padded(said: bytes) -> bytes:
    """Return a header as seals take it: its bytes, zeros, and a digest."""
    body = said.ljust(HEADER_BYTES - _CHECK.size, b"\0")
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))
