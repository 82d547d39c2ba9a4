"""The loop of the storage process: commands in, outcomes out, and a disk that may fail under it.

The main thread has the index and all decisions; it waits for the socket and for what the I/O
threads have ended, never for a slab. When the engine closes its end for any reason, the service
finishes what it was given. Where the disk fails, it answers that nothing is there and tries again
every 30 s: an engine is never held up.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from engine.errors import EngineError
from engine.moves import (
    EraseStored,
    Fetch,
    Fetched,
    FetchRuns,
    KeepHere,
    Look,
    Recall,
    Renew,
    SetStoredQuotas,
    StopFetch,
    StorageCommand,
    StorageStats,
    Stored,
    StoreRuns,
)
from engine.storage.folder import FolderLock, doubt_about, prepare_folder, wait_for_lock
from engine.storage.io_threads import IoThreads
from engine.storage.memory.arena import HostArena
from engine.storage.messages import (
    NAMESPACES_PER_FRAME,
    DiskSettings,
    Downward,
    HeldNamespaces,
    Upward,
    failures_of,
)
from engine.storage.plans import PlannedRead
from engine.storage.remote.link import RemoteLink
from engine.storage.remote.objects import RemoteFailed, RemoteStore, check_proof
from engine.storage.remote.shared_reads import SharedReads
from engine.storage.sealing.master_key import read_key
from engine.storage.sealing.unlocking import shared_proof, unlock
from engine.storage.service.erasures import StoredErasures
from engine.storage.service.log_sync import LogSync
from engine.storage.service.store_queue import StoreQueue
from engine.storage.slabs.slabs import DiskCalls
from engine.storage.space.disk_space import StoreSettings
from engine.storage.store import DiskError, DiskStore
from engine.wire import Decoder, FrameError, encode_frame

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
            if remote.is_shared:
                opened = partial(self._open_shared, opened)
            self._link = RemoteLink(opened, monotonic_s, remote.timeout_s, log)
        self._proof = b""  # of the master key; known before the link is used
        self._lock: FolderLock | None = None
        self._store: DiskStore | None = None
        self._dying: DiskStore | None = None  # lost, and still read or written by a thread
        self._reason = "the store is being opened"
        self._retry_at_s = self._heartbeat_at_s = monotonic_s()
        self._log_sync = LogSync(self._io, self._send)
        self._queue = StoreQueue(self._io, self._log_sync, self._send_stored)
        self._erasures = StoredErasures(self._io, self._send)
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
            self._send_heartbeat()
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
            ready, _, _ = select.select(fds, [], [], self._pause_s)
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
            if self._store is not None and (shared := self._store.shared) is not None:
                shared.reads.tick()
                self._tell_fetched(shared.reads)
            self._guard(self._erasures.turn)
            self._guard(self._start_batch)
            self._bury()
            now_s = self._monotonic_s()
            if now_s >= tick_at_s:
                tick_at_s = now_s + TICK_S
                self._guard(self._tick)
            self._send_heartbeat_if_due()

    def _tell_fetched(self, reads: SharedReads) -> None:
        for outcome in reads.take_told():
            self._send(outcome)

    @property
    def _pause_s(self) -> float:
        """Return how long the loop may wait for something to happen."""
        usual_s = self._settings.heartbeat_s / 2
        if self._store is None or self._store.shared is None:
            return usual_s
        next_s = self._store.shared.reads.next_s
        return usual_s if next_s is None else min(usual_s, max(0.0, next_s - self._uptime_s()))

    def _turn_link(self, link: RemoteLink) -> None:
        """Take what the remote store has done, and fail what is late."""
        for then in link.take_ended():
            self._guard(then)
        self._guard(link.tick)

    @property
    def _is_busy(self) -> bool:
        return bool(self._queue or self._io.under_way)

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
            return
        store.maintain()
        self._erasures.answer()
        if self._ticks % WIPE_TICKS == 0:
            self._erasures.wipe()

    def _send_heartbeat_if_due(self) -> None:
        """Send a heartbeat if it is time, also in the middle of a long query or change."""
        if self._monotonic_s() >= self._heartbeat_at_s:
            self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        self._heartbeat_at_s = self._monotonic_s() + self._settings.heartbeat_s
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
        if self._store is None:
            return
        gained, lost = self._store.usage.take_changes()
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
            self._erasures.opened(self._store)
        except DiskError as error:
            self._reason = _reason_of(error)
            self._log("levels_not_opened", reason=self._reason)
            self._lose(self._reason)
            return
        self._reason = ""
        if went_back_ms := self._store.clock.went_back_ms:
            self._log("clock_went_back", ms=went_back_ms)
        stats = self._store.stats()
        self._log("levels_opened", records=stats.records, bytes=stats.used_bytes)
        if doubt := doubt_about(folder):
            self._log("levels_doubtful", reason=doubt)

    def _open_store(self, folder: Path) -> DiskStore:
        settings, seals = self._settings, None
        if settings.seal is not None:
            seals = unlock(folder, settings.seal, self._environment)
            if self._shared_model:
                seal = settings.seal
                master = read_key(seal.key_file, seal.key_env, self._environment)
                self._proof = shared_proof(master)
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
                    shared_model=self._shared_model,
                ),
                self._arena.view,
                self._wall_ms,
                self._uptime_s,
                self._calls,
                self._send_heartbeat_if_due,
                seals,
                self._link,
            )
        except BaseException:
            if seals is not None:
                seals.close()
            raise

    @property
    def _shared_model(self) -> str:
        remote = self._settings.remote
        return self._settings.model_digest if remote is not None and remote.is_shared else ""

    def _open_shared(self, opened: Callable[[], RemoteStore]) -> RemoteStore:
        """Return a shared store, unless it is of another master key. For another thread. Raises
        RemoteFailed, EngineError."""
        if not (proof := self._proof):
            raise RemoteFailed("the disk is not open")
        store = opened()
        check_proof(store, proof)
        return store

    def _pause(self, seconds: float) -> None:
        self._reason = "waiting for the folder's last owner to end"
        self._send_heartbeat()
        time.sleep(seconds)

    def _lose(self, reason: str) -> None:
        """Close the store as soon as no thread uses it; until then there are only failures.

        The engine still counts its namespaces as held: an erasure has to reach their records.
        """
        self._reason = reason
        self._retry_at_s = self._monotonic_s() + RETRY_S
        if self._store is None:
            return
        self._log("levels_lost", reason=reason)
        if (shared := self._store.shared) is not None:
            shared.reads.fail_all()
            self._tell_fetched(shared.reads)
        self._store, self._dying = None, self._store
        self._queue.fail_all("closed")
        self._erasures.lost()
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
        if isinstance(message, DiskSettings):
            raise FrameError("settings twice")
        store = self._store
        if store is None:
            self._refuse(message)
            return
        match message:
            case Look() | Fetch() | Renew() | Recall():
                self._ask(store, message)
            case FetchRuns() if store.shared is not None:
                store.shared.reads.fetch(message)
            case FetchRuns():
                self._refuse(message)
            case StopFetch():
                if store.shared is not None:
                    store.shared.reads.stop(message.call_id)
            case StoreRuns():
                self._queue.add(message)
            case EraseStored():
                self._queue.fail_all("erased", message.namespace)
                self._erasures.begin(store, message)
            case SetStoredQuotas():
                store.quotas.set(message.quotas)
            case KeepHere():
                store.keep_here(message.namespaces)

    def _ask(self, store: DiskStore, message: Look | Fetch | Renew | Recall) -> None:
        """Have a command answered by the index. Where that fails, it is refused."""
        plans: list[PlannedRead | Fetched] = []
        try:
            match message:
                case Look() if store.shared is not None:
                    store.shared.reads.look(message, store.look(message), self._send)
                case Look():
                    self._send(store.look(message))
                case Fetch():
                    plans = store.plan_fetch(message)
                case Renew() if message.promise_s or message.lease_ids:
                    self._log_sync.tell(store, [store.renew(message)])
                case Renew():
                    self._send(store.renew(message))
                case Recall():
                    self._send(store.recall(message))
        except DiskError:
            self._refuse(message)
            raise
        for plan in plans:
            if isinstance(plan, Fetched):
                self._send(plan)
            else:
                self._guard(partial(self._begin_read, store, plan))

    def _begin_read(self, store: DiskStore, plan: PlannedRead) -> None:
        then = partial(self._finish_read, store, plan)
        if not store.fetch_remote(plan, then):
            self._io.read(partial(store.reader.read, plan), then)

    def _refuse(self, command: StorageCommand) -> None:
        if isinstance(command, EraseStored):
            self._erasures.owe(command, "closed")
            return
        for outcome in failures_of(command):
            self._send(outcome)

    def _finish_read(self, store: DiskStore, plan: PlannedRead) -> None:
        if store is not self._store:
            self._send(Fetched(plan.call_id, plan.row.record_id, False))
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

    def _start_batch(self) -> None:
        if (store := self._store) is not None:
            self._queue.start(store, lambda: store is not self._store)

    def _send_stored(self, outcome: Stored) -> None:
        """Tell the outcome of a store, after the namespaces that it has changed."""
        self._tell_changes()
        self._send(outcome)


def _reason_of(error: BaseException) -> str:
    """Return why the disk cannot be used, in words that quote no content."""
    if isinstance(error, EngineError):
        return error.message
    if isinstance(error, OSError):
        return f"the disk failed: {os.strerror(error.errno or errno.EIO)}"
    return f"the index failed: {type(error).__name__}"
