"""The device pools of one host's engines, between which blocks are copied without its network.

A pool of a CPU engine is a memory file, which another process of the same user reads. A pool of a
GPU is opened by a handle of CUDA's interprocess memory, and its blocks are copied from GPU to GPU.
Pools of lanes cannot be read so. This module knows no prefix, and not whether what it reads is held
there: `engine.levels.peers` does.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta, Struct

from engine.kv.copy_device import BatchCopy
from engine.kv.storage import KvPool, KvStorage
from engine.moves import NearPools

POOLS_MAX: Final = 16
"""Other pools that are kept open."""


class PoolHandle(Struct, frozen=True):
    """Where a pool is found. `process`: of its engine; `nonce`: drawn at its start. `fd`, `inode`:
    of a memory file. `ipc`: CUDA's handle of the memory in which the pool begins at `offset`."""

    block_bytes: Annotated[int, Meta(gt=0)]
    blocks: Annotated[int, Meta(gt=0)]
    process: Annotated[int, Meta(gt=0)]
    nonce: bytes
    fd: int = -1
    inode: int = 0
    ipc: bytes = b""
    offset: Annotated[int, Meta(ge=0, lt=2**48)] = 0

    @property
    def size(self) -> int:
        """Return the bytes of the pool."""
        return self.blocks * self.block_bytes


def near_pools(kv: KvPool) -> NearPools | None:
    """Return the pools of this host, beside an engine's own; None where it cannot be read: it has
    lanes, or the system gives no handle."""
    if not isinstance(kv, KvStorage):
        return None
    with suppress(OSError, RuntimeError, AttributeError):
        return CudaPools(kv) if kv.data.is_cuda else CpuPools(kv)
    return None


def found_pool(
    own: PoolHandle, handle: bytes, theirs: Sequence[int], ours: Sequence[int]
) -> PoolHandle:
    """Return the pool of a handle, if its blocks can be copied so. Raises ValueError."""
    found = msgspec.msgpack.decode(handle, type=PoolHandle)
    if len(theirs) != len(ours) or not theirs:
        raise ValueError(f"{len(theirs)} blocks for {len(ours)}; expected as many")
    if found.block_bytes != own.block_bytes:
        raise ValueError(f"blocks of {found.block_bytes} bytes; expected {own.block_bytes}")
    for blocks, pool in ((theirs, found), (ours, own)):
        if min(blocks) < 0 or max(blocks) >= pool.blocks:
            raise ValueError(f"blocks up to {max(blocks)}; expected less than {pool.blocks}")
    return found


class CpuPools:
    """`NearPools` in memory files. They are read at the rate of the host's memory, without the
    GIL, and nothing stays open."""

    bytes_per_s = 4e9

    def __init__(self, kv: KvStorage) -> None:
        """Raises OSError for a pool that is in no file."""
        size, inode = kv.format.block_bytes, os.fstat(kv.memory_fd).st_ino
        self._bytes = kv.data.view(torch.uint8).numpy().reshape(len(kv.data), size)
        what = size, len(kv.data), os.getpid(), secrets.token_bytes(8)
        self._own = PoolHandle(*what, kv.memory_fd, inode)
        self.domain, self.handle = f"cpu {_host()}", msgspec.msgpack.encode(self._own)

    def read(self, handle: bytes, theirs: Sequence[int], ours: Sequence[int]) -> None:
        """See `NearPools`."""
        found = found_pool(self._own, handle, theirs, ours)
        fd = os.open(f"/proc/{found.process}/fd/{found.fd}", os.O_RDONLY | os.O_NONBLOCK)
        try:
            told = os.fstat(fd)
            if told.st_ino != found.inode or told.st_size < found.size:
                raise OSError("the engine of that pool has ended")
            for source, target in zip(theirs, ours, strict=True):
                row = self._bytes[target]
                if os.preadv(fd, [row], source * found.block_bytes) != found.block_bytes:
                    raise OSError("a block was read in part")
        finally:
            os.close(fd)

    def let_go_ended(self) -> None:
        """See `NearPools`."""

    def close(self) -> None:
        """See `NearPools`."""


