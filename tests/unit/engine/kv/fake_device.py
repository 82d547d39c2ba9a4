"""A device of a test, in plain memory: what is launched runs when somebody waits for its end.

So what reads bytes before it waited for them reads the wrong ones, as it would on a GPU.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from engine.kv.copy_device import Copies, copy_each

WAIT_S = 60.0


class FakeMark:
    """`CopyMark`: the end of the first `position` works of a stream."""

    def __init__(self, stream: FakeStream, position: int) -> None:
        self._stream = stream
        self._position = position

    def wait(self) -> float:
        """See `CopyMark`."""
        self._stream.run_to(self._position)
        return self._stream.work_s


class FakeStream:
    """`CopyStream`. `in_flight_max`: the most works that were launched and had not run. `launched`:
    one for each work. `gate`: what runs them waits for it.
    """

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.work_s = device.work_s
        self._works: deque[Callable[[], None]] = deque()
        self._launched = self._ran = 0
        self.in_flight_max = 0
        self.launched = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()

    def launch(self, work: Callable[[], None]) -> FakeMark:
        """See `CopyStream`."""
        if self._device.launch_errors:
            raise self._device.launch_errors.pop()
        self._works.append(work)
        self._launched += 1
        self.in_flight_max = max(self.in_flight_max, len(self._works))
        self.launched.release()
        return FakeMark(self, self._launched)

    def copy(self, copies: Copies, *, is_load: bool) -> None:
        """See `CopyStream`."""
        copy_each(copies, is_load=is_load)

    @property
    def waiting(self) -> int:
        """Return the works that were launched and have not run."""
        return len(self._works)

    def run_to(self, position: int) -> None:
        """Run what was launched, up to here; nothing of it where the device has an error."""
        assert self.gate.wait(WAIT_S)
        error = self._device.errors.pop() if self._device.errors else None
        while self._ran < position:
            work = self._works.popleft()
            self._ran += 1
            if error is None:
                work()
        if error is not None:
            raise error


class FakeDevice:
    """`CopyDevice`. `errors`: raised by the next waits; `launch_errors`: by the next launches.
    `work_s`: seconds that a work takes. `base`: where memory begins; `pins`: what was pinned, in
    order, and `unpinnable`: what cannot be, both counted from there.
    """

    torch_device = torch.device("cpu")

    def __init__(self, work_s: float = 0.0) -> None:
        self.work_s = work_s
        self.streams: list[FakeStream] = []
        self.base = 0
        self.pinned: dict[int, int] = {}
        self.pins: list[int] = []
        self.pinning_threads: set[str] = set()
        self.unpinnable: set[int] = set()
        self.errors: list[Exception] = []
        self.launch_errors: list[Exception] = []

    def hold(self) -> None:
        """Let no stream run what it is given."""
        for stream in self.streams:
            stream.gate.clear()

    def go(self) -> None:
        """Let all streams run."""
        for stream in self.streams:
            stream.gate.set()

    def stream(self) -> FakeStream:
        """See `CopyDevice`."""
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def pin(self, address: int, size: int) -> None:
        """See `CopyDevice`."""
        self.pinning_threads.add(threading.current_thread().name)
        if address - self.base in self.unpinnable:
            raise RuntimeError("no more memory may be locked")
        assert address not in self.pinned, "it is pinned already"
        self.pinned[address] = size
        self.pins.append(address - self.base)

    def unpin(self, address: int) -> None:
        """See `CopyDevice`."""
        del self.pinned[address]
