"""What a transfer engine asks of a GPU: streams beside the steps, and pinned host memory.

These few calls are all that it knows of CUDA, so that its threads, batches and failures are tested
without a device, over a fake in plain memory.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch


class Copies(NamedTuple):
    """Copies between device memory and pinned host memory: for each one where it begins in both,
    and its bytes. `device`, `host`: all bytes of each side, uint8.
    """

    device: torch.Tensor
    host: torch.Tensor
    device_starts: Sequence[int]
    host_starts: Sequence[int]
    sizes: Sequence[int]


class CopyMark(Protocol):
    """The end of what one launch of a stream began."""

    def wait(self) -> float:
        """Wait for it, without using the processor; return the seconds that the device took for
        the launch, without what it did before. Raises RuntimeError if the device has failed."""


class CopyStream(Protocol):
    """Work that a device does in order, beside the steps."""

    def launch(self, work: Callable[[], None]) -> CopyMark:
        """Begin what `work` launches, behind all that was launched before; return its end.

        What `work` raises is raised when nothing that it launched runs any more.
        """

    def copy(self, copies: Copies, *, is_load: bool) -> None:
        """Launch copies; only `work` calls it. `is_load`: to the device. No copy may cross from one
        piece of host memory that was pinned to the next."""


class CopyDevice(Protocol):
    """A device with memory of its own."""

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors are."""

    def stream(self) -> CopyStream:
        """Return a new stream."""

    def pin(self, address: int, size: int) -> None:
        """Make host memory reachable for copies at full speed. Raises RuntimeError."""

    def unpin(self, address: int) -> None:
        """Take back `pin` of the memory that begins here. Raises RuntimeError."""


class CudaMark:
    """`CopyMark` by two events, whose waiter sleeps."""

    def __init__(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._begin, self._end = begin, end

    def wait(self) -> float:
        """See `CopyMark`."""
        self._end.synchronize()
        milliseconds: float = self._begin.elapsed_time(self._end)
        return milliseconds / 1e3


class CudaStream:
    """`CopyStream` by a stream of the least priority, which is that of torch's own streams.

    The graphs of steps are captured at a higher one (`engine.runner.cuda_graphs`), so what runs
    here on multiprocessors gives way to them. Copy engines know no priority.
    """

    def __init__(self, device: torch.device, batch: BatchCopy | None) -> None:
        """`batch`: the runtime's call for many copies; None: a call of torch's for each."""
        self._stream = torch.cuda.Stream(device, priority=0)
        self._batch = batch

    def launch(self, work: Callable[[], None]) -> CudaMark:
        """See `CopyStream`."""
        begin, end = (torch.cuda.Event(blocking=True, enable_timing=True) for _ in range(2))
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            begin.record()
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error says more
                    self._stream.synchronize()
                raise
            end.record()
        return CudaMark(begin, end)

    def copy(self, copies: Copies, *, is_load: bool) -> None:
        """See `CopyStream`."""
        if self._batch is not None:
            self._batch.launch(copies, self._stream, is_load=is_load)
        else:
            copy_each(copies, is_load=is_load)


class CudaDevice:
    """`CopyDevice` by public calls of the CUDA runtime, on a GPU that the engine uses."""

    PORTABLE = 1
    """Memory that is pinned so is pinned for all GPUs of the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._batch = BatchCopy.of_runtime()

    @property
    def torch_device(self) -> torch.device:
        """See `CopyDevice`."""
        return self._device

    def stream(self) -> CudaStream:
        """See `CopyDevice`."""
        return CudaStream(self._device, self._batch)

    def pin(self, address: int, size: int) -> None:
        """See `CopyDevice`. Releases the GIL.

        While it runs no launch of any thread goes on: 0.05 ms a MiB whose pages are there, 0.4 a
        MiB that has yet to get pages. An error stays the last one of this thread, and torch would
        report it once more: a thread that pins launches nothing.
        """
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, self.PORTABLE))

    def unpin(self, address: int) -> None:
        """See `CopyDevice`. 0.015 ms a MiB."""
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


def copy_each(copies: Copies, *, is_load: bool) -> None:
    """Launch copies one by one, 10 us each, on torch's current stream."""
    for device_start, host_start, size in zip(*copies[2:], strict=True):
        on_device = copies.device[device_start : device_start + size]
        on_host = copies.host[host_start : host_start + size]
        target, source = (on_device, on_host) if is_load else (on_host, on_device)
        target.copy_(source, non_blocking=True)


class _Location(ctypes.Structure):
    """`cudaMemLocation`; not looked at for the memory of these copies."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """`cudaMemcpyAttributes`. `order` 1: sources are read in the stream's order."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


class BatchCopy:
    """`cudaMemcpyBatchAsync`: one call for many copies, 0.6 us each.

    Calls of torch for each copy hold the GIL for most of that time, so that the step's thread and
    the two directions' get in each other's way: 29 GB/s a direction instead of 50.
    """

    MAJOR = 13
    """The version of CUDA from which on the call has these arguments."""

    def __init__(self, function: Callable[..., int]) -> None:
        self._function = function
        self._attributes = _Attributes(order=1)
        self._first = ctypes.c_size_t(0)

    @classmethod
    def of_runtime(cls) -> BatchCopy | None:
        """Return the call of the runtime that torch has loaded; None if it is older."""
        major = int((torch.version.cuda or "0").split(".")[0])
        if major < cls.MAJOR:
            return None
        try:
            library = ctypes.CDLL(f"libcudart.so.{major}")
            found: Any = library.cudaMemcpyBatchAsync
        except (OSError, AttributeError):
            return None
        found.restype = ctypes.c_int
        return cls(found)

    def launch(self, copies: Copies, stream: torch.cuda.Stream, *, is_load: bool) -> None:
        """Launch copies on a stream. Raises RuntimeError."""
        on_device = np.array(copies.device_starts, np.uint64) + np.uint64(copies.device.data_ptr())
        on_host = np.array(copies.host_starts, np.uint64) + np.uint64(copies.host.data_ptr())
        sizes = np.array(copies.sizes, np.uint64)
        targets, sources = (on_device, on_host) if is_load else (on_host, on_device)
        self.launch_addresses(targets, sources, sizes, stream)

    def launch_addresses(
        self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: torch.cuda.Stream
    ) -> None:
        """Launch copies of `sizes` bytes on a stream; addresses and sizes [copies], uint64. Raises
        RuntimeError."""
        error = self._function(
            ctypes.c_void_p(targets.ctypes.data),
            ctypes.c_void_p(sources.ctypes.data),
            ctypes.c_void_p(sizes.ctypes.data),
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(self._attributes),
            ctypes.byref(self._first),
            ctypes.c_size_t(1),
            ctypes.c_void_p(stream.cuda_stream),
        )
        torch.cuda.check_error(error)
