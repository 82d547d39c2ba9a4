"""The device pools of one host's engines, between which blocks are copied without its network.

A pool of a CPU engine is a memory file, which another process of the same user maps. A pool of a
GPU is opened by a handle of CUDA's interprocess memory, and its blocks are copied from GPU to GPU.
Pools of lanes cannot be read so. This module knows no prefix, and not whether what it reads is held
there: `engine.levels.peers` does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np
import torch
from msgspec import Struct

from engine.kv.copy_device import BatchCopy
from engine.kv.storage import KvPool, KvStorage
from engine.moves import NearPools

POOLS_MAX: Final = 16
"""Other pools that are kept open."""


class PoolHandle(Struct, frozen=True):
    """Where a pool is found. `process`, `fd`, `inode`: of a memory file; `ipc`: CUDA's handle of
    the memory in which the pool begins at `offset`."""

    block_bytes: int
    blocks: int
    process: int = 0
    fd: int = 0
    inode: int = 0
    ipc: bytes = b""
    offset: int = 0


def near_pools(kv: KvPool) -> NearPools | None:
    """Return the pools of this host, beside an engine's own; None where it cannot be read: it has
    lanes, or the system gives no handle."""
    if not isinstance(kv, KvStorage):
        return None
    with suppress(OSError, RuntimeError, AttributeError):
        return CudaPools(kv) if kv.data.is_cuda else CpuPools(kv)
    return None


Opened = TypeVar("Opened")


class _Pools(Generic[Opened]):
    """`NearPools` over what opens a pool. One thread reads at a time."""

    bytes_per_s: float

    def __init__(self, kind: str, own: PoolHandle) -> None:
        self._own = own
        self.domain = f"{kind} {_host()}"
        self.handle = msgspec.msgpack.encode(own)
        self._lock = threading.Lock()
        self._opened: dict[bytes, Opened] = {}

    def read(self, handle: bytes, theirs: Sequence[int], ours: Sequence[int]) -> None:
        """See `NearPools`."""
        if len(theirs) != len(ours) or not theirs:
            raise ValueError(f"{len(theirs)} blocks for {len(ours)}; expected as many")
        with self._lock:
            found = msgspec.msgpack.decode(handle, type=PoolHandle)
            if found.block_bytes != self._own.block_bytes:
                size = self._own.block_bytes
                raise ValueError(f"blocks of {found.block_bytes} bytes; expected {size}")
            for blocks, pool in ((theirs, found), (ours, self._own)):
                if min(blocks) < 0 or max(blocks) >= pool.blocks:
                    raise ValueError(
                        f"blocks up to {max(blocks)}; expected less than {pool.blocks}"
                    )
            if handle not in self._opened:
                while len(self._opened) >= POOLS_MAX:
                    self._close_pool(self._opened.pop(next(iter(self._opened))))
                self._opened[handle] = self._open_pool(found)
            self._copy(self._opened[handle], theirs, ours)

    def close(self) -> None:
        """See `NearPools`."""
        with self._lock:
            for pool in self._opened.values():
                self._close_pool(pool)
            self._opened.clear()

    def _open_pool(self, found: PoolHandle) -> Opened:
        """Return another engine's pool. Raises OSError, RuntimeError."""
        raise NotImplementedError

    def _copy(self, pool: Opened, theirs: Sequence[int], ours: Sequence[int]) -> None:
        """Copy blocks, and wait for that. Raises RuntimeError."""
        raise NotImplementedError

    def _close_pool(self, pool: Opened) -> None:
        """Let a pool go."""
        raise NotImplementedError


