"""The KV format: dtype, layout, shape and size of a block.

Every other module asks a `KvFormat` for these; none reads them off the storage tensor's shape or
multiplies sizes itself. The format knows no device and no block id. Runners make one with
`kv_format`, allocate `engine.kv.storage.KvStorage` from it and report its name and block size to
the gateway.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from msgspec import Struct

from engine.model_store import ModelConfig

Layout = Literal["slots", "panels"]
"""Order of the values inside one KV head of a block.

`slots`: [slot, head_dim], so that one token's key is contiguous. `panels`: the order in which the C
kernels read keys and values (`kernels/cpu/cpu_attention.c`), in which a token is not contiguous.
"""


class KvFormat(Struct, frozen=True):
    """Format of a block: keys after rotation and values, all layers, in one dtype.

    A block holds `block_size` tokens (slots) of `layers` layers and `kv_heads` KV heads of
    `head_dim` channels.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    layout: Layout = "slots"

    @property
    def name(self) -> str:
        """Name that differs where the bytes differ. Cache namespaces contain it, so that blocks
        of one format are never read as another's."""
        dtype = str(self.dtype).removeprefix("torch.")
        return dtype if self.layout == "slots" else f"{dtype}-{self.layout}"

    @property
    def layer_shape(self) -> tuple[int, int, int, int]:
        """[2, K, S, D]: keys and values of one layer in one block."""
        return 2, self.kv_heads, self.block_size, self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.layers * math.prod(self.layer_shape) * self.dtype.itemsize

    @property
    def copies_whole_blocks(self) -> bool:
        """Whether a copy-on-write must copy the whole block: a run of slots is not contiguous."""
        return self.layout == "panels"

    def storage_shape(self, blocks: int) -> tuple[int, ...]:
        """[B, L, 2, K, S, D]: block outermost, so that each block is contiguous."""
        return blocks, self.layers, *self.layer_shape


def kv_format(
    config: ModelConfig, dtype: torch.dtype, block_size: int, layout: Layout = "slots"
) -> KvFormat:
    """Return the format of a model's KV in `dtype`, with `block_size` tokens to a block."""
    return KvFormat(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=dtype,
        layout=layout,
    )
