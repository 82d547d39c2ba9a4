"""KV storage: one tensor of blocks, and the format that says what a block is made of.

Block outermost, `[block, layer, K/V, kv_head, slot, head_dim]`, so that a block is one contiguous
piece to copy, offload, store and drop. It knows no sequence and no tree. The runner owns it.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Literal

import torch
from msgspec import Struct

from engine.model_store import ModelConfig
from engine.plan import BlockCopy


class KvFormat(Struct, frozen=True):
    """What a block holds. `name` is part of a namespace: other bits never meet these.

    `layout`: `slots`, [slot, head_dim] for each head; or `panels`, the order in which the C kernels
    read keys and values (kernels/cpu/cpu_attention.c), in which a slot is no run of memory.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    bytes_per_value: int
    layout: Literal["slots", "panels"] = "slots"

    @property
    def block_bytes(self) -> int:
        values = self.layers * 2 * self.kv_heads * self.block_size * self.head_dim
        return values * self.bytes_per_value


def kv_format(
    config: ModelConfig,
    dtype: torch.dtype,
    block_size: int,
    layout: Literal["slots", "panels"] = "slots",
) -> KvFormat:
    """The plain format: keys after rotation and values as they are, in `dtype`."""
    name = str(dtype).removeprefix("torch.")
    return KvFormat(
        name=name if layout == "slots" else f"{name}-{layout}",
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        bytes_per_value=dtype.itemsize,
        layout=layout,
    )


class KvStorage:
    """`blocks` blocks of one format on one device. `data` is [B, L, 2, K, S, D] (of `panels`, its
    size alone).

    Zeroed at the start: tiles read whole runs of slots and mask afterwards, so every slot must be
    finite.
    """

    def __init__(
        self, form: KvFormat, blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.form = form
        shape = (blocks, form.layers, 2, form.kv_heads, form.block_size, form.head_dim)
        if device.type == "cpu":
            self.data = _untouched_zeros(shape, dtype)
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=device)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Run copies in order: the first `tokens` slots of each source, all layers.

        Of `panels` the whole block: what lies beyond is finite, and never seen.
        """
        if not copies:
            return
        if self.data.is_cuda:
            self._copy_on_device(copies)
            return
        for copy in copies:
            if self.form.layout == "panels":
                self.data[copy.dst] = self.data[copy.src]
                continue
            filled = self.data[copy.src, :, :, :, : copy.tokens]
            self.data[copy.dst, :, :, :, : copy.tokens] = filled

    def _copy_on_device(self, copies: Sequence[BlockCopy]) -> None:
        """In runs in which no block is both source and target: a kernel copies all at once."""
        from kernels.gpu.fused_ops import copy_blocks

        run: list[tuple[int, int, int]] = []
        targets: set[int] = set()
        for copy in copies:
            if copy.src in targets:
                copy_blocks(self.data, _on_device(run, self.data.device))
                run, targets = [], set()
            run.append((copy.src, copy.dst, copy.tokens))
            targets.add(copy.dst)
        copy_blocks(self.data, _on_device(run, self.data.device))


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that the system hands out page by page as they are first touched, so that no start
    waits for a pool to be written. Small pages: where 512 of the large ones make a GiB, each has
    been seen to take 4 ms to find, five times as long for all of it."""
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _on_device(rows: list[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32).pin_memory().to(device, non_blocking=True)
