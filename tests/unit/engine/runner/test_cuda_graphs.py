"""Capture and replay of CUDA graphs without a GPU: `torch.cuda` is replaced by a fake."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.runner.cuda_graphs import PRIORITY, CudaGraphs

KEY = (8, (2,), False)


class FakeTorchCuda:
    """Fake `torch.cuda`: during a capture it makes garbage and lets the collector run as often as
    possible."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_capturing = False
        self.pools: list[object] = []
        self.collected = 0
        self.has_handle = False
        self.priorities: list[int] = []
        self.modes: list[str] = []
        for name in ("current_stream", "CUDAGraph"):
            monkeypatch.setattr(torch.cuda, name, lambda: self)
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_blas_handle", self.make_handle)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    def new_stream(self, priority: int) -> FakeTorchCuda:
        self.priorities.append(priority)
        return self

    def make_handle(self) -> int:
        assert not self.is_capturing, "a capture may not make one"
        self.has_handle = True
        return 1

    def wait_stream(self, stream: object) -> None:
        """Do nothing."""

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        self.pools.append("replayed")

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        yield

    @contextmanager
    def graph(
        self, graph: object, pool: object, stream: object, capture_error_mode: str
    ) -> Iterator[None]:
        assert stream is self
        assert self.has_handle, "the first product of a thread would make one"
        self.modes.append(capture_error_mode)
        self.pools.append(pool)
        self.is_capturing = True
        thresholds = gc.get_threshold()
        gc.callbacks.append(self.count_collection)
        gc.set_threshold(1, 1, 1)
        try:
            yield
            for _ in range(100):
                cycle: list[object] = []
                cycle.append(cycle)
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(self.count_collection)
            self.is_capturing = False

    def count_collection(self, phase: str, facts: dict[str, int]) -> None:
        self.collected += 1


def test_gc_is_paused_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage may hold another graph, and destroying a graph breaks the capture."""
    torch_cuda, graphs = FakeTorchCuda(monkeypatch), CudaGraphs()

    graphs.capture(KEY, lambda: torch.ones(1))

    assert torch_cuda.collected == 0
    assert gc.isenabled()


def test_failed_capture_resumes_gc(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails, but the process goes on and needs its garbage collected."""
    torch_cuda, graphs = FakeTorchCuda(monkeypatch), CudaGraphs()

    def compute() -> torch.Tensor:
        if torch_cuda.is_capturing:
            raise RuntimeError("no kernel for it")
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="no kernel"):
        graphs.capture(KEY, compute)

    assert gc.isenabled()
    assert KEY not in graphs


def test_captures_are_apart_from_what_other_threads_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies and pinning go on beside them; all captures share one stream, of a priority that no
    stream of another has.
    """
    torch_cuda = FakeTorchCuda(monkeypatch)
    graphs = CudaGraphs()
    for key in range(3):
        graphs.capture(key, lambda: torch.ones(1))

    assert torch_cuda.priorities == [PRIORITY]
    assert PRIORITY < 0, "torch hands out streams of priority 0"
    assert torch_cuda.modes == ["thread_local"] * 3


def test_capture_leaves_disabled_gc_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeTorchCuda(monkeypatch)
    gc.disable()
    try:
        CudaGraphs().capture(KEY, lambda: torch.ones(1))

        assert not gc.isenabled()
    finally:
        gc.enable()


def test_replay_returns_captured_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays write to the tensor that the capture computed; graphs share one memory pool."""
    torch_cuda, graphs = FakeTorchCuda(monkeypatch), CudaGraphs()
    results = [torch.ones(1), torch.ones(2), torch.ones(3), torch.ones(4)]
    runs = iter(results)

    for bucket in (8, 16):
        graphs.warm(lambda: next(runs))
        graphs.capture((bucket, (2,), False), lambda: next(runs))

    assert graphs.replay(KEY) is results[1]
    assert torch_cuda.pools == [None, "pool", "replayed"]
