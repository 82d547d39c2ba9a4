"""The storage process: `python -m engine.storage.process`, started by an engine.

Its standard input is a socket (`engine.storage.messages`). The main thread has the index and all
decisions; it waits for the socket and for what the I/O threads have ended, never for a slab. When
the engine closes its end for any reason, the process finishes what it was given and exits. Where
the disk fails, it answers that nothing is there and tries again every 30 s: an engine is never held
up. It logs JSON lines on standard error, without tokens.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import apsw
import msgspec
from msgspec.structs import replace

from engine.errors import EngineError
from engine.moves import (
    EraseStored,
    Fetch,
    Fetched,
    KeepHere,
    Look,
    Looked,
    Recall,
    Recalled,
    Renew,
    Renewed,
    SetStoredQuotas,
    StorageStats,
    Stored,
    StoredErased,
    StoreRuns,
)
from engine.protocol import Decoder, FrameError
from engine.storage.folder import FolderLock, doubt_about, prepare_folder, wait_for_lock
from engine.storage.io_threads import IoThreads
from engine.storage.memory.arena import HostArena
from engine.storage.messages import (
    NAMESPACES_PER_FRAME,
    STORAGE_VERSION,
    DiskSettings,
    Downward,
    HeldNamespaces,
    Upward,
    command_decoder,
    encode_frame,
)
from engine.storage.plans import PlannedRead, StoreSettings, WriteBatch
from engine.storage.remote.address import open_remote
from engine.storage.remote.link import RemoteLink
from engine.storage.remote.objects import RemoteStore
from engine.storage.sealing.unlocking import unlock
from engine.storage.slabs.slabs import DiskCalls, Place
from engine.storage.store import BATCH_RECORDS, DiskStore

READ_BYTES = 2**18
TICK_S = 1.0
WIPE_TICKS = 10
RETRY_S = 30.0
FINISH_S = 5.0
"""Seconds to finish what was given after the engine has gone."""
JOB_S_MAX = 20.0
"""Seconds after which a read or a write counts as hanging: the heartbeat ends, and the engine
replaces the process."""
READ_ERRORS_MAX, READ_ERRORS_S = 3, 10.0
Log = Callable[..., None]
OpenRemote = Callable[[str, float], RemoteStore]
DiskError = (apsw.Error, OSError, EngineError)


class StorageService:
    """Serves one engine over one folder."""

    def __init__(
        self,
        wire: socket.socket,
        settings: DiskSettings,
        arena: HostArena,
        *,
        wall_ms: Callable[[], int],
        uptime_s: Callable[[], float],
        monotonic_s: Callable[[], float],
        calls: DiskCalls,
        log: Log,
        environment: Mapping[str, str],
        open_remote: OpenRemote,
    ) -> None:
        self._wire, self._settings, self._arena = wire, settings, arena
        self._wall_ms, self._uptime_s, self._monotonic_s = wall_ms, uptime_s, monotonic_s
        self._calls, self._log, self._environment = calls, log, environment
        self._io = IoThreads(settings.io_threads, monotonic_s)
        self._link: RemoteLink | None = None
        if (remote := settings.remote) is not None and settings.seal is not None:
            opened = partial(open_remote, remote.url, remote.timeout_s)
            self._link = RemoteLink(opened, monotonic_s, remote.timeout_s, log)
        self._lock: FolderLock | None = None
        self._store: DiskStore | None = None
        self._dying: DiskStore | None = None  # lost, and still read or written by a thread
        self._reason = "the store is being opened"
        self._retry_at_s = self._beat_at_s = monotonic_s()
        self._waiting: deque[StoreRuns] = deque()
        self._batch: WriteBatch | None = None
        self._owed: list[EraseStored] = []
        self._read_errors_s: deque[float] = deque(maxlen=READ_ERRORS_MAX)
        self._ticks = 0
        self.has_left_work = False

    # -- the loop -------------------------------------------------------------------------------

    def serve(self, decoder: Decoder[Downward], early: Iterable[Downward]) -> None:
        """Serve until the engine closes its end and what it gave is finished.

        `early`: commands that came with the settings; `decoder`: has the bytes after them.
        """
        try:
            self._try_open(self._settings.wait_s)
            self._tell_changes()
            self._beat()
            for message in early:
                self._guard(partial(self._handle, message))
            self._loop(decoder)
        finally:
            self._close()

    def _loop(self, decoder: Decoder[Downward]) -> None:
        tick_at_s = self._monotonic_s()
        until_s: float | None = None
        while until_s is None or (self._is_busy and self._monotonic_s() < until_s):
            fds = [self._io.wake_fd, *([self._wire.fileno()] if until_s is None else ())]
            if self._link is not None:
                fds.append(self._link.wake_fd)
            ready, _, _ = select.select(fds, [], [], self._settings.heartbeat_s / 2)
            if self._wire.fileno() in ready:
                try:
                    data = self._wire.recv(READ_BYTES)
                    for message in decoder.feed(data):
                        self._guard(partial(self._handle, message))
                except (ConnectionError, FrameError) as error:
                    data = b""
                    self._log("storage_connection_lost", reason=type(error).__name__)
                if not data:
                    until_s = self._monotonic_s() + FINISH_S
            for then in self._io.take_ended():
                self._guard(then)
            if self._link is not None:
                self._turn_link(self._link)
            self._guard(self._start_batch)
            now_s = self._monotonic_s()
            if now_s >= tick_at_s:
                tick_at_s = now_s + TICK_S
                self._guard(self._tick)
            self._beat_if_due()

    def _turn_link(self, link: RemoteLink) -> None:
        """Take what the remote store has done, and fail what is late."""
        for then in link.take_ended():
            self._guard(then)
        self._guard(link.tick)

    @property
    def _is_busy(self) -> bool:
        return bool(self._waiting or self._io.under_way)

    def _guard(self, work: Callable[[], None]) -> None:
        """Run a piece of work; where the disk fails under it, close the store."""
        try:
            work()
        except DiskError as error:
            self._lose(_reason_of(error))
        self._tell_changes()

    def _tick(self) -> None:
        self._ticks += 1
        store = self._store
        if store is None:
            if self._monotonic_s() >= self._retry_at_s and self._dying is None:
                self._try_open(0.0)
            self._bury()
            return
        store.maintain()
        if self._ticks % WIPE_TICKS == 0:
            self._wipe(store, lambda: None)

    def _beat_if_due(self) -> None:
        """Send a heartbeat if it is time, also in the middle of a long query or change."""
        if self._monotonic_s() >= self._beat_at_s:
            self._beat()

    def _beat(self) -> None:
        self._beat_at_s = self._monotonic_s() + self._settings.heartbeat_s
        if self._io.oldest_s > JOB_S_MAX:
            return  # a disk that hangs: silence makes the engine replace this process
        if self._store is not None:
            self._send(self._store.stats())
        else:
            capacity = self._settings.disk_bytes
            self._send(StorageStats("off", self._reason, capacity_bytes=capacity))

    def _send(self, message: Upward) -> None:
        with suppress(OSError):  # the engine has gone: `_loop` notices
            self._wire.sendall(encode_frame(message))

    def _tell_changes(self) -> None:
        if self._store is not None:
            self._tell(*self._store.take_changes())

    def _tell(self, gained: tuple[bytes, ...], lost: tuple[bytes, ...]) -> None:
        for at in range(0, max(len(gained), len(lost)), NAMESPACES_PER_FRAME):
            end = at + NAMESPACES_PER_FRAME
            self._send(HeldNamespaces(gained[at:end], lost[at:end]))

    # -- opening and losing the disk ------------------------------------------------------------

    def _try_open(self, wait_s: float) -> None:
        settings = self._settings
        folder = Path(settings.dir)
        self._retry_at_s = self._monotonic_s() + RETRY_S
        try:
            prepare_folder(folder)
            if self._lock is None:
                self._lock = wait_for_lock(folder, wait_s, self._pause)
            self._store = self._open_store(folder)
            for command in self._owed:
                self._store.erase(command)
            self._owed.clear()
        except DiskError as error:
            self._reason = _reason_of(error)
            self._log("levels_not_opened", reason=self._reason)
            self._lose(self._reason)
            return
        self._reason = ""
        store = self._store
        went_back_ms = store.clock.went_back_ms
        if went_back_ms:
            self._log("clock_went_back", ms=went_back_ms)
        stats = store.stats()
        self._log("levels_opened", records=stats.records, bytes=stats.used_bytes)
        if doubt := doubt_about(folder):
            self._log("levels_doubtful", reason=doubt)
        self._wipe(store, lambda: None)

    def _open_store(self, folder: Path) -> DiskStore:
        settings, seals = self._settings, None
        if settings.seal is not None:
            seals = unlock(folder, settings.seal, self._environment)
            if seals.rewrapped:
                self._log("levels_rewrapped", keys=seals.rewrapped)
        try:
            return DiskStore(
                StoreSettings(
                    folder,
                    disk_bytes=settings.disk_bytes,
                    slot_sizes=settings.slot_sizes,
                    slab_bytes=settings.slab_bytes,
                    write_bytes_per_day=settings.write_bytes_per_day,
                    run_tokens=settings.run_tokens,
                    spare_bytes=settings.spare_bytes,
                    remote_bytes=0 if settings.remote is None else settings.remote.bytes_max,
                ),
                self._arena.view,
                self._wall_ms,
                self._uptime_s,
                self._calls,
                self._beat_if_due,
                seals,
                self._link,
            )
        except BaseException:
            if seals is not None:
                seals.close()
            raise

    def _pause(self, seconds: float) -> None:
        self._reason = "waiting for the folder's last owner to end"
        self._beat()
        time.sleep(seconds)

    def _lose(self, reason: str) -> None:
        """Close the store as soon as no thread uses it; until then there are only failures.

        The engine still counts its namespaces as held: an erasure has to reach their records.
        """
        store, self._store = self._store, None
        self._reason = reason
        self._retry_at_s = self._monotonic_s() + RETRY_S
        if store is None:
            return
        self._log("levels_lost", reason=reason)
        self._dying = store
        while self._waiting:
            self._send(Stored(self._waiting.popleft().call_id, (), "closed"))
        self._bury()

    def _bury(self) -> None:
        is_lent = self._link is not None and self._link.under_way > 0
        if self._dying is not None and not self._io.under_way and not is_lent:
            self._dying.close()
            self._dying = None

    def _close(self) -> None:
        if self._io.under_way:  # a thread hangs in a call: the next start cleans up
            self.has_left_work = True
            self._log("storage_left_work", works=self._io.under_way)
        elif self._store is not None:
            self._store.close()
        else:
            self._bury()
        self._io.close()
        if self._link is not None:
            self._link.close()
        if self._lock is not None:
            self._lock.close()

    # -- commands -------------------------------------------------------------------------------

    def _handle(self, message: Downward) -> None:
        store = self._store
        if store is None:
            self._refuse(message)
            return
        match message:
            case Look():
                self._send(store.look(message))
            case Fetch():
                for plan in store.plan_fetch(message):
                    if isinstance(plan, Fetched):
                        self._send(plan)
                    else:
                        then = partial(self._finish_read, store, plan)
                        if not store.fetch_remote(plan, then):
                            self._io.read(partial(store.read, plan), then)
            case StoreRuns():
                self._waiting.append(message)
            case Renew():
                self._send(store.renew(message))
            case Recall():
                self._send(store.recall(message))
            case EraseStored():
                self._erase(store, message)
            case SetStoredQuotas():
                store.set_quotas(message.quotas)
            case KeepHere():
                store.keep_here(message.namespaces)
            case DiskSettings():
                raise FrameError("settings twice")

    def _refuse(self, message: Downward) -> None:
        match message:
            case Look():
                self._send(Looked(message.call_id, ()))
            case Fetch():
                for record_id in message.record_ids:
                    self._send(Fetched(message.call_id, record_id, False))
            case StoreRuns():
                self._send(Stored(message.call_id, (), "closed"))
            case EraseStored():
                self._owed.append(message)  # done as soon as the disk is back
                self._send(StoredErased(message.call_id, code="closed"))
            case Renew():
                self._send(Renewed(message.call_id, code="closed"))
            case Recall():
                self._send(Recalled(message.call_id, code="closed"))
            case _:
                pass

    def _finish_read(self, store: DiskStore, plan: PlannedRead) -> None:
        if store is not self._store:
            self._send(Fetched(plan.call_id, plan.row.record_id, False))
            self._bury()
            return
        try:
            self._send(store.finish_read(plan))
        except DiskError:
            self._send(Fetched(plan.call_id, plan.row.record_id, False))
            raise
        if plan.error is not None:
            now_s = self._monotonic_s()
            self._read_errors_s.append(now_s)
            is_often = len(self._read_errors_s) == READ_ERRORS_MAX
            if is_often and now_s - self._read_errors_s[0] < READ_ERRORS_S:
                raise plan.error

    # -- stores: one batch at a time ------------------------------------------------------------

    def _start_batch(self) -> None:
        store = self._store
        if store is None or self._batch is not None or not self._waiting:
            return
        commands, records = [], 0
        while self._waiting and records < BATCH_RECORDS:
            commands.append(self._waiting.popleft())
            records += len(commands[-1].runs)
        try:
            self._batch = batch = store.plan(commands)
        except DiskError:
            for command in commands:
                self._send(Stored(command.call_id, (), "write_failed"))
            raise
        self._io.order(
            partial(store.write, batch, self._io.run_all),
            partial(self._commit, store, batch),
        )

    def _commit(self, store: DiskStore, batch: WriteBatch) -> None:
        self._batch = None
        call_ids = [one.command.call_id for one in batch.stores]
        if store is not self._store:
            for call_id in call_ids:
                self._send(Stored(call_id, (), "closed"))
            self._bury()
            return
        try:
            outcomes = store.commit(batch)
        except DiskError:
            for call_id in call_ids:
                self._send(Stored(call_id, (), "write_failed"))
            raise
        if not batch.is_promised:
            self._tell_changes()
            for outcome in outcomes:
                self._send(outcome)
            return
        failures: list[OSError] = []

        def sync() -> None:
            try:
                store.sync_log()
            except OSError as error:
                failures.append(error)

        self._io.order(sync, partial(self._tell_stored, outcomes, failures))

    def _tell_stored(self, outcomes: list[Stored], failures: list[OSError]) -> None:
        for outcome in outcomes:
            self._send(Stored(outcome.call_id, (), "write_failed") if failures else outcome)
        self._bury()
        if failures:
            raise failures[0]

    # -- erasures -------------------------------------------------------------------------------

    def _erase(self, store: DiskStore, command: EraseStored) -> None:
        kept: deque[StoreRuns] = deque()
        for waiting in self._waiting:
            if waiting.namespace == command.namespace:
                self._send(Stored(waiting.call_id, (), "erased"))
            else:
                kept.append(waiting)
        self._waiting = kept
        try:
            receipt = store.erase(command)
        except DiskError:
            self._owed.append(command)
            self._send(StoredErased(command.call_id, code="write_failed"))
            raise
        self._tell_changes()
        self._wipe(store, partial(self._end_erasure, store, command, receipt))

    def _end_erasure(self, store: DiskStore, command: EraseStored, receipt: StoredErased) -> None:
        """Answer an erasure, after objects of it were deleted, or could not be in time."""
        remote = store.remote
        if remote is None or store is not self._store or not remote.is_pending(command.namespace):
            self._send(receipt)
        elif receipt.is_shredded:  # the objects are of no use any more
            self._send(receipt)
            remote.settle(command.namespace, lambda: None)
        else:
            remote.settle(
                command.namespace,
                lambda: self._send(
                    replace(receipt, code="pending")
                    if remote.is_pending(command.namespace)
                    else receipt
                ),
            )

    def _wipe(self, store: DiskStore, then: Callable[[], None]) -> None:
        """Wipe what was given back, then call `then`."""
        places = store.take_dirty()
        if not places:
            then()
            return
        failures: list[OSError] = []

        def wipe() -> None:
            try:
                store.wipe(places)
            except OSError as error:
                failures.append(error)

        self._io.read(wipe, partial(self._end_wipe, store, places, failures, then))

    def _end_wipe(
        self,
        store: DiskStore,
        places: list[Place],
        failures: list[OSError],
        then: Callable[[], None],
    ) -> None:
        store.put_wiped(places, is_wiped=not failures)
        if store is self._store and not failures:
            self._wipe(store, then)  # the rest, and what was given back meanwhile
        else:
            then()
        self._bury()
        if failures and store is self._store:
            raise failures[0]


def _reason_of(error: BaseException) -> str:
    """Return why the disk cannot be used, in words that quote no content."""
    if isinstance(error, EngineError):
        return error.message
    if isinstance(error, OSError):
        return f"the disk failed: {os.strerror(error.errno or errno.EIO)}"
    return f"the index failed: {type(error).__name__}"


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


def attach_arena(settings: DiskSettings) -> HostArena:
    """Map the arena whose descriptor this process has inherited, and lock it for as long as the
    process lives. Raises OSError, ValueError."""
    arena = HostArena.attach(settings.arena_fd, settings.layout)
    arena.lock_until_exit(settings.generation)
    return arena


def log_line(event: str, **facts: object) -> None:
    """Write one JSON line to standard error; do nothing if its reader has gone."""
    now = datetime.now(UTC).replace(tzinfo=None)
    line = {"at": f"{now.isoformat(timespec='milliseconds')}Z", "event": event, **facts}
    with suppress(OSError):
        os.write(2, msgspec.json.encode(line) + b"\n")


def main() -> int:
    """Serve the engine that started this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        with socket.socket(fileno=sys.stdin.fileno()) as wire:
            return serve(
                wire,
                wall_ms=lambda: time.time_ns() // 1_000_000,
                uptime_s=time.monotonic,
                monotonic_s=time.monotonic,
                attach=attach_arena,
                calls=DiskCalls(),
                log=log_line,
                environment=os.environ,
            )
    except Exception as error:
        log_line("storage_failed", error=type(error).__name__)
        return 1


if __name__ == "__main__":
    status = main()
    os._exit(status)  # a thread that hangs in a call of the disk holds nothing up
