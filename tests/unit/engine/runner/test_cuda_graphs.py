"""Capturing and replaying, without a device: torch's part is played by one that only looks on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.runner.cuda_graphs import CudaGraphs, Key

KEY: Key = (8, (2,), False)


class Capture:
    """Stands for `torch.cuda`: during a capture it leaves garbage lying about, as any code may, and
    has the collector look as often as it can."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_capturing = False
        self.pools: list[object] = []
        self.collected = 0
        for name in ("Stream", "current_stream", "CUDAGraph"):
            monkeypatch.setattr(torch.cuda, name, lambda: self)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    def wait_stream(self, stream: object) -> None:
        """One stream after the other."""

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        self.pools.append("replayed")

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        yield

    @contextmanager
    def graph(self, graph: object, pool: object) -> Iterator[None]:
        self.pools.append(pool)
        self.is_capturing = True
        thresholds = gc.get_threshold()
        gc.callbacks.append(self.collecting)
        gc.set_threshold(1, 1, 1)
        try:
            yield
            for _ in range(100):
                knot: list[object] = []
                knot.append(knot)
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(self.collecting)
            self.is_capturing = False

    def collecting(self, phase: str, facts: dict[str, int]) -> None:
        self.collected += 1


def test_nothing_is_collected_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage may hold another graph, and to destroy one then is not permitted."""
    torch_cuda, graphs = Capture(monkeypatch), CudaGraphs()

    graphs.capture(KEY, lambda: torch.ones(1))

    assert torch_cuda.collected == 0
    assert gc.isenabled()


def test_a_capture_that_breaks_leaves_the_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails; the process lives on, with everybody's garbage."""
    torch_cuda, graphs = Capture(monkeypatch), CudaGraphs()

    def compute() -> torch.Tensor:
        if torch_cuda.is_capturing:
            raise RuntimeError("no kernel for it")
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="no kernel"):
        graphs.capture(KEY, compute)

    assert gc.isenabled()
    assert KEY not in graphs


def test_a_collector_that_was_off_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever switched it off had a reason."""
    Capture(monkeypatch)
    gc.disable()
    try:
        CudaGraphs().capture(KEY, lambda: torch.ones(1))

        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_graph_is_replayed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed while capturing is where replays put their result; memory is shared."""
    torch_cuda, graphs = Capture(monkeypatch), CudaGraphs()
    results = [torch.ones(1), torch.ones(2), torch.ones(3), torch.ones(4)]
    runs = iter(results)

    for bucket in (8, 16):
        graphs.capture((bucket, (2,), False), lambda: next(runs))

    assert graphs.replay(KEY) is results[1]
    assert torch_cuda.pools == [None, "pool", "replayed"]