class CpuPools(_Pools[np.ndarray]):
    """Pools in memory files. A block is copied at the rate of the host's memory, without the
    GIL."""

    bytes_per_s = 4e9

    def __init__(self, kv: KvStorage) -> None:
        """Raises OSError for a pool that is in no file."""
        if kv.memory_fd < 0:
            raise OSError("the pool is in no memory file")
        size, inode = kv.format.block_bytes, os.fstat(kv.memory_fd).st_ino
        self._bytes = kv.data.view(torch.uint8).numpy().reshape(len(kv.data), size)
        own = PoolHandle(size, len(kv.data), os.getpid(), kv.memory_fd, inode)
        super().__init__("cpu", own)

    def _open_pool(self, found: PoolHandle) -> np.ndarray:
        size = found.blocks * found.block_bytes
        with Path(f"/proc/{found.process}/fd/{found.fd}").open("rb", buffering=0) as file:
            told = os.fstat(file.fileno())
            if told.st_ino != found.inode or told.st_size < size:
                raise OSError("the engine of that pool has ended")
            memory = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ)
        return np.frombuffer(memory, np.uint8).reshape(found.blocks, found.block_bytes)

    def _copy(self, pool: np.ndarray, theirs: Sequence[int], ours: Sequence[int]) -> None:
        for source, target in zip(theirs, ours, strict=True):
            self._bytes[target] = pool[source]

    def _close_pool(self, pool: np.ndarray) -> None:
        """The map ends with the array."""


class _IpcHandle(ctypes.Structure):
    """`cudaIpcMemHandle_t`."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class CudaPools(_Pools[tuple[int, int]]):
    """Pools of GPUs, by CUDA's handles for other processes; an opened one is the address here of
    its memory, and of its first block.

    The GPUs may see only themselves. Copies are those of copy engines, beside the steps: 1 GiB in
    about 3 ms over NVLink.
    """

    bytes_per_s = 100e9
    LAZY_PEER_ACCESS = 1
    DEFAULT_KIND = 4
    """`cudaMemcpyDefault`: by the addresses."""

    def __init__(self, kv: KvStorage) -> None:
        """Raises RuntimeError or OSError where CUDA gives no handle, as for memory that is mapped
        piece by piece (`expandable_segments`)."""
        self._device, self._start = kv.data.device, kv.data.data_ptr()
        self._runtime: Any = ctypes.CDLL(
            f"libcudart.so.{(torch.version.cuda or '0').split('.')[0]}"
        )
        self._batch = BatchCopy.of_runtime()
        base, handle = ctypes.c_uint64(), _IpcHandle()
        driver, start = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(self._start)
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device, priority=0)
            self._check(driver.cuMemGetAddressRange_v2(ctypes.byref(base), None, start))
            address = ctypes.c_void_p(base.value)
            self._check(self._runtime.cudaIpcGetMemHandle(ctypes.byref(handle), address))
        size, offset = kv.format.block_bytes, self._start - base.value
        own = PoolHandle(size, len(kv.data), ipc=bytes(handle.reserved), offset=offset)
        super().__init__(f"cuda {torch.version.cuda}", own)

    def _check(self, error: int) -> None:
        """Raise RuntimeError for an error, and clear it: torch would report it once more."""
        if error:
            self._runtime.cudaGetLastError()
            raise RuntimeError(f"CUDA error {error}")

    def _open_pool(self, found: PoolHandle) -> tuple[int, int]:
        handle, address = _IpcHandle.from_buffer_copy(found.ipc), ctypes.c_void_p()
        flags = ctypes.c_uint(self.LAZY_PEER_ACCESS)
        with torch.cuda.device(self._device):
            error = self._runtime.cudaIpcOpenMemHandle(ctypes.byref(address), handle, flags)
            self._check(error)
        base = address.value or 0
        return base, base + found.offset

    def _copy(self, pool: tuple[int, int], theirs: Sequence[int], ours: Sequence[int]) -> None:
        size = self._own.block_bytes
        sources = np.array(theirs, np.uint64) * np.uint64(size) + np.uint64(pool[1])
        targets = np.array(ours, np.uint64) * np.uint64(size) + np.uint64(self._start)
        sizes = np.full(len(theirs), size, np.uint64)
        with torch.cuda.device(self._device):
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

    def _close_pool(self, pool: tuple[int, int]) -> None:
        with torch.cuda.device(self._device):
            self._runtime.cudaIpcCloseMemHandle(ctypes.c_void_p(pool[0]))


def _host() -> str:
    """Return what names the machine, the user and the namespaces of processes: engines in equal
    ones find each other's memory. Raises OSError."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    spaces = [Path(f"/proc/self/ns/{name}").stat().st_ino for name in ("pid", "ipc", "user")]
    return f"{boot} {os.getuid()} {'.'.join(map(str, spaces))}"
