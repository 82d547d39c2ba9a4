"""KV storage: the tensor of blocks on one device, and copies between blocks.

It knows no sequence and no prefix tree. A runner owns one storage; attention backends and the C
model read and write `data`.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence

import torch

from engine.kv.format import KvFormat
from engine.plan import BlockCopy


class KvStorage:
    """`blocks` blocks of one format on one device, all zero at the start.

    `data` is [B, L, 2, K, S, D] (`KvFormat.storage_shape`). In the `panels` layout only its size
    and its first dimension mean anything; in an int8 pool S and D are mixed with the scales. Every
    slot must hold finite values at all times: kernels read whole tiles of slots and mask
    afterwards. `memory_fd`: of the file that it lies in, on a CPU; below 0 without one.
    """

    def __init__(self, kv_format: KvFormat, blocks: int, device: torch.device) -> None:
        self.format = kv_format
        shape = kv_format.storage_shape(blocks)
        self.memory_fd = -1
        if device.type == "cpu":
            self.memory_fd = _memory_file(math.prod(shape) * kv_format.dtype.itemsize)
            self.data = _lazy_zeros(self.memory_fd, shape, kv_format.dtype)
            if self.memory_fd >= 0:
                weakref.finalize(self, os.close, self.memory_fd)
        else:
            self.data = torch.zeros(shape, dtype=kv_format.dtype, device=device)

    @property
    def shards(self) -> tuple[KvStorage, ...]:
        """The storages of all lanes: this one."""
        return (self,)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Run copies in order: the first `tokens` slots of each source block, all layers.

        In the `panels` layout and in int8 pools whole blocks are copied: the slots beyond are
        finite and no sequence reads them before it writes them.
        """
        if not copies:
            return
        if self.data.is_cuda:
            self._copy_on_gpu(copies)
            return
        for copy in copies:
            if self.format.copies_whole_blocks:
                self.data[copy.dst] = self.data[copy.src]
                continue
            filled = self.data[copy.src, :, :, :, : copy.tokens]
            self.data[copy.dst, :, :, :, : copy.tokens] = filled

    def _copy_on_gpu(self, copies: Sequence[BlockCopy]) -> None:
        """Launch one kernel for each run of copies."""
        from kernels.gpu.fused_ops import copy_blocks

        form = self.format
        for run in runs_of(copies):
            rows = [
                (copy.src, copy.dst, form.block_size if form.copies_whole_blocks else copy.tokens)
                for copy in run
            ]
            copy_blocks(self.data, _to_gpu(rows, self.data.device))


class KvShards:
    """Blocks that the lanes of an engine share: a storage on each, of a block's shards."""

    def __init__(self, kv_format: KvFormat, shards: Sequence[KvStorage]) -> None:
        """`kv_format`: of a whole block."""
        self.format = kv_format
        self.shards = tuple(shards)


KvPool = KvStorage | KvShards
"""The memory of an engine's blocks, on one device or on several."""


def runs_of(copies: Sequence[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """Yield copies, in order, in runs that may be made at once: no block of a run is written twice,
    or both read and written.
    """
    run: list[BlockCopy] = []
    read: set[int] = set()
    written: set[int] = set()
    for copy in copies:
        if copy.src in written or copy.dst in written or copy.dst in read:
            yield run
            run, read, written = [], set(), set()
        run.append(copy)
        read.add(copy.src)
        written.add(copy.dst)
    yield run


def _memory_file(size: int) -> int:
    """Return an anonymous file of zeros, which other processes of the user can read; no longer
    or shorter from then on. Below 0 where the system has none. Raises OSError where it would
    not give as much memory to one process."""
    private = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    private.close()  # a file of any size can be made
    if not hasattr(os, "memfd_create"):
        return -1
    fd = os.memfd_create("trunkline-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def _lazy_zeros(fd: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a file's zeros, or private ones without a file. The operating system maps their pages
    on first touch, so that a start does not wait for the whole pool to be written.

    Pages of the default size: with huge pages, finding each of the 512 in a GiB has been seen to
    take 4 ms, five times as long as small pages take for the whole GiB.
    """
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(fd, math.prod(shape) * dtype.itemsize, flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _to_gpu(rows: list[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32).pin_memory().to(device, non_blocking=True)
