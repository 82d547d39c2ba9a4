"""A thread for each lane, where lanes must compute at the same time, and the places they meet at.

Under CUDA graphs one thread replays all lanes and the kernels meet by themselves
(`kernels.gpu.peer_reduce`). A step without graphs must not: a kernel that polls for its peer could
hold up the launch or the allocation that the peer waits for. There each lane has a thread, and
where lanes meet, its stream waits for events of the others' streams. On a CPU one lane computes at
a time, and hands over where lanes meet. `engine.runner` runs steps through a crew.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

MEET_TIMEOUT_S = 30.0
"""The longest that a lane's thread waits for the others: the time that they take to launch a layer,
or, at their first launches, to compile its kernels."""
MEET_TIMEOUT_CPU_S = 300.0
"""The same without GPUs, where the others compute the layer meanwhile, one after another."""


class Crew:
    """Runs work on all lanes. One thread calls `run`; a crew of one lane has no thread."""

    def __init__(self, devices: Sequence[torch.device], timeout_s: float = 0.0) -> None:
        """`devices`: of the lanes, in order; all of one type. `timeout_s`: of a meeting; 0: as the
        devices need."""
        self.devices = tuple(devices)
        lanes = len(self.devices)
        self._is_cuda = self.devices[0].type == "cuda"
        self._timeout_s = timeout_s or (MEET_TIMEOUT_S if self._is_cuda else MEET_TIMEOUT_CPU_S)
        self._barrier = threading.Barrier(lanes)
        self._turn = threading.Lock()
        self._events: list[list[torch.cuda.Event]] = []
        self._met = [0] * lanes
        self._pool: ThreadPoolExecutor | None = None
        if lanes > 1:
            self._pool = ThreadPoolExecutor(lanes, thread_name_prefix="lane")
            if self._is_cuda:
                self._events = [[torch.cuda.Event() for _ in range(2)] for _ in range(lanes)]

    @contextlib.contextmanager
    def on(self, lane: int) -> Iterator[None]:
        """Make a lane's device the current one of this thread."""
        if self._is_cuda and self._pool is not None:
            with torch.cuda.device(self.devices[lane]):
                yield
        else:
            yield

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Return what `work` returns for each lane. All lanes run at once, each in a thread of its
        own, so that `work` may meet.

        Where one raises, the others end at their next meeting; the first error is raised again
        after all have ended.
        """
        if self._pool is None:
            return [work(0)]
        running = [self._pool.submit(self._work, work, lane) for lane in range(len(self.devices))]
        errors = [error for one in running if (error := one.exception()) is not None]
        if errors:
            self._barrier.reset()
            first = (one for one in errors if not isinstance(one, threading.BrokenBarrierError))
            raise next(first, errors[0])
        return [one.result() for one in running]

    def meet(self, lane: int) -> None:
        """Order what this lane launches from here on behind all that the others have launched. Only
        work that `run` runs calls it, all lanes equally often.

        Raises BrokenBarrierError if another lane has failed, or does not come in time.
        """
        if not self._is_cuda:
            self._turn.release()
            try:
                self._barrier.wait(self._timeout_s)
            finally:
                self._turn.acquire()
            return
        # Two events in turn: a peer may not have waited for the last one yet.
        number = self._met[lane] % 2
        self._met[lane] += 1
        stream = torch.cuda.current_stream()
        self._events[lane][number].record(stream)
        self._barrier.wait(self._timeout_s)
        for peer, events in enumerate(self._events):
            if peer != lane:
                stream.wait_event(events[number])

    def close(self) -> None:
        """End the threads. Safe to repeat."""
        if self._pool is not None:
            self._pool.shutdown()

    def _work(self, work: Callable[[int], T], lane: int) -> T:
        turn = contextlib.nullcontext() if self._is_cuda else self._turn
        try:
            with turn, torch.inference_mode(), self.on(lane):
                return work(lane)
        except BaseException:
            self._barrier.abort()
            raise
