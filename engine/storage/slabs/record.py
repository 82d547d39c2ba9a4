"""A record on disk: a header of 4,096 bytes that says what it is, then the bytes of one slot.

The header repeats what the index knows of the record, so that each can be checked against the
other, and so that a lost index can be made anew. Lengths are read with bounds: parsing
any bytes ends in a `RecordHeader` or in `DamagedRecord`.

    magic │ numbers │ run: u32 each │ namespace │ payer │ zeros … │ xxh3-64 of all before
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash
from msgspec import Struct

from engine.api import FIDELITIES, Fidelity, Namespace, Payer
from engine.moves import RecordId

HEADER_BYTES = 4_096
MAGIC = b"TLKVREC1"
RUN_TOKENS_MAX = 256
NAME_BYTES_MAX = 1_024
"""Bytes of a namespace, and of a payer."""
_FIXED = struct.Struct("<8sI16sQQQHHHHQ16sQQQ")
_CHECK = struct.Struct("<Q")


class DamagedRecord(Exception):
    """A header that no record of this program can have."""


class RecordHeader(Struct, frozen=True):
    """What a record is. Times are the store's wall-clock milliseconds."""

    store_id: bytes
    record_id: RecordId
    scope_id: int
    parent: RecordId
    namespace: Namespace
    payer: Payer
    run: bytes
    fidelity: Fidelity
    payload_bytes: int
    check: bytes
    written_ms: int
    limit_ms: int
    promise_ms: int


def place_bytes_of(payload_bytes: int) -> int:
    """Return the bytes that a record takes on disk: header and payload, in pages of 4,096."""
    return HEADER_BYTES + -(-payload_bytes // 4_096) * 4_096


def pack_run(tokens: Sequence[int]) -> bytes:
    """Return token ids as u32, little-endian. Raises struct.error for an id that does not fit."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack_run(run: bytes) -> tuple[int, ...]:
    """Return the token ids of a packed run."""
    return struct.unpack(f"<{len(run) // 4}I", run)


def encode_header(header: RecordHeader) -> bytes:
    """Return the header's 4,096 bytes. Raises ValueError for a name that is too long."""
    names = (header.namespace, header.payer)
    if max(map(len, names)) > NAME_BYTES_MAX or len(header.run) > 4 * RUN_TOKENS_MAX:
        raise ValueError(
            f"names of {[len(name) for name in names]} bytes and a run of {len(header.run) // 4}"
            f" tokens; expected at most {NAME_BYTES_MAX} bytes and {RUN_TOKENS_MAX} tokens"
        )
    fixed = _FIXED.pack(
        MAGIC,
        HEADER_BYTES,
        header.store_id,
        header.record_id,
        header.scope_id,
        header.parent,
        FIDELITIES.index(header.fidelity),
        len(header.run) // 4,
        len(header.namespace),
        len(header.payer),
        header.payload_bytes,
        header.check,
        header.written_ms,
        header.limit_ms,
        header.promise_ms,
    )
    body = b"".join((fixed, header.run, *names)).ljust(HEADER_BYTES - _CHECK.size, b"\0")
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def decode_header(data: bytes | memoryview) -> RecordHeader:
    """Read a header. Raises DamagedRecord."""
    if len(data) < HEADER_BYTES:
        raise DamagedRecord(f"header of {len(data)} bytes; expected {HEADER_BYTES}")
    body = bytes(data[: HEADER_BYTES - _CHECK.size])
    (check,) = _CHECK.unpack(data[HEADER_BYTES - _CHECK.size : HEADER_BYTES])
    if body[: len(MAGIC)] != MAGIC:
        raise DamagedRecord("no record begins here")
    if xxhash.xxh3_64_intdigest(body) != check:
        raise DamagedRecord("the header's digest is wrong")
    (
        _,
        header_bytes,
        store_id,
        record_id,
        scope_id,
        parent,
        fidelity,
        tokens,
        namespace_bytes,
        payer_bytes,
        payload_bytes,
        payload_check,
        written_ms,
        limit_ms,
        promise_ms,
    ) = _FIXED.unpack_from(body)
    if (
        header_bytes != HEADER_BYTES
        or fidelity >= len(FIDELITIES)
        or not 1 <= tokens <= RUN_TOKENS_MAX
        or max(namespace_bytes, payer_bytes) > NAME_BYTES_MAX
        or parent >= record_id
    ):
        raise DamagedRecord("the header describes an impossible record")
    names_at = _FIXED.size + 4 * tokens
    payer_at = names_at + namespace_bytes
    return RecordHeader(
        store_id,
        record_id,
        scope_id,
        parent,
        body[names_at:payer_at],
        body[payer_at : payer_at + payer_bytes],
        body[_FIXED.size : names_at],
        FIDELITIES[fidelity],
        payload_bytes,
        payload_check,
        written_ms,
        limit_ms,
        promise_ms,
    )
