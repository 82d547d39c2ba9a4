"""Pins host memory piece by piece, on a thread of its own: at the first use, and a little ahead.

A GPU copies at full speed only to and from pinned memory (55 GB/s against 5). Pinning is slow and
holds up every launch on the device while it runs, most of all if pages have yet to be made. So
the pages of a piece are touched first, by several threads, and pieces are small.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from mmap import PAGESIZE

import numpy as np

from engine.kv.copy_device import CopyDevice

PIECE_BYTES = 32 * 2**20
"""Bytes that are pinned in one call. Steps wait for one or two milliseconds of it."""
AHEAD_BYTES = 128 * 2**20
"""What is pinned behind the furthest piece in use, before it is wanted."""
TOUCHED_BYTES = 4 * 2**20
"""What one thread touches at a time."""


class PinningError(RuntimeError):
    """Memory that could not be pinned."""


class PinnedMemory:
    """One range of host memory, of which pieces are pinned.

    A piece that could not be pinned is not used from then on: `need` fails for it, at once.
    """

    def __init__(
        self,
        device: CopyDevice,
        memory: memoryview,
        helpers: ThreadPoolExecutor,
        *,
        piece_bytes: int,
        ahead_bytes: int,
        on_failed: Callable[[int, Exception], None] = lambda _size, _error: None,
    ) -> None:
        """`memory`: begins on a page. `helpers`: threads that touch pages. `piece_bytes`, in one
        call, and `ahead_bytes`, behind the furthest piece in use: what is pinned. `on_failed` runs
        on the thread of this object with the bytes that could not be pinned; what it raises is
        ignored.
        """
        self._device = device
        self._bytes = np.frombuffer(memory, np.uint8)
        self._address, self._length = int(self._bytes.ctypes.data), len(self._bytes)
        self._piece_bytes = piece_bytes
        self._ahead = ahead_bytes // piece_bytes
        self._helpers = helpers
        self._on_failed = on_failed
        self._wanted: deque[int] = deque()
        self._known: dict[int, Exception | None] = {}  # why a piece is not pinned, None where it is
        self._furthest = -1
        self._is_closed = False
        self._turn = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="kv-pin", daemon=True)
        self._thread.start()

    @property
    def pinned_bytes(self) -> int:
        """Return the bytes that are pinned."""
        with self._turn:
            return sum(self._size(one) for one, error in self._known.items() if error is None)

    @property
    def failed_bytes(self) -> int:
        """Return the bytes that could not be pinned."""
        with self._turn:
            return sum(self._size(one) for one, error in self._known.items() if error is not None)

    def need(self, start: int, size: int) -> list[tuple[int, int]]:
        """Wait until these bytes of the memory are pinned; return starts and sizes of their parts.

        One copy may not cross from one pinned piece to the next. Raises PinningError.
        """
        end = start + size
        first, last = start // self._piece_bytes, (end - 1) // self._piece_bytes
        if first == last and first <= self._furthest and self._known.get(first, self) is None:
            return [(start, size)]  # the usual case, without the lock
        with self._turn:
            self._want(range(first, last + 1))
            for index in range(first, last + 1):
                self._wait(index)
        borders = [start, *(i * self._piece_bytes for i in range(first + 1, last + 1)), end]
        return [(low, high - low) for low, high in pairwise(borders)]

    def close(self) -> None:
        """Unpin everything, and end the thread. The memory may go then. Safe to repeat."""
        with self._turn:
            self._is_closed = True
            self._turn.notify_all()
        self._thread.join()
        self._bytes = np.empty(0, np.uint8)  # releases the memory

    # -- internals ----------------------------------------------------------------------------

    def _want(self, pieces: Sequence[int]) -> None:
        """Ask for pieces, and for some behind them where they are further than any before."""
        missing = [one for one in pieces if one not in self._known]
        self._wanted.extendleft(reversed(missing))
        ahead = range(0)
        if pieces[-1] > self._furthest:
            self._furthest = pieces[-1]
            most = -(-self._length // self._piece_bytes)
            ahead = range(self._furthest + 1, min(most, self._furthest + 1 + self._ahead))
            self._wanted.extend(ahead)
        if missing or ahead:
            self._turn.notify_all()

    def _wait(self, piece: int) -> None:
        while piece not in self._known:
            if self._is_closed:
                raise PinningError("the memory is being closed")
            self._turn.wait()
        error = self._known[piece]
        if error is not None:
            raise PinningError(f"piece {piece} of host memory is not pinned: {error}")

    def _work(self) -> None:
        while (piece := self._next()) is not None:
            error = self._pin(piece)
            with self._turn:
                self._known[piece] = error
                self._turn.notify_all()
            if error is not None:
                with suppress(Exception):
                    self._on_failed(self._size(piece), error)
        for piece, failure in self._known.items():
            if failure is None:
                with suppress(RuntimeError):  # a device that has failed has released it
                    self._device.unpin(self._address + piece * self._piece_bytes)

    def _next(self) -> int | None:
        """Wait for a piece to pin; return None when it is closed."""
        with self._turn:
            while not self._is_closed:
                while self._wanted:
                    piece = self._wanted.popleft()
                    if piece not in self._known:
                        return piece
                self._turn.wait()
            self._turn.notify_all()
            return None

    def _pin(self, piece: int) -> Exception | None:
        """Pin a piece; return why it could not be."""
        start, size = piece * self._piece_bytes, self._size(piece)
        cuts = range(start, start + size, TOUCHED_BYTES)
        try:
            ends = [min(start + size, cut + TOUCHED_BYTES) for cut in cuts]
            list(self._helpers.map(self._touch, cuts, ends))
            self._device.pin(self._address + start, size)
        except Exception as error:
            return error
        return None

    def _touch(self, start: int, end: int) -> None:
        """Have the machine make the pages. By reading, since other threads, and the storage
        process, may be writing: for shared memory that takes a page as writing does."""
        np.bitwise_or.reduce(self._bytes[start:end:PAGESIZE])

    def _size(self, piece: int) -> int:
        return min(self._piece_bytes, self._length - piece * self._piece_bytes)
