"""Sealing: records and rows of one namespace, encrypted and authenticated under its data key.

A sealed record takes the bytes of a plain one. Its header of 4,096 bytes is an *envelope*, which
says what is needed to open it, then the plain header in cipher text; its payload keeps its length:

    magic │ key id │ salt │ counter │ lengths │ header's cipher text, tag │ payload's tag │ 0 │ xxh3

Both are AES-256-GCM. The header's associated data is the envelope; the payload's is the envelope
and the plain header, so that bytes which were sealed for another namespace, parent, run or record
do not open, or say that they are another record.

The rule of nonces: each `DataSeal` draws 16 random bytes when it is made, its *salt*, and seals
under a key derived from data key and salt. A nonce is the kind of the text (header or payload) and
a counter that never repeats in that object. So a pair of key and nonce repeats only if two salts of
128 random bits are equal, also after a restore, a copy or a kill.

Rows are hidden by AES-SIV, which needs no nonce: equal runs below one parent hide equally, and a
parent has each run once.
"""

from __future__ import annotations

import os
import struct
import threading
from functools import lru_cache
from itertools import count
from typing import Literal, NamedTuple

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESSIV
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from engine.moves import RecordId
from engine.storage.sealing.seals import SEALED_MAGIC
from engine.storage.slabs.record import HEADER_BYTES, DamagedRecord

KEY_ID_BYTES = SALT_BYTES = 16
DATA_KEY_BYTES = 32
TAG_BYTES = 16
DERIVED_KEPT = 64
"""Derived keys that one seal keeps for reading: one for each time that the store was opened."""
_ENVELOPE = struct.Struct("<8s16s16sQIQ")
_NONCE = struct.Struct("<IQ")
_CHECK = struct.Struct("<Q")
_PARENT = struct.Struct("<Q")
_HEADER, _PAYLOAD = 0, 1
TEXT_BYTES_MAX = HEADER_BYTES - _ENVELOPE.size - 2 * TAG_BYTES - _CHECK.size
"""The longest plain header without the zeros at its end."""


class Envelope(NamedTuple):
    """What is needed to open a sealed record."""

    magic: bytes
    key_id: bytes
    salt: bytes
    number: int
    """The counter of its nonces."""
    text_bytes: int
    payload_bytes: int


class ScratchBuffers:
    """Two buffers for each thread, which all seals of a store use: new memory for each record would
    take longer than its cipher."""

    def __init__(self) -> None:
        self._own = threading.local()

    def take(self, name: Literal["closed", "opened"], size: int) -> memoryview:
        """Return this thread's buffer of a name, cut to `size` bytes; it grows as is needed."""
        buffer: memoryview | None = getattr(self._own, name, None)
        if buffer is None or len(buffer) < size:
            buffer = memoryview(bytearray(size))
            setattr(self._own, name, buffer)
        return buffer[:size]


