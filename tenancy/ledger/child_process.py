"""A process that serves its gateway over a socket pair, and lives as long as that one does.

Its argument is the number of its end, which it has inherited. `ledger_child` and the gateway's
analytics run in one each.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

import msgspec


def run(name: str, serve: Callable[[socket.socket], int]) -> int:
    """Serve, and return the exit status. Signals to its gateway's group or terminal are heard and
    not minded: what comes before that gateway's end is to be done. A mistake of ours is a line
    `NAME_failed` on standard error, and for the gateway an end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # what was imported stays
    try:
        with socket.socket(fileno=int(sys.argv[1])) as wire:
            return serve(wire)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-6:]
        facts = {
            "at_ms": time.time_ns() // 1_000_000,
            "event": f"{name}_failed",
            "error": type(error).__name__,  # its message may quote a value
            "at": [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames],
        }
        with suppress(OSError):
            os.write(2, msgspec.json.encode(facts) + b"\n")
        return 1
