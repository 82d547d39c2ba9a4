"""CUDA graphs of decode steps: each captured once, and replayed from then on.

It knows no row and no model: what it captures is a call whose inputs and results stay where they
are in the device's memory. Only `engine.runner.gpu_runner` calls it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Key = tuple[int, tuple[int, ...], bool]
"""Batch bucket, tile classes, and whether parts are merged."""


class CudaGraphs:
    """Captured calls by key, in one memory pool."""

    def __init__(self) -> None:
        self._captured: dict[Key, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None

    def __contains__(self, key: Key) -> bool:
        return key in self._captured

    def capture(self, key: Key, compute: Callable[[], torch.Tensor]) -> None:
        """Run `compute` once, so that everything it needs is compiled, and capture it. Waits for
        the device. Raises what `compute` or the capture raises; then nothing is captured."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with nothing_collected(), torch.cuda.graph(graph, pool=self._pool):
            result = compute()
        self._pool = graph.pool()
        self._captured[key] = graph, result

    def replay(self, key: Key) -> torch.Tensor:
        """Launch a captured call; its result, which the next replay writes over."""
        graph, result = self._captured[key]
        graph.replay()
        return result


@contextmanager
def nothing_collected() -> Iterator[None]:
    """No garbage is collected meanwhile, in any thread, and as before afterwards.

    Garbage may hold a graph, an event or pinned memory, and giving one of these back while
    anything is being captured breaks the capture: "operation not permitted when stream is
    capturing".
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
