"""The engine's end of the storage process: `StorageClient` implements `engine.moves.Storage`.

A thread of its own starts the process, reads its frames and starts the next one when it is lost.
`send` and `poll` never block: while the process is away, dead or silent, every command fails at
once. After five deaths in a minute it is not started again, and the engine serves without a disk.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from msgspec.structs import replace

from engine.api import Clock, Namespace, Payer, Quota
from engine.config import LevelsConfig
from engine.errors import EngineError
from engine.moves import (
    EraseStored,
    Fetch,
    Fetched,
    FetchedRun,
    FetchRuns,
    KeepHere,
    SetStoredQuotas,
    StopFetch,
    StorageCommand,
    StorageOutcome,
    StorageStats,
)
from engine.processes import start_child
from engine.storage.memory.arena import HostArena
from engine.storage.messages import (
    DiskSettings,
    HeldNamespaces,
    failures_of,
    outcome_decoder,
)
from engine.storage.remote.address import remote_settings
from engine.storage.sealing.unlocking import seal_settings
from engine.wire import FrameError, encode_frame

READ_BYTES = 2**18
UNSENT_BYTES_MAX = 64 * 2**20
"""Bytes that wait for a process which reads slowly; further commands fail at once."""
START_S_MAX = 60.0
"""Seconds from the start of a process to its first heartbeat: it may wait for a lock and open a
large index."""
PAUSES_S = (0.0, 0.1, 0.5, 1.0)
DEATHS_MAX, DEATHS_S = 5, 60.0
REAP_S = 1.0
FINISH_S = 15.0
MIB, GIB = 2**20, 2**30


class StorageProcess(Protocol):
    """A running storage process."""

    wire: socket.socket
    """Our end of its socket."""

    def kill(self) -> None:
        """End it at once. Safe to repeat."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; return whether it has ended."""