class DataSeal:
    """Seals the records of one namespace. `seal` and `open` may run in any thread."""

    def __init__(
        self, key_id: bytes, data_key: bytes, scratch: ScratchBuffers | None = None
    ) -> None:
        """`key_id`: the name of the key, 16 bytes; `data_key`: 32 random bytes."""
        self.key_id = key_id
        self._scratch = scratch or ScratchBuffers()
        self._data_key = data_key
        self._salt = os.urandom(SALT_BYTES)
        self._counter = count(1)
        self._derived = lru_cache(DERIVED_KEPT)(self._derive_cipher)
        self._rows = AESSIV(derive(data_key, b"", b"trunkline rows", 64))
        self.digest_key = derive(data_key, b"", b"trunkline digests", 32)

    def _derive_cipher(self, salt: bytes) -> AESGCM:
        return AESGCM(derive(self._data_key, salt, b"trunkline records", 32))

    # -- rows: one thread -----------------------------------------------------------------------

    def hide(self, parent: RecordId, told: bytes) -> bytes:
        """See `RecordSeal`. About 3 us."""
        return self._rows.encrypt(told, [_PARENT.pack(parent)])

    def show(self, parent: RecordId, hidden: bytes) -> bytes:
        """See `RecordSeal`. About 3 us."""
        if len(hidden) <= TAG_BYTES:
            return b""
        try:
            return self._rows.decrypt(hidden, [_PARENT.pack(parent)])
        except InvalidTag:
            return b""

    # -- records: any thread --------------------------------------------------------------------

    def seal(self, header: bytes, payload: memoryview) -> tuple[bytes, memoryview]:
        """See `RecordSeal`. Raises ValueError for a header with more than `TEXT_BYTES_MAX` bytes
        before the zeros at its end."""
        check = header[-_CHECK.size :]
        text = header[: -_CHECK.size].rstrip(b"\0") + check
        if len(text) > TEXT_BYTES_MAX:
            raise ValueError(f"header of {len(text)} bytes; expected at most {TEXT_BYTES_MAX}")
        number = next(self._counter)
        envelope = _ENVELOPE.pack(
            SEALED_MAGIC, self.key_id, self._salt, number, len(text), len(payload)
        )
        cipher = self._derived(self._salt)
        hidden = cipher.encrypt(_NONCE.pack(_HEADER, number), text, envelope)
        sealed = self._scratch.take("closed", len(payload) + TAG_BYTES)
        cipher.encrypt_into(_NONCE.pack(_PAYLOAD, number), payload, envelope + text, sealed)
        body = b"".join((envelope, hidden, sealed[-TAG_BYTES:]))
        body = body.ljust(HEADER_BYTES - _CHECK.size, b"\0")
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body)), sealed[:-TAG_BYTES]

    def open(self, sealed: memoryview, payload_bytes: int) -> tuple[bytes, memoryview]:
        """See `RecordSeal`."""
        envelope, text = self._open_text(sealed)
        if envelope.payload_bytes != payload_bytes or len(sealed) < HEADER_BYTES + payload_bytes:
            raise DamagedRecord(
                f"payload of {envelope.payload_bytes} bytes; expected {payload_bytes}"
            )
        tag_at = _ENVELOPE.size + len(text) + TAG_BYTES
        closed = self._scratch.take("closed", payload_bytes + TAG_BYTES)
        closed[:payload_bytes] = sealed[HEADER_BYTES : HEADER_BYTES + payload_bytes]
        closed[payload_bytes:] = sealed[tag_at : tag_at + TAG_BYTES]
        opened = self._scratch.take("opened", payload_bytes)
        nonce = _NONCE.pack(_PAYLOAD, envelope.number)
        bound = _ENVELOPE.pack(*envelope) + text
        try:
            self._derived(envelope.salt).decrypt_into(nonce, closed, bound, opened)
        except InvalidTag as error:
            raise DamagedRecord("the payload's seal is broken") from error
        return _padded(text), opened

    def open_header(self, sealed: memoryview) -> bytes:
        """Return the plain header of a sealed one. Raises DamagedRecord."""
        return _padded(self._open_text(sealed)[1])

    def _open_text(self, sealed: memoryview) -> tuple[Envelope, bytes]:
        """Return the envelope, and the plain header without the zeros before its digest."""
        envelope = read_envelope(sealed)
        if envelope.key_id != self.key_id:
            raise DamagedRecord("the record is sealed with another key")
        if not _CHECK.size <= envelope.text_bytes <= TEXT_BYTES_MAX:
            raise DamagedRecord(f"sealed header of {envelope.text_bytes} bytes")
        end = _ENVELOPE.size + envelope.text_bytes + TAG_BYTES
        nonce, hidden = _NONCE.pack(_HEADER, envelope.number), sealed[_ENVELOPE.size : end]
        try:
            text = self._derived(envelope.salt).decrypt(nonce, hidden, _ENVELOPE.pack(*envelope))
        except InvalidTag as error:
            raise DamagedRecord("the header's seal is broken") from error
        return envelope, text


def read_envelope(sealed: memoryview) -> Envelope:
    """Return the envelope of a sealed record. Raises DamagedRecord where none begins."""
    if len(sealed) < HEADER_BYTES:
        raise DamagedRecord(f"header of {len(sealed)} bytes; expected {HEADER_BYTES}")
    body = bytes(sealed[: HEADER_BYTES - _CHECK.size])
    (check,) = _CHECK.unpack(sealed[HEADER_BYTES - _CHECK.size : HEADER_BYTES])
    if not body.startswith(SEALED_MAGIC):
        raise DamagedRecord("no sealed record begins here")
    if xxhash.xxh3_64_intdigest(body) != check:
        raise DamagedRecord("the envelope's digest is wrong")
    return Envelope(*_ENVELOPE.unpack_from(body))


def _padded(text: bytes) -> bytes:
    """Return a plain header again, with the zeros before its digest."""
    body, check = text[: -_CHECK.size], text[-_CHECK.size :]
    return body.ljust(HEADER_BYTES - _CHECK.size, b"\0") + check


def derive(key: bytes, salt: bytes, purpose: bytes, length: int) -> bytes:
    """Return a key of `length` bytes for one purpose (HKDF)."""
    return HKDF(SHA256(), length, salt or None, purpose).derive(key)
