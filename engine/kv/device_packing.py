"""Packed formats on a GPU: kernels pack blocks of the pool into staging memory, and back.

`engine.kv.packing` says what a format takes of a pool; the bytes are those of
`kernels/reference_kv.py`, as on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

import torch

from engine.kv.packing import packed_format
from engine.kv.slot_formats import SizedPacker
from engine.kv.storage import KvPool
from kernels.reference_kv import PackedName

PACKED = 0
"""The outcome of a block that was packed."""


class BatchPacker(SizedPacker, Protocol):
    """Packs a lane's shards of blocks on its device, and back. Both calls only launch."""

    def pack(self, blocks: torch.Tensor, out: torch.Tensor, lane: int) -> torch.Tensor:
        """Write shards of blocks int32 [n] to `out` uint8 [n, block_bytes]; return outcomes int32
        [n], which are `PACKED`, or say why a block's bytes mean nothing."""

    def unpack(self, packed: torch.Tensor, blocks: torch.Tensor, lane: int) -> None:
        """Fill shards of blocks int32 [n] from `packed` uint8 [n, block_bytes]."""


class GpuPacker:
    """`BatchPacker` by the Triton kernels, over a pool in slots."""

    def __init__(self, pool: KvPool, name: PackedName) -> None:
        """Compiles the kernels: some seconds, where the compiler has not kept them. A first load
        would wait for that, and reach its deadline. Raises ValueError as `packed_format`."""
        form = packed_format(name, pool.format.shard)
        self.block_bytes, self.fidelity = form.block_bytes, form.fidelity
        self._name = name
        self._shards = [shard.data for shard in pool.shards]
        for shard in self._shards:
            on = torch.cuda.device(shard.device) if shard.is_cuda else contextlib.nullcontext()
            with on:
                self._compile(shard)

    def pack(self, blocks: torch.Tensor, out: torch.Tensor, lane: int) -> torch.Tensor:
        """See `BatchPacker`."""
        from kernels.gpu.kv_formats import pack_blocks

        return pack_blocks(self._shards[lane], blocks, self._name, out)

    def unpack(self, packed: torch.Tensor, blocks: torch.Tensor, lane: int) -> None:
        """See `BatchPacker`."""
        from kernels.gpu.kv_formats import unpack_blocks

        unpack_blocks(packed, self._name, self._shards[lane], blocks)

    def _compile(self, shard: torch.Tensor) -> None:
        """Pack a block that is not the pool's, and back."""
        from kernels.gpu.kv_formats import pack_blocks, unpack_blocks

        with torch.inference_mode():
            scratch = torch.zeros_like(shard[:1])
            ids = torch.zeros(1, dtype=torch.int32, device=scratch.device)
            size = (1, self.block_bytes)
            packed = torch.empty(size, dtype=torch.uint8, device=scratch.device)
            pack_blocks(scratch, ids, self._name, packed)
            unpack_blocks(packed, self._name, scratch, ids)


def gpu_packers_of(pool: KvPool, names: Sequence[PackedName]) -> dict[str, BatchPacker]:
    """Return a packer for each of these formats that fits the pool, by name; none for latents and
    int8 pools."""
    found: dict[str, BatchPacker] = {}
    for name in names:
        with contextlib.suppress(ValueError):
            found[name] = GpuPacker(pool, name)
    return found
