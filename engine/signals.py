"""Signal handling for an orderly shutdown that happens once.

When asyncio removes a signal handler, it restores the default, which kills the process as if it had
failed. Here a signal has its handler during the work and is ignored from the end of the work on,
with no gap in between. This module knows no engine; `engine.server` and the gateway use it.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def handle_signals(handlers: Mapping[signal.Signals, Callable[[], object]]) -> Iterator[None]:
    """Handle signals in the running loop inside the `with` block; ignore them afterwards.

    Handlers run in the loop. After the block the process ignores these signals, so nothing
    interrupts its end.
    """
    loop = asyncio.get_running_loop()
    receiver, sender = socket.socketpair()

    def dispatch() -> None:
        for number in receiver.recv(4096):
            if number in handlers:
                handlers[signal.Signals(number)]()

    with receiver, sender:
        receiver.setblocking(False)
        sender.setblocking(False)
        loop.add_reader(receiver, dispatch)
        # Whichever thread a signal comes to, it wakes the loop.
        previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        for number in handlers:
            signal.signal(number, _do_nothing)
            signal.siginterrupt(number, False)
        try:
            yield
        finally:
            for number in handlers:
                signal.signal(number, signal.SIG_IGN)
            signal.set_wakeup_fd(previous_fd)
            loop.remove_reader(receiver)


def _do_nothing(number: int, frame: object) -> None:
    """Do nothing: the wakeup descriptor passes the signal's number to the loop."""
