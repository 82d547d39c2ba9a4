"""The slot table: which copy lies in each slot of host memory, in words that outlive the engine.

It is a header and an entry of `ENTRY_BYTES` for each slot, in shared memory that the gateway keeps.
The engine writes it; after the engine's death the next one reads it. A writer may be killed at any
instruction: an entry counts only if its state, which is written last, and its digest, which covers
the slot's number too, are right. Everything else is *torn*. The table knows no block, no tensor and
no clock; instants are seconds of the machine's boot clock, which is one for all its processes.

    header   magic │ fingerprint │ generation
    entry    state │ xxh3-64 of what follows │ numbers │ run: u32 each │ names │ leases │ terms
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final, Literal, Protocol

import msgspec
import xxhash
from msgspec import Struct

from engine.api import AT_REST, FIDELITIES, AtRest, Fidelity, Namespace, Payer
from engine.errors import InvariantViolation
from engine.moves import PromiseTerms

HEADER_BYTES: Final = 4_096
ENTRY_BYTES: Final = 1_024
CHECK_BYTES: Final = 16
ROOT_SERIAL: Final = 0
"""The parent of a copy of a first run."""
NO_SERIAL: Final = 2**64 - 1
"""The parent of a copy whose parent has none in host memory."""
TABLE_MAGIC: Final = b"TLSLOTS2"

SlotState = Literal["free", "valid", "torn"]

_STATE_BYTES = 8
_FREE = bytes(_STATE_BYTES)
_VALID = b"TLVALID1"
_BODY_AT = 16
_ZEROS = bytes(ENTRY_BYTES)
_FIXED = struct.Struct("<QQddd16sIHHHHHBBB")
_U64 = struct.Struct("<Q")
_encode_terms = msgspec.msgpack.Encoder().encode
_decode_terms = msgspec.msgpack.Decoder(PromiseTerms).decode
_FINGERPRINT_AT, _GENERATION_AT = 8, 24


class TableMemory(Protocol):
    """Bytes that keep what is assigned: an `mmap`, or a bytearray."""

    def __getitem__(self, key: slice, /) -> bytes | bytearray:
        """Return a part."""

    def __setitem__(self, key: slice, value: bytes, /) -> None:
        """Replace a part by as many bytes."""

    def __len__(self) -> int:
        """Return the number of bytes."""


class SlotEntry(Struct, frozen=True):
    """What lies in one slot.

    `serial`: of this copy in this slot, used once. `parent`: the serial of the copy of the run
    before, `ROOT_SERIAL` for a first run, `NO_SERIAL` where that is not in host memory. `check`:
    the xxh3-128 digest of the slot's bytes. `format`: the packed format, empty for the block's own
    bytes. Instants are of the boot clock; `limit_at_s` infinite: no limit. `at_rest`: how far
    copies of its namespace may go. `leases`: those whose last copy it is. `terms`: of the promise
    until `promise_at_s`, None where there is none.
    """

    serial: int
    parent: int
    namespace: Namespace
    payer: Payer
    run: tuple[int, ...]
    check: bytes
    limit_at_s: float = float("inf")
    promise_at_s: float = float("-inf")
    last_use_s: float = 0.0
    hits: int = 0
    fidelity: Fidelity = "exact"
    format: str = ""
    at_rest: AtRest = "remote"
    leases: tuple[str, ...] = ()
    terms: PromiseTerms | None = None


class SlotTable:
    """The entries of `slots` slots. One process writes at a time."""

    def __init__(self, memory: TableMemory, slots: int) -> None:
        """Raises ValueError for memory that is too small."""
        if slots < 1 or len(memory) < table_bytes(slots):
            raise ValueError(
                f"table of {len(memory)} bytes for {slots} slots; expected {table_bytes(slots)}"
            )
        self.slots = slots
        self._memory = memory

    def is_of(self, fingerprint: bytes) -> bool:
        """Return whether the table was begun with this fingerprint, of 16 bytes."""
        memory = self._memory
        return (
            memory[:_FINGERPRINT_AT] == TABLE_MAGIC
            and memory[_FINGERPRINT_AT:_GENERATION_AT] == fingerprint
        )

    def begin(self, fingerprint: bytes, generations: int = 0) -> None:
        """Begin an empty table; its memory is zeros, as of a new file. Its magic comes last.

        `generations`: engines that have had its memory before.
        """
        assert len(fingerprint) == _GENERATION_AT - _FINGERPRINT_AT, "a digest of 16 bytes"
        self._memory[_FINGERPRINT_AT:_GENERATION_AT] = fingerprint
        self._memory[_GENERATION_AT : _GENERATION_AT + 8] = _U64.pack(generations)
        self._memory[:_FINGERPRINT_AT] = TABLE_MAGIC

    def end(self) -> None:
        """Have the next engine begin anew: what the table says may be wrong."""
        self._memory[:_FINGERPRINT_AT] = _FREE

    @property
    def generation(self) -> int:
        """Return how many engines have had this table."""
        number: int = _U64.unpack(self._memory[_GENERATION_AT : _GENERATION_AT + 8])[0]
        return number

    def next_generation(self) -> int:
        """Count one more engine that has this table; return its number, from 1."""
        number = self.generation + 1
        self._memory[_GENERATION_AT : _GENERATION_AT + 8] = _U64.pack(number)
        return number

    # -- entries ------------------------------------------------------------------------------

    def write(self, slot: int, entry: SlotEntry) -> bool:
        """Note what lies in a slot; return False, and leave the slot free, if the entry is too long
        for the table. About 4 us.
        """
        at, body = self._at(slot), _encode(entry)
        if body is None:
            self.clear(slot)
            return False
        memory = self._memory
        memory[at : at + _STATE_BYTES] = _FREE
        memory[at + _STATE_BYTES : at + _BODY_AT + len(body)] = _digest(body, slot) + body
        memory[at : at + _STATE_BYTES] = _VALID
        return True

    def clear(self, slot: int) -> None:
        """Forget what lay in a slot: nothing of the entry is left. Below 1 us."""
        at = self._at(slot)
        self._memory[at : at + _STATE_BYTES] = _FREE
        self._memory[at : at + ENTRY_BYTES] = _ZEROS

    def state(self, slot: int) -> SlotState:
        """Return whether a slot has an entry. O(1)."""
        at = self._at(slot)
        if self._memory[at : at + _STATE_BYTES] == _FREE:
            return "free"
        return "torn" if self.read(slot) is None else "valid"

    def read(self, slot: int) -> SlotEntry | None:
        """Return what lies in a slot, None where that is nothing, or not known. About 4 us."""
        at = self._at(slot)
        if self._memory[at : at + _STATE_BYTES] != _VALID:
            return None
        data = bytes(self._memory[at + _STATE_BYTES : at + ENTRY_BYTES])
        return _decode(data, slot)

    def check(self) -> None:
        """Check that each serial is there once. Raises InvariantViolation. O(slots)."""
        seen: dict[int, int] = {}
        for slot in range(self.slots):
            entry = self.read(slot)
            if entry is not None and seen.setdefault(entry.serial, slot) != slot:
                raise InvariantViolation(
                    f"slots {seen[entry.serial]} and {slot} have the serial {entry.serial}"
                )

    def _at(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot}; expected 0 to {self.slots - 1}")
        return HEADER_BYTES + slot * ENTRY_BYTES


def table_bytes(slots: int) -> int:
    """Return the bytes of a table of so many slots."""
    return HEADER_BYTES + slots * ENTRY_BYTES


def _digest(body: bytes, slot: int) -> bytes:
    return xxhash.xxh3_64_digest(body, seed=slot)


def _encode(entry: SlotEntry) -> bytes | None:
    """Return the body of an entry; None if it has no room in the table."""
    if len(entry.check) != CHECK_BYTES:
        return None
    form = entry.format.encode()
    leases = b"".join(_lease(one) for one in entry.leases)
    terms = b"" if entry.terms is None else _encode_terms(entry.terms)
    names = b"".join((entry.namespace, entry.payer, form, leases, terms))
    run = entry.run
    if _BODY_AT + _FIXED.size + 4 * len(run) + len(names) > ENTRY_BYTES or len(form) > 255:
        return None
    fixed = _FIXED.pack(
        entry.serial,
        entry.parent,
        entry.limit_at_s,
        entry.promise_at_s,
        entry.last_use_s,
        entry.check,
        min(entry.hits, 2**32 - 1),
        len(run),
        len(entry.namespace),
        len(entry.payer),
        len(leases),
        len(terms),
        len(form),
        FIDELITIES.index(entry.fidelity),
        AT_REST.index(entry.at_rest),
    )
    return b"".join((fixed, struct.pack(f"<{len(run)}I", *run), names))


def _lease(lease_id: str) -> bytes:
    name = lease_id.encode(errors="surrogatepass")
    return struct.pack("<H", min(len(name), ENTRY_BYTES)) + name


def _decode(data: bytes, slot: int) -> SlotEntry | None:
    """Read the digest and the body of an entry; None unless all of it is right."""
    fixed = _FIXED.unpack_from(data, 8)
    serial, parent, limit_at_s, promise_at_s, last_use_s, check, hits, *lengths = fixed
    tokens, namespace, payer, leases, terms, form, fidelity, at_rest = lengths
    sizes = (4 * tokens, namespace, payer, form, leases, terms)
    end = 8 + _FIXED.size + sum(sizes)
    if end > len(data) or _digest(data[8:end], slot) != data[:8]:
        return None
    if fidelity >= len(FIDELITIES) or at_rest >= len(AT_REST) or not tokens:
        return None
    parts = list(_cut(data, 8 + _FIXED.size, sizes))
    return SlotEntry(
        serial,
        parent,
        parts[1],
        parts[2],
        struct.unpack(f"<{tokens}I", parts[0]),
        check,
        limit_at_s,
        promise_at_s,
        last_use_s,
        hits,
        FIDELITIES[fidelity],
        parts[3].decode(),
        AT_REST[at_rest],
        tuple(_leases_in(parts[4])),
        _terms_in(parts[5]),
    )


def _cut(data: bytes, at: int, sizes: Sequence[int]) -> Iterator[bytes]:
    for size in sizes:
        yield data[at : at + size]
        at += size


def _leases_in(data: bytes) -> Iterator[str]:
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<H", data, at)
        yield data[at + 2 : at + 2 + size].decode(errors="surrogatepass")
        at += 2 + size


def _terms_in(data: bytes) -> PromiseTerms | None:
    try:
        return _decode_terms(data) if data else None
    except msgspec.MsgspecError:
        return None
