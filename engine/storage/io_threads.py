"""The threads that read and write for the storage process, and what they have ended.

The main thread gives works and runs what follows them; it learns by a descriptor that becomes
readable. This module knows no record and no disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue


class IoThreads:
    """Threads that read and write; what they have ended is handled by the main thread.

    `under_way`: works that were not handled yet, those that wait for a thread included.
    """

    def __init__(self, threads: int, monotonic_s: Callable[[], float]) -> None:
        self._readers = ThreadPoolExecutor(threads, "storage-read")
        self._writers = ThreadPoolExecutor(threads, "storage-write")
        self._ordered = ThreadPoolExecutor(1, "storage-batch")
        self._ended: SimpleQueue[tuple[int, Callable[[], None]]] = SimpleQueue()
        self._monotonic_s = monotonic_s
        self.under_way = 0
        self._began_s: dict[int, float] = {}  # of works that a thread has taken up
        self._serial = 0
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def read(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """Run `work` in a reading thread, and `then` in `take_ended`."""
        self._submit(self._readers, work, then)

    def order(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """Run `work` after all such work before it, and `then` in `take_ended`."""
        self._submit(self._ordered, work, then)

    def run_all(self, works: list[Callable[[], None]]) -> None:
        """Run works in the writing threads and wait for them. For the ordered thread."""
        for future in [self._writers.submit(work) for work in works]:
            future.result()

    def _submit(
        self, pool: ThreadPoolExecutor, work: Callable[[], None], then: Callable[[], None]
    ) -> None:
        self._serial += 1
        self.under_way += 1
        future = pool.submit(self._run, self._serial, work)
        future.add_done_callback(partial(self._end, self._serial, then))

    def _run(self, serial: int, work: Callable[[], None]) -> None:
        self._began_s[serial] = self._monotonic_s()
        work()

    def _end(self, serial: int, then: Callable[[], None], future: Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        self._ended.put((serial, then if error is None else partial(_fail, error)))
        os.eventfd_write(self.wake_fd, 1)

    @property
    def oldest_s(self) -> float:
        """Seconds since a thread took up the oldest of them."""
        now_s = self._monotonic_s()
        return now_s - min([*self._began_s.copy().values()], default=now_s)

    def take_ended(self) -> list[Callable[[], None]]:
        """Return what is to be run for works that have ended. For one that has raised, that raises
        RuntimeError: what follows a work may count on it."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
        thens = []
        with suppress(Empty):
            while True:
                serial, then = self._ended.get_nowait()
                self.under_way -= 1
                self._began_s.pop(serial, None)
                thens.append(then)
        return thens

    def close(self) -> None:
        """End the threads; works that hang are left."""
        is_idle = not self.under_way
        for pool in (self._readers, self._writers, self._ordered):
            pool.shutdown(wait=is_idle, cancel_futures=True)
        if is_idle:
            os.close(self.wake_fd)


def _fail(error: BaseException) -> None:
    raise RuntimeError(f"a work ended with {type(error).__name__}; expected none") from error
