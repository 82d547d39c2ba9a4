"""CUDA graphs of steps, each captured once and replayed from then on.

It knows no row and no model: it captures any call with inputs and a result at fixed GPU addresses.
Only `engine.runner.gpu_runner` calls it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

PRIORITY = -1
"""Of the stream that graphs are captured on, and so of their kernels: above that of the streams
that torch hands out in turn, 0. What packs blocks beside a step gives way to it."""


class CudaGraphs:
    """Captured graphs by key, in one memory pool.

    Graphs use the same memory, their results too, so a result is valid until the next replay.
    Capture the graph that needs the most memory first: the others then fit into its memory.
    """

    def __init__(self) -> None:
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    def warm(self, compute: Callable[[], torch.Tensor]) -> None:
        """Run what is to be captured once, so that its kernels are compiled."""
        stream = self._stream = self._stream or torch.cuda.Stream(priority=PRIORITY)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self, key: Hashable, compute: Callable[[], torch.Tensor]) -> None:
        """Capture `compute`, which `warm` has run.

        Waits for the GPU. Raises what the capture raises; then no graph is kept. Other threads may
        copy and pin memory meanwhile: only this thread's calls are captured, and its stream is of a
        priority that no other stream has, so it is no stream of theirs.
        """
        stream = self._stream = self._stream or torch.cuda.Stream(priority=PRIORITY)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # This thread's first product on a device makes a handle, which no capture may.
            torch.cuda.current_blas_handle()
        with (
            gc_paused(),
            torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            ),
        ):
            result = compute()
        self._pool = graph.pool()
        self._captured[key] = graph, alias(result) if result.is_cuda else result

    def replay(self, key: Hashable) -> torch.Tensor:
        """Launch a captured graph and return its result, which the next replay overwrites."""
        graph, result = self._captured[key]
        graph.replay()
        return result


class _Memory:
    """GPU memory by address, as `__cuda_array_interface__` describes it; not kept alive."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous GPU tensor's values at the same address, without keeping the memory.

    Otherwise each graph's result would keep memory of its own, which other graphs could not use.
    """
    integers = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    memory = _Memory(integers.__cuda_array_interface__)
    return torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection in all threads; restore the former state afterwards.

    Garbage may hold a graph, an event or pinned memory. Freeing one of these during a capture
    breaks the capture: "operation not permitted when stream is capturing".
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
