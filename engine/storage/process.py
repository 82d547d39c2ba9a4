"""The storage process: `python -m engine.storage.process`, started by an engine.

Its standard input is a socket (`engine.storage.messages`), which `engine.storage.service` serves.
After the engine's end it finishes what it was given, for `END_S` at most, wherever it waits.
It logs JSON lines on standard error, without tokens.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

from engine.processes import has_ended, log_line, run_child
from engine.storage.memory.arena import HostArena
from engine.storage.messages import STORAGE_VERSION, DiskSettings, Downward, command_decoder
from engine.storage.remote.address import open_remote
from engine.storage.service.service import READ_BYTES, Log, OpenRemote, StorageService
from engine.storage.slabs.slabs import DiskCalls
from engine.wire import FrameError

END_S = 15.0
"""Longer than the service needs to finish its stores, or to find that it cannot."""
LOOK_S = 60.0


def serve(
    wire: socket.socket,
    *,
    wall_ms: Callable[[], int],
    uptime_s: Callable[[], float],
    monotonic_s: Callable[[], float],
    attach: Callable[[DiskSettings], HostArena],
    calls: DiskCalls,
    log: Log,
    environment: Mapping[str, str] | None = None,
    open_remote: OpenRemote = open_remote,
) -> int:
    """Serve the engine at the other end of `wire`. Returns the exit status.

    `wall_ms`, `uptime_s`: the clocks of records; `monotonic_s`: that of heartbeats and pauses.
    `environment`: where a master key may be. `open_remote`: opens a remote store.
    """
    decoder = command_decoder()
    messages: list[Downward] = []
    try:
        while not messages and (data := wire.recv(READ_BYTES)):
            messages = list(decoder.feed(data))
    except (ConnectionError, FrameError):
        return 1
    if not messages:
        return 0
    settings, *early = messages
    if not isinstance(settings, DiskSettings) or settings.version != STORAGE_VERSION:
        log("storage_refused", reason="the first frame must be settings of this version")
        return 1
    arena = attach(settings)
    service = StorageService(
        wire,
        settings,
        arena,
        wall_ms=wall_ms,
        uptime_s=uptime_s,
        monotonic_s=monotonic_s,
        calls=calls,
        log=log,
        environment=environment or {},
        open_remote=open_remote,
    )
    try:
        service.serve(decoder, early)
    finally:
        if not service.has_left_work:  # its lock says that slots may still be written
            arena.close()
    return 0


def end_after_parent(wire: int, end_s: float) -> None:
    """End this process so many seconds after the other end of `wire` was closed, even if its main
    thread waits. For a thread that is never joined."""
    while not has_ended(wire, LOOK_S):
        pass
    time.sleep(end_s)
    os._exit(1)


def attach_arena(settings: DiskSettings) -> HostArena:
    """Map the arena whose descriptor this process has inherited, and lock it for as long as the
    process lives. Raises OSError, ValueError."""
    arena = HostArena(settings.arena_fd, settings.layout)
    arena.lock_until_exit(settings.generation)
    return arena


def main() -> int:
    """Serve the engine that started this process."""
    watched = os.dup(sys.stdin.fileno()), END_S
    threading.Thread(target=end_after_parent, args=watched, daemon=True).start()
    return run_child(
        "storage",
        lambda wire: serve(
            wire,
            wall_ms=lambda: time.time_ns() // 1_000_000,
            uptime_s=time.monotonic,
            monotonic_s=time.monotonic,
            attach=attach_arena,
            calls=DiskCalls(),
            log=log_line,
            environment=os.environ,
        ),
    )


if __name__ == "__main__":
    status = main()
    os._exit(status)  # a thread that hangs in a call of the disk holds nothing up