class _IpcHandle(ctypes.Structure):
    """`cudaIpcMemHandle_t`."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class _OpenPool(NamedTuple):
    """A pool that is open here: the address of its memory, that of its first block, and a
    descriptor that can be read once its engine has ended."""

    base: int
    start: int
    pidfd: int


class CudaPools:
    """`NearPools` of GPUs, by CUDA's handles for other processes. One thread reads at a time.

    The GPUs may see only themselves. Copies are those of copy engines, beside the steps: 1 GiB in
    about 3 ms over NVLink. What is open keeps the memory of an engine that has ended.
    """

    bytes_per_s = 100e9
    LAZY_PEER_ACCESS = 1
    DEFAULT_KIND = 4
    """`cudaMemcpyDefault`: by the addresses."""

    def __init__(self, kv: KvStorage) -> None:
        """Raises RuntimeError or OSError where CUDA gives no handle, as for memory that is mapped
        piece by piece (`expandable_segments`)."""
        self._kv, self._device, self._start = kv, kv.data.device, kv.data.data_ptr()
        self._runtime: Any = ctypes.CDLL(
            f"libcudart.so.{(torch.version.cuda or '0').split('.')[0]}"
        )
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        self._batch = BatchCopy.of_runtime()
        self._lock = threading.Lock()
        self._opened: dict[bytes, _OpenPool] = {}
        handle = _IpcHandle()
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device, priority=0)
            base, _ = self._range_of(self._start)
            address = ctypes.c_void_p(base)
            self._check(self._runtime.cudaIpcGetMemHandle(ctypes.byref(handle), address))
        what = kv.format.block_bytes, len(kv.data), os.getpid(), secrets.token_bytes(8)
        ipc, offset = bytes(handle.reserved), self._start - base
        self._own = PoolHandle(*what, ipc=ipc, offset=offset)
        self.handle = msgspec.msgpack.encode(self._own)
        self.domain = f"cuda {torch.version.cuda} {_host()}"

    def read(self, handle: bytes, theirs: Sequence[int], ours: Sequence[int]) -> None:
        """See `NearPools`."""
        found = found_pool(self._own, handle, theirs, ours)
        with self._lock, torch.cuda.device(self._device):
            if handle not in self._opened:
                while len(self._opened) >= POOLS_MAX:
                    self._let_go(next(iter(self._opened)))
                self._opened[handle] = self._open(found)
            self._copy(self._opened[handle].start, theirs, ours)

    def let_go_ended(self) -> None:
        """See `NearPools`."""
        if not self._opened or not self._lock.acquire(blocking=False):
            return
        try:
            for handle, pool in list(self._opened.items()):
                if select.select([pool.pidfd], [], [], 0)[0]:
                    self._let_go(handle)
        finally:
            self._lock.release()

    def close(self) -> None:
        """See `NearPools`."""
        with self._lock:
            for handle in list(self._opened):
                self._let_go(handle)

    def _range_of(self, address: int) -> tuple[int, int]:
        """Return where the memory at an address begins, and its bytes. Raises RuntimeError."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        where = ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
        self._check(self._driver.cuMemGetAddressRange_v2(*where))
        return base.value, size.value

    def _check(self, error: int) -> None:
        """Raise RuntimeError for an error, and clear it: torch would report it once more."""
        if error:
            self._runtime.cudaGetLastError()
            raise RuntimeError(f"CUDA error {error}")

    def _open(self, found: PoolHandle) -> _OpenPool:
        """Open another engine's pool. Raises OSError, RuntimeError."""
        handle, address = _IpcHandle.from_buffer_copy(found.ipc), ctypes.c_void_p()
        flags, pidfd = ctypes.c_uint(self.LAZY_PEER_ACCESS), os.pidfd_open(found.process)
        try:
            error = self._runtime.cudaIpcOpenMemHandle(ctypes.byref(address), handle, flags)
            self._check(error)
        except RuntimeError:
            os.close(pidfd)
            raise
        base = address.value or 0
        pool = _OpenPool(base, base + found.offset, pidfd)
        if found.offset + found.size > self._range_of(base)[1]:
            self._close_pool(pool)
            raise ValueError(f"a pool of {found.size} bytes; expected one within its memory")
        return pool

    def _copy(self, start: int, theirs: Sequence[int], ours: Sequence[int]) -> None:
        """Copy blocks of the pool that begins at `start`, and wait. Raises RuntimeError."""
        size = self._own.block_bytes
        sources = np.array(theirs, np.uint64) * np.uint64(size) + np.uint64(start)
        targets = np.array(ours, np.uint64) * np.uint64(size) + np.uint64(self._start)
        sizes = np.full(len(theirs), size, np.uint64)
        if self._batch is not None:
            self._batch.launch_addresses(targets, sources, sizes, self._stream)
        else:
            self._copy_each(targets, sources)
        end = torch.cuda.Event(blocking=True)
        end.record(self._stream)
        end.synchronize()

    def _copy_each(self, targets: np.ndarray, sources: np.ndarray) -> None:
        """Launch copies one by one. Raises RuntimeError."""
        size, stream = ctypes.c_size_t(self._own.block_bytes), self._stream.cuda_stream
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            ends = ctypes.c_void_p(target), ctypes.c_void_p(source)
            kind = ctypes.c_int(self.DEFAULT_KIND)
            self._check(self._runtime.cudaMemcpyAsync(*ends, size, kind, ctypes.c_void_p(stream)))

    def _let_go(self, handle: bytes) -> None:
        self._close_pool(self._opened.pop(handle))

    def _close_pool(self, pool: _OpenPool) -> None:
        with torch.cuda.device(self._device):
            self._runtime.cudaIpcCloseMemHandle(ctypes.c_void_p(pool.base))
            self._runtime.cudaGetLastError()
        os.close(pool.pidfd)


def _host() -> str:
    """Return what names the machine, the user and the namespaces of processes: engines in equal
    ones find each other's memory. Raises OSError."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    spaces = [Path(f"/proc/self/ns/{name}").stat().st_ino for name in ("pid", "ipc", "user")]
    return f"{boot} {os.getuid()} {'.'.join(map(str, spaces))}"
