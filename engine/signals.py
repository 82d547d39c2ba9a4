"""Signals of a process that ends in order, and only once.

A loop that is closed lets go of what signals wake it by, and of its handlers afterwards: one that
comes in between is an error on standard error, one that comes later ends the process by itself,
as if it had not ended well. Here they are deaf from the end of the work on. It knows no engine;
`server` uses it, and the gateway.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def heeded(handlers: Mapping[signal.Signals, Callable[[], object]]) -> Iterator[None]:
    """Handlers in the running loop, within. Afterwards the process ignores these signals: nothing
    but its end may follow."""
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
