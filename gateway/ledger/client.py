"""Client of the ledger process: the event loop hands items in and awaits their commits.

The items of one loop turn leave in few frames; a single item leaves at once. One answer wakes the
loop for all items of a commit. A process that dies is replaced at once, and queued items wait for
the next process. Unanswered entries, and the holds of running requests, are sent again, once, since
settling twice changes nothing; all other unanswered items are refused. Running requests go on: the
next process learns their ids and closes all other holds. This module knows no price and no
database. `app.serve` opens the client. The client belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from engine.client.frame_wire import FrameWire
from engine.processes import DATABASE
from engine.wire import FrameError, encode_frame
from gateway.ledger.protocol import BatchResult, NotOpened, Open, Opened, error_of, read_from_writer
from gateway.processes.child_process import ChildProcess, Report, RestartPolicy
from tenancy.errors import LedgerUnavailable, StoreError, TenancyError
from tenancy.ledger.epochs import LedgerEpoch
from tenancy.ledger.holds import ProgressNote
from tenancy.ledger.transactions import Hold, Item, NamedEntry, entry_in
from tenancy.ledger.writer import NOT_DURABLE, is_written
from tenancy.storage.backends import is_server
from tenancy.types import TokenCounts, UsageEntry

COMMAND = (sys.executable, "-m", "gateway.ledger.process")
RESTARTS = RestartPolicy((0.0, 0.5, 1.0, 2.0, 4.0, 5.0))

CLOSE_S = 30.0
"""Seconds for queued items to be written, and again for the process to exit: a disk may be slow."""

STALL_S = 0.25
"""Seconds without an answer after which the disk may have failed."""

FRAME_ITEMS = 16
"""Items that leave before the loop turn ends. If all 32 items of a turn left at its end, the
gateway would wait for the whole commit and the ledger for the next turn: that costs 12 % of the
throughput without a ledger, where 16 items cost 3 %."""

UNENCODABLE = (ValueError, OverflowError, FrameError)
"""Errors of items that fit no message, or no frame together."""

Waiter = asyncio.Future[None]
Pair = tuple[Item, Waiter | None]


class LedgerProcessClient:
    """A `LedgerClient` over a ledger in a separate process."""

    def __init__(
        self,
        place: str,
        folder: Path,
        report: Report,
        command: tuple[str, ...] = COMMAND,
        restarts: RestartPolicy = RESTARTS,
        gateway: str = "",
    ) -> None:
        """`place`, `folder`: the database, as `tenancy.storage.backends` names it. `gateway`: names
        this start of the gateway."""
        self._place, self._folder, self._gateway = place, folder, gateway
        self._loop = asyncio.get_running_loop()
        self._child = ChildProcess(
            *("ledger", command, restarts, report, self._run_process, self._on_pause),
            variables=DATABASE if is_server(place) else (),
        )
        self._opening: asyncio.Future[Opened] = self._loop.create_future()
        self._lost = asyncio.Event()
        self._was_open = False
        self._writer_id = 0
        self._wire: FrameWire | None = None
        self._queued: list[Pair] = []  # not sent: of this loop turn, or waiting for a process
        self._turn_items = 0  # items queued in this loop turn
        self._is_sparse_traffic = True  # the last loop turn with items had one item
        self._in_flight: deque[Pair] = deque()  # sent, not answered
        # items sent a second time, by type and request id
        self._resent: set[tuple[type[Item], str]] = set()
        self._held_requests: set[str] = set()  # ids of requests that have a hold and no entry
        self._accepts_items = True  # a process runs or starts soon
        self._is_restart_paused = False  # in a restart pause; new requests are refused
        self._is_closing = False
        self._last_write_ok = True
        self._report, self._is_refused = report, False  # by the database, which was logged
        # loop time of the last answer, or of the first item sent after it
        self._last_answer_s = 0.0
        self.found_epoch: LedgerEpoch | None = None
        self.interrupted = 0

    async def open(self) -> None:
        """Start the process and wait until it accepts items.

        Raises StoreError if the first process cannot open the database, and closes then; later
        processes are retried.
        """
        self._child.start()
        try:
            await self._child.wait_ready()
        except BaseException:
            await self.close()
            raise

    @property
    def pid(self) -> int:
        """Id of the running process; 0 without a process."""
        return self._child.pid

    @property
    def restarts(self) -> int:
        """Number of restarts, including one that is about to happen."""
        return self._child.restarts

    @property
    def is_well(self) -> bool:
        """See `LedgerClient`."""
        if (
            not self._last_write_ok
            or self._wire is None
            or self._is_restart_paused
            or not self._accepts_items
        ):
            return False
        return not self._in_flight or self._loop.time() - self._last_answer_s < STALL_S

    def write(self, item: Item) -> Waiter:
        """See `LedgerClient`. Items are refused while no process can be started; during a restart
        pause only entries are queued."""
        waiter: Waiter = self._loop.create_future()
        is_accepted = self._accepts_items
        # An entry ends its request's hold, even when the entry is refused.
        if isinstance(item, UsageEntry):
            self._held_requests.discard(item.request_id)
        elif isinstance(item, NamedEntry):
            self._held_requests.discard(item.entry.request_id)
        elif self._is_restart_paused:
            is_accepted = False
        elif is_accepted and isinstance(item, Hold):
            self._held_requests.add(item.request_id)
        if is_accepted:
            self._enqueue(item, waiter)
        else:
            waiter.set_exception(self._unavailable_error())
        return waiter

    def note_progress(self, reached: Mapping[str, TokenCounts]) -> None:
        """See `LedgerClient`."""
        if self._accepts_items and not self._is_restart_paused:
            self._enqueue(ProgressNote(reached), None)

    def holds_first(self) -> AbstractContextManager[None]:
        """See `LedgerClient`. Does nothing: this client defers no hold."""
        return nullcontext()

    async def close(self) -> None:
        """Write all queued items, then end the process. Safe to repeat."""
        if self._is_closing:
            return
        self._is_closing, self._accepts_items = True, False
        waiters = [waiter for _, waiter in (*self._in_flight, *self._queued) if waiter is not None]
        if waiters:
            await asyncio.wait(waiters, timeout=CLOSE_S)
        await self._child.stop()
        if self._wire is not None:
            self._wire.end()  # the process writes the received items and exits
        await self._child.end(CLOSE_S)
        self._on_wire_end()
        self._refuse_all(self._queued)

    # -- items and their answers ----------------------------------------------------------------

    def _enqueue(self, item: Item, waiter: Waiter | None) -> None:
        queued = self._queued
        queued.append((item, waiter))
        if not self._turn_items:
            self._loop.call_soon(self._end_turn)
        self._turn_items += 1
        if len(queued) == FRAME_ITEMS or (self._is_sparse_traffic and not self._in_flight):
            self._flush()

    def _end_turn(self) -> None:
        """Send the rest of the turn's items.

        After a turn with one item, the next item leaves at once. After a turn with several items,
        the first item waits: sent by itself, it would cost the others a commit.
        """
        self._is_sparse_traffic = self._turn_items == 1
        self._turn_items = 0
        self._flush()

    def _flush(self) -> None:
        """Send all queued items in one frame. Without a process the items stay queued."""
        if self._wire is None or not self._queued:
            return
        queued, self._queued = self._queued, []
        try:
            frame = encode_frame([item for item, _ in queued])
        except UNENCODABLE:
            queued, frame = self._drop_unencodable(queued)
        if not self._in_flight:
            self._last_answer_s = self._loop.time()
        self._in_flight.extend(queued)
        self._wire.send(frame)

    def _drop_unencodable(self, queued: list[Pair]) -> tuple[list[Pair], bytes]:
        """Fail the items that cannot be encoded; return the other items and their frames."""
        good, frames = [], []
        for item, waiter in queued:
            try:
                frames.append(encode_frame([item]))
            except UNENCODABLE as error:
                message = f"Ledger item cannot be encoded: {type(error).__name__}."
                self._fail(item, waiter, LedgerUnavailable("impossible_entry", message))
            else:
                good.append((item, waiter))
        return good, b"".join(frames)

    def _on_frame(self, frame: bytes) -> None:
        """Handle one frame from the process."""
        match message := read_from_writer(frame):
            case BatchResult():
                self._resolve_batch(message)
            case Opened():
                if not self._opening.done():
                    self._opening.set_result(message)
            case NotOpened():
                if not self._opening.done():
                    self._opening.set_exception(error_of(message.failure))
                self._on_wire_end()

    def _resolve_batch(self, answered: BatchResult) -> None:
        """Resolve the waiters of one commit, in the order in which the items were sent."""
        refused, next_item = answered.refused, self._in_flight.popleft
        self._last_answer_s, reason = self._loop.time(), ""
        for at in range(answered.count):
            item, waiter = next_item()
            if refused and at in refused:
                error = error_of(refused[at])
                reason = reason if is_written(error) else error.message
                self._fail(item, waiter, error)
            elif waiter is not None and not waiter.done():
                waiter.set_result(None)
        self._last_write_ok = not reason
        if self._is_refused is not bool(reason):
            self._is_refused = bool(reason)
            facts: dict[str, object] = {"reason": reason} if reason else {}
            self._report("ledger_unwritable" if reason else "ledger_writable", facts)

    def _fail(self, item: Item, waiter: Waiter | None, error: TenancyError) -> None:
        if isinstance(item, Hold) and not item.is_running:
            self._held_requests.discard(item.request_id)
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def _unavailable_error(self) -> LedgerUnavailable:
        if self._is_closing:
            return LedgerUnavailable("closed", "The ledger is closed.")
        return LedgerUnavailable(NOT_DURABLE, "The ledger process is not running.")

    # -- one process ----------------------------------------------------------------------------

    async def _run_process(self) -> str:
        """Run one process from its start until its wire ends; see `ChildProcess`."""
        try:
            opened = await self._open_process()
        except StoreError as error:
            if not self._was_open:
                raise
            self._accepts_items = False
            self._refuse_all(self._queued)
            return error.message
        if not self._was_open:
            self._was_open = True
            self.found_epoch, self.interrupted = opened.found_epoch, opened.interrupted
        self._writer_id = opened.writer_id
        self._accepts_items, self._is_restart_paused = not self._is_closing, False
        self._child.set_ready(interrupted=opened.interrupted)
        await self._lost.wait()
        return "connection lost"

    async def _open_process(self) -> Opened:
        """Start a process, send it the ids of running requests, then the queued items.

        Raises StoreError if the process cannot open the database, or dies before it has opened it.
        """
        self._opening = self._loop.create_future()
        self._lost.clear()
        try:
            self._wire = FrameWire(await self._child.spawn(), self._on_frame, self._on_wire_end)
        except OSError as error:
            message = f"The ledger process cannot be started: {error.strerror}."
            raise StoreError("unusable", message) from error
        # A request whose entry is queued has an open hold in the database, too.
        waiting = [entry.request_id for item, _ in self._queued if (entry := entry_in(item))]
        living = [*self._held_requests, *waiting]
        opening = Open(self._place, str(self._folder), living, self._writer_id, self._gateway)
        self._wire.send(encode_frame(opening))
        self._flush()
        return await self._opening

    def _on_wire_end(self) -> None:
        """Queue the unanswered items of running requests again, and fail the other unanswered
        items.

        An item that was in flight at two deaths in a row is failed: it may be the cause.
        """
        if self._wire is None:
            return
        self._wire.close()
        self._wire = None
        self._last_write_ok = False
        lost, self._in_flight = self._in_flight, deque()
        resent_before, self._resent = self._resent, set()
        to_resend: list[Pair] = []
        for item, waiter in lost:
            request_id = _id_of_running_request(item)
            if request_id and (type(item), request_id) not in resent_before:
                self._resent.add((type(item), request_id))
                to_resend.append((item, waiter))
            else:
                message = "The ledger process died before it confirmed the write."
                self._fail(item, waiter, LedgerUnavailable(NOT_DURABLE, message))
        self._queued[:0] = to_resend
        if not self._opening.done():
            message = "The ledger process died before it opened the database."
            self._opening.set_exception(StoreError("unusable", message))
        self._lost.set()

    def _on_pause(self) -> None:
        """Refuse queued items before a pause, except entries: their requests have been answered."""
        self._is_restart_paused = True
        new = [pair for pair in self._queued if entry_in(pair[0]) is None]
        self._queued = [pair for pair in self._queued if entry_in(pair[0]) is not None]
        self._refuse_all(new)

    def _refuse_all(self, pairs: list[Pair]) -> None:
        for item, waiter in pairs:
            self._fail(item, waiter, self._unavailable_error())
        pairs.clear()


def _id_of_running_request(item: Item) -> str:
    """Return the request id of an entry, or of a hold whose request runs already; "" for other
    items.

    Such a request goes on without an answer to this item.
    """
    if isinstance(item, Hold):
        return item.request_id if item.is_running else ""
    entry = entry_in(item)
    return "" if entry is None else entry.request_id
