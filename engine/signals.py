"""Signals of a process that ends in order, and only once.

A loop that lets go of a handler puts the default back, which ends the process by itself, as if it
had not ended well. Here a signal has its handler, and from the end of the work on the process is
deaf to it, with nothing in between. It knows no engine; `server` uses it, and the gateway.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def heeded(handlers: Mapping[signal.Signals, Callable[[], object]]) -> Iterator[None]:
    """Handlers in the running loop, within. Afterwards the process ignores these signals: nothing
    but its end may follow."""
    loop = asyncio.get_running_loop()
    ear, mouth = socket.socketpair()

    def heard() -> None:
        for number in ear.recv(4096):
            if number in handlers:
                handlers[signal.Signals(number)]()

    with ear, mouth:
        ear.setblocking(False)
        mouth.setblocking(False)
        loop.add_reader(ear, heard)
        # Whichever thread a signal comes to, it wakes the loop.
        before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
        for number in handlers:
            signal.signal(number, _passed_on)
            signal.siginterrupt(number, False)
        try:
            yield
        finally:
            for number in handlers:
                signal.signal(number, signal.SIG_IGN)
            signal.set_wakeup_fd(before)
            loop.remove_reader(ear)


def _passed_on(number: int, frame: object) -> None:
    """Its number is on its way to the loop."""
