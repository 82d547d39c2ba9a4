"""CUDA graphs of decode steps, each captured once and replayed from then on.

It knows no row and no model: it captures any call whose inputs and result stay at fixed GPU
addresses. Only `engine.runner.gpu_runner` calls it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

GraphKey = tuple[int, tuple[int, ...], bool]
"""Batch bucket, tile classes, and whether parts are merged."""


class CudaGraphs:
    """Captured graphs by key, in one memory pool."""

    def __init__(self) -> None:
        self._captured: dict[GraphKey, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._captured

    def capture(self, key: GraphKey, compute: Callable[[], torch.Tensor]) -> None:
        """Run `compute` once, so that its kernels are compiled, and capture it.

        Waits for the GPU. Raises what `compute` or the capture raises; then no graph is kept.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with gc_paused(), torch.cuda.graph(graph, pool=self._pool):
            result = compute()
        self._pool = graph.pool()
        self._captured[key] = graph, result

    def replay(self, key: GraphKey) -> torch.Tensor:
        """Launch a captured graph and return its result, which the next replay overwrites."""
        graph, result = self._captured[key]
        graph.replay()
        return result


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
