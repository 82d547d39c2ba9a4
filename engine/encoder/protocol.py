"""Messages between a gateway and its encoder process. Pure: bytes in, messages out.

    gateway                              encoder process
      StartEncoder ────────────────────▶
                             ◀─────────── EncoderReady, or EncoderRejected and the end
      EncodeBatch ─────────────────────▶
                             ◀─────────── EncodedBatch    one per batch, in order

The frames are those of `engine.wire`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

_SWAPS = sys.byteorder == "big"
_ID = "I"
assert array(_ID).itemsize == 4, "token ids take four bytes"


class StartEncoder(Struct, frozen=True, array_like=True, tag="start"):
    """The gateway's first message: the prepared folder, and threads (0: torch's own number)."""

    folder: str
    threads: int


class EncodeBatch(Struct, frozen=True, array_like=True, tag="batch"):
    """Texts to encode."""

    number: int
    texts: list[bytes]
    """The packed token ids of each, with [CLS] and [SEP]."""


class EncoderReady(Struct, frozen=True, array_like=True, tag="ready"):
    """The model is loaded and has encoded a text."""

    dimensions: int
    """The length of a vector."""


class EncoderRejected(Struct, frozen=True, array_like=True, tag="rejected"):
    """The model cannot be loaded; the process exits. A `ModelError`'s code and message."""

    code: str
    message: str


class EncodedBatch(Struct, frozen=True, array_like=True, tag="encoded"):
    """The vectors of a batch, in its order."""

    number: int
    vectors: list[bytes]
    """The vector of each text, float32, little-endian; empty for one that is not finite."""


ToEncoder = StartEncoder | EncodeBatch
FromEncoder = EncoderReady | EncoderRejected | EncodedBatch

read_to_encoder: Callable[[bytes], ToEncoder] = msgspec.msgpack.Decoder(ToEncoder).decode
"""Decodes a frame's body for the encoder. Raises msgspec's errors."""
read_from_encoder: Callable[[bytes], FromEncoder] = msgspec.msgpack.Decoder(FromEncoder).decode
"""Decodes a frame's body for the gateway. Raises msgspec's errors."""


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Return token ids in four bytes each. Equal only for equal ids. Raises OverflowError."""
    packed = array(_ID, token_ids)
    if _SWAPS:
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> array[int]:
    """Return packed token ids. Raises ValueError for a broken length."""
    packed = array(_ID)
    packed.frombytes(data)
    if _SWAPS:
        packed.byteswap()
    return packed
