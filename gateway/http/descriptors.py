"""The process's limit of open descriptors, and how many connections fit below it.

Most shells and service managers start a process with a soft limit of 1,024 descriptors, and let it
raise the limit itself. Each connection takes one. A process without a free one cannot accept, start
an engine or open its database, so connections stop short of the limit.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

DESCRIPTORS_MAX = 2**20
"""The soft limit is raised to the hard one, but not above this: some tools visit each number."""

DESCRIPTORS_KEPT = 200
"""Left for child processes, the database, connections that are refused, and the admin listener."""

CONNECTIONS_MIN = 16
"""Connections that are allowed under any limit of descriptors."""


def descriptor_limits() -> tuple[int, int]:
    """Return the soft and the hard limit of this process; no limit is a very large number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    return (sys.maxsize if soft == infinite else soft, sys.maxsize if hard == infinite else hard)


def raise_descriptor_limit() -> None:
    """Raise the soft limit to the hard one, as far as `DESCRIPTORS_MAX`.

    Changes the limit of this process and of the children that it starts.
    """
    soft, hard = descriptor_limits()
    wanted = min(hard, DESCRIPTORS_MAX)
    if wanted > soft:
        _, given = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, given))


def open_descriptors() -> int:
    """Return the number of this process's open descriptors; 0 if the system does not tell.

    Blocks for a moment.
    """
    try:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        return 0


def connections_allowed(configured: int) -> int:
    """Return how many connections may be open: the configured number, if descriptors last.

    Blocks for a moment.
    """
    soft, _ = descriptor_limits()
    return min(configured, max(CONNECTIONS_MIN, soft - open_descriptors() - DESCRIPTORS_KEPT))
