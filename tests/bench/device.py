"""A GPU: how fast it copies, how long a graph takes, and its memory."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable

import torch


def copy_rate() -> float:
    """Return the rate of a device-to-device copy in bytes per second, read and written: the
    ceiling."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        target.copy_(source)
    start.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return float(20 * source.numel() / (start.elapsed_time(end) / 1e3))


def describe(rate: float) -> str:
    """Return the device's name and its copy rate."""
    return f"{torch.cuda.get_device_name()}, copy {rate / 1e9:.0f} GB/s"


def time_graph(run: Callable[[], None], repeats: int = 9) -> tuple[float, float, float]:
    """Return (median, min, max) microseconds of a captured graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[2:]), min(times[2:]), max(times[2:])


def time_queued(run: Callable[[], object], repeats: int = 9) -> float:
    """Return the median microseconds of what `run` launches, behind work that hides the host."""
    before = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for value in range(8):  # 2 ms
            before.fill_(value)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(statistics.median(times))


def release_memory() -> None:
    """Give back memory that nothing refers to any more."""
    gc.collect()
    torch.cuda.empty_cache()