class _ChildProcess:
    """A storage process of its own."""

    def __init__(self, arena_fd: int) -> None:
        self._process, self.wire = start_child(
            "engine.storage.process", os.environ, pass_fds=(arena_fd,)
        )

    def kill(self) -> None:
        """See `StorageProcess`."""
        self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """See `StorageProcess`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None


def start_process(settings: DiskSettings) -> StorageProcess:
    """Start a storage process, which inherits the arena. Raises OSError."""
    return _ChildProcess(settings.arena_fd)


def disk_settings(
    config: LevelsConfig,
    arena: HostArena,
    slot_sizes: Sequence[int],
    run_tokens: int = 16,
    generation: int = 0,
    model_digest: str = "",
) -> DiskSettings:
    """Return the settings of a storage process for an engine's configuration. `slot_sizes`: the
    bytes of copies, by format; `generation`: of this engine among those that had the arena;
    `model_digest`: what decides the bytes of copies."""
    return DiskSettings(
        dir=config.dir,
        disk_bytes=int(config.disk_gib * GIB),
        arena_fd=arena.fd,
        layout=arena.layout,
        slot_sizes=tuple(slot_sizes),
        slab_bytes=config.slab_mib * MIB,
        io_threads=config.io_threads,
        write_bytes_per_day=int(config.disk_write_gib_per_day * GIB),
        run_tokens=run_tokens,
        seal=seal_settings(config),
        remote=remote_settings(config.remote),
        generation=generation,
        model_digest=model_digest,
    )


class StorageClient:
    """The storage as the levels see it. `send`, `poll` and `has_records` belong to one thread.

    `start` starts a process. `silence_s`: without a heartbeat for so long the process counts as
    dead. `pauses_s`: before the next start, by deaths of the last minute; `deaths_max`: after so
    many in a minute it is not started again.
    """

    def __init__(
        self,
        settings: DiskSettings,
        *,
        start: Callable[[DiskSettings], StorageProcess] = start_process,
        clock: Clock = time.monotonic,
        silence_s: float = 2.0,
        pauses_s: tuple[float, ...] = PAUSES_S,
        deaths_max: int = DEATHS_MAX,
    ) -> None:
        self._settings, self._start, self._clock = settings, start, clock
        self._silence_s, self._pauses_s = silence_s, pauses_s
        self._lock = threading.Condition()
        self._outcomes: list[StorageOutcome] = []
        self._stats: StorageStats | None = None
        self._open: dict[int, StorageCommand] = {}  # of a fetch, what has no outcome yet
        self._held: set[Namespace] = set()
        self._changed: set[Namespace] = set()
        self._quotas: dict[Payer, Quota] = {}
        self._kept_here: set[Namespace] = set()
        self._unsent = bytearray()
        self._wire: socket.socket | None = None  # while the process is there
        self._is_ready = False  # its latest heartbeat says that it has a disk
        self._closing = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._deaths_s: deque[float] = deque(maxlen=deaths_max)
        self._thread = threading.Thread(target=self._run, name="storage-client", daemon=True)
        self._thread.start()

    # -- Storage --------------------------------------------------------------------------------

    def send(self, command: StorageCommand) -> None:
        """See `Storage`. About 20 us; a store's tokens are encoded here."""
        with self._lock:
            if isinstance(command, SetStoredQuotas):
                self._quotas.update({quota.payer: quota for quota in command.quotas})
            elif isinstance(command, KeepHere):
                self._kept_here.update(command.namespaces)
            try:
                frame = encode_frame(command)
            except (EngineError, OverflowError, ValueError):
                self._add(failures_of(command))
                return
            if not self._is_ready or len(self._unsent) > UNSENT_BYTES_MAX:
                self._add(failures_of(command))
                if isinstance(command, EraseStored) and self._wire is not None:
                    self._transmit(frame)  # made up for when the disk is back
                return
            if not isinstance(command, SetStoredQuotas | KeepHere | StopFetch):
                self._open[command.call_id] = command
            self._transmit(frame)

    def poll(self) -> list[StorageOutcome]:
        """See `Storage`. Of heartbeats only the latest is there."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
            if self._stats is not None:
                outcomes.append(self._stats)
                self._stats = None
            return outcomes

    def has_records(self, namespace: Namespace) -> bool:
        """See `Storage`."""
        return namespace in self._held

    def namespaces(self) -> set[Namespace]:
        """See `Storage`."""
        with self._lock:
            return set(self._held)

    def take_changed(self) -> set[Namespace]:
        """See `Storage`."""
        with self._lock:
            changed, self._changed = self._changed, set()
            return changed

    def close(self) -> None:
        """See `Storage`. Waits at most a second; what then runs on ends with its work."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            self._fail_open("the storage was closed")
            self._wake()
        self._thread.join(REAP_S)

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` has something; return whether it has. For tests and commands."""
        with self._lock:
            return self._lock.wait_for(lambda: bool(self._outcomes or self._stats), timeout_s)

    # -- under the lock -------------------------------------------------------------------------

    def _add(self, outcomes: Iterable[StorageOutcome]) -> None:
        self._outcomes += outcomes
        self._lock.notify_all()

    def _transmit(self, frame: bytes) -> None:
        """Send what the socket takes now; the thread sends the rest."""
        is_first = not self._unsent
        self._unsent += frame
        if is_first:
            self._send_unsent()
        if self._unsent:
            self._wake()

    def _send_unsent(self) -> None:
        assert self._wire is not None, "a process that is ready has a socket"
        with suppress(BlockingIOError, InterruptedError):
            try:
                sent = self._wire.send(self._unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except ConnectionError:
                sent = len(self._unsent)  # the thread notices the end, and fails what is open
            del self._unsent[:sent]

    def _wake(self) -> None:
        if self._wake_fd >= 0:  # the thread has not ended
            with suppress(BlockingIOError):
                os.eventfd_write(self._wake_fd, 1)

    def _fail_open(self, reason: str) -> None:
        """Fail every open command: the process is gone."""
        self._is_ready = False
        self._unsent.clear()
        self._held = set()
        for command in self._open.values():
            self._outcomes += failures_of(command)
        self._open.clear()
        capacity = self._settings.disk_bytes
        self._stats = StorageStats("off", reason, capacity_bytes=capacity)
        self._lock.notify_all()

    def _take(self, message: HeldNamespaces | StorageOutcome) -> None:
        match message:
            case HeldNamespaces():
                self._held.update(message.gained)
                self._held.difference_update(message.lost)
                self._changed.update(message.gained, message.lost)
            case StorageStats():
                self._stats = message
                was_ready, self._is_ready = self._is_ready, message.state != "off"
                if self._is_ready and not was_ready:
                    self._tell_again()
            case Fetched():
                command = self._open.get(message.call_id)
                if isinstance(command, Fetch) and message.record_id in command.record_ids:
                    self._outcomes.append(message)
                    left = list(command.record_ids)
                    left.remove(message.record_id)
                    if left:
                        self._open[message.call_id] = replace(command, record_ids=tuple(left))
                    else:
                        del self._open[message.call_id]
            case FetchedRun():
                command = self._open.get(message.call_id)
                if isinstance(command, FetchRuns):
                    self._outcomes.append(message)
                    self._open[message.call_id] = replace(command, slots=command.slots[1:])
                    if len(command.slots) == 1:
                        del self._open[message.call_id]
            case _:
                if self._open.pop(message.call_id, None) is not None:
                    self._outcomes.append(message)
        self._lock.notify_all()

    def _tell_again(self) -> None:
        """Tell a store that has just opened what holds without an end."""
        if self._quotas:
            self._transmit(encode_frame(SetStoredQuotas(tuple(self._quotas.values()))))
        if self._kept_here:
            self._transmit(encode_frame(KeepHere(tuple(self._kept_here))))

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        """Run one process after another."""
        try:
            while not self._closing.is_set():
                reason = self._run_process()
                with self._lock:
                    if self._closing.is_set():
                        break
                    self._deaths_s.append(self._clock())
                    since_s = self._deaths_s[-1] - DEATHS_S
                    recent = sum(death_s > since_s for death_s in self._deaths_s)
                    is_last = recent == self._deaths_s.maxlen
                    if is_last:
                        reason = f"{reason}; {recent} deaths in a minute: not started again"
                    self._fail_open(reason)
                if is_last:
                    break
                self._pause(self._pauses_s[min(recent, len(self._pauses_s)) - 1])
        finally:
            with self._lock:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _pause(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while not self._closing.is_set() and (left_s := until_s - time.monotonic()) > 0:
            select.select([self._wake_fd], [], [], left_s)
            self._clear_wake()

    def _clear_wake(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _run_process(self) -> str:
        """Start a process and serve it until it is lost; return why."""
        try:
            process = self._start(self._settings)
        except OSError as error:
            return f"the storage process did not start: {os.strerror(error.errno or 0)}"
        with process.wire as wire:
            with self._lock:
                self._wire = wire
                self._unsent += encode_frame(self._settings)
            try:
                reason = self._serve(wire)
            finally:
                with self._lock:
                    self._wire, self._is_ready = None, False
                    is_closing = self._closing.is_set()
            if not is_closing:
                # No thread of a killed process runs on, even where a call of the disk holds it:
                # what it was to fill may be used again.
                process.kill()
                process.wait(REAP_S)
                with self._lock:
                    self._fail_open(reason)
        while not process.wait(FINISH_S if is_closing else REAP_S):
            if is_closing or self._closing.is_set():
                process.kill()
                process.wait(REAP_S)
                break
        return reason

    def _serve(self, wire: socket.socket) -> str:
        """Carry frames both ways until the process ends or is silent; return why it was lost."""
        decoder = outcome_decoder()
        until_s = self._clock() + START_S_MAX
        end_at_s: float | None = None  # once our end is shut
        while True:
            with self._lock:
                is_sending = bool(self._unsent)
            if self._closing.is_set() and not is_sending and end_at_s is None:
                end_at_s = self._clock() + FINISH_S
                with suppress(OSError):
                    wire.shutdown(socket.SHUT_WR)
            writable = [wire.fileno()] if is_sending else []
            readable = [wire.fileno(), self._wake_fd]
            ready, can_send, _ = select.select(readable, writable, [], 0.25)
            self._clear_wake()
            if can_send:
                with self._lock:
                    self._send_unsent()
            now_s = self._clock()
            if wire.fileno() in ready:
                try:
                    data = wire.recv(READ_BYTES)
                    messages = list(decoder.feed(data))
                except (ConnectionError, FrameError):
                    return "the storage process ended in the middle of a frame"
                if not data:
                    return "the storage process ended"
                if any(isinstance(message, StorageStats) for message in messages):
                    until_s = now_s + self._silence_s
                if not self._closing.is_set():
                    with self._lock:
                        for message in messages:
                            self._take(message)
            if end_at_s is None and now_s > until_s:
                return f"the storage process was silent for {self._silence_s:g} s"
            if end_at_s is not None and now_s > end_at_s:
                return "the storage process did not finish in time"
