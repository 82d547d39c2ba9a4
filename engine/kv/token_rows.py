"""Tokens' keys and values in a storage's tensor: what torch attention writes and reads.

`token_rows` gives the way of a storage's format, for blocks in `slots`: values as they are, or 8
bits with a scale for each token and head (`kernels/reference_int8.py`).
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.kv.storage import KvStorage
from kernels import reference_int8


class TokenRows(Protocol):
    """Writes and reads tokens of one storage. Indices are int64 tensors on its device."""

    def write(
        self, layer: int, part: int, block: torch.Tensor, offset: torch.Tensor, x: torch.Tensor
    ) -> None:
        """Write x [T, K, D] as part 0 (keys) or 1 (values) of tokens at slots `offset` [T] of
        blocks `block` [T]. What is no number becomes 0."""

    def read(self, blocks: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the KV [..., parts, K, S, D] of blocks [...], in the pool's dtype, or fp32 where
        that is no float."""


class PlainRows:
    """`TokenRows` of a pool of floats."""

    def __init__(self, kv: KvStorage) -> None:
        self._data = kv.data

    def write(
        self, layer: int, part: int, block: torch.Tensor, offset: torch.Tensor, x: torch.Tensor
    ) -> None:
        """See `TokenRows`."""
        self._data[block, layer, part, :, offset] = _finite(x).to(self._data.dtype)

    def read(self, blocks: torch.Tensor, layer: int) -> torch.Tensor:
        """See `TokenRows`."""
        return self._data[blocks, layer]


class Int8Rows:
    """`TokenRows` of an int8 pool."""

    def __init__(self, kv: KvStorage) -> None:
        self._units = kv.data.flatten(-2)  # a view: [B, L, 2, K, S * (D + 2)]

    def write(
        self, layer: int, part: int, block: torch.Tensor, offset: torch.Tensor, x: torch.Tensor
    ) -> None:
        """See `TokenRows`."""
        reference_int8.write(self._units[:, layer, part], block, offset, x)

    def read(self, blocks: torch.Tensor, layer: int) -> torch.Tensor:
        """See `TokenRows`."""
        return reference_int8.widen(self._units[blocks, layer])


def token_rows(kv: KvStorage) -> TokenRows:
    """Return the way to the tokens of a storage with blocks in slots."""
    return Int8Rows(kv) if kv.format.is_int8 else PlainRows(kv)


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Return x with NaN and infinities set to zero.

    Padded products multiply slots behind a sequence's end by zero, and these slots may belong to
    another sequence. The sequence that produced the NaN fails by its own logits.
    """
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
