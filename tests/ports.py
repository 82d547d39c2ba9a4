"""TCP ports for servers that cannot be told to take any free one and to say which.

A port that was free a moment ago may be another test's by the time the server binds it: the kernel
deals the same ones out to every worker. These are below those that it deals out, and each is held
by an abstract socket of this process, a lock that every worker sees.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

FIRST, LAST = 10_000, 32_000
"""Linux deals out 32,768 and above."""


@contextmanager
def free_ports(count: int) -> Iterator[list[int]]:
    """Yield ports of 127.0.0.1 that are free, and no other test's until the end."""
    with ExitStack() as held:
        found: list[int] = []
        place = os.getpid() * 16
        while len(found) < count:
            port = FIRST + place % (LAST - FIRST)
            place += 1
            lock = held.enter_context(socket.socket(socket.AF_UNIX))
            with suppress(OSError):  # another test's, or a server's
                lock.bind(f"\0trunkline-test-port-{port}")
                socket.create_server(("127.0.0.1", port)).close()
                found.append(port)
        yield found
