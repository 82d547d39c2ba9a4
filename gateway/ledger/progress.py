"""Progress of streams, written to the ledger every 16 tokens or 250 ms, whichever comes first.

A token counts once the client's socket has taken its bytes: bytes that are still in this process
die with it. Notes are made early, so that they are durable in time, and notes of all streams within
some milliseconds become one. This module knows no dialect, no price and no request.
`gateway.generation` reports each write, and never waits for a note.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from gateway.dialects.canonical import UsageRecord

PROGRESS_TOKENS = 8
PROGRESS_INTERVAL_S = 0.2
"""Tokens and seconds between notes: less than is promised, which leaves time to gather notes and to
write them to disk."""

PROGRESS_FLUSH_S = 0.02
"""Seconds that notes wait for notes of other streams. A commit costs ten times what a note costs:
this allows at most 50 commits a second for all streams together."""

PROGRESS_FLUSH_REMOTE_S = 0.04
"""The same where the database is a server: a commit costs twice as much there, and other gateways
wait for its lock. Streams of up to 170 tokens/s are noted in time, and of up to 300 tokens/s in a
file."""

CallLater = Callable[[float, Callable[[], None]], object]
Notes = dict[str, UsageRecord]


class DeltaSource(Protocol):
    """The part of `gateway.generation.output_stream.OutputStream` that this module uses.

    `tokens_seen`: tokens that the engine has sent; the text of some may be held back.
    """

    @property
    def tokens_seen(self) -> int: ...

    def delivered_usage(self) -> UsageRecord:
        """Return the usage of all deltas with complete texts."""


class CountedConnection(Protocol):
    """The part of `gateway.http.connection.Connection` that this module uses.

    `bytes_written`: bytes handed to the socket's transport, which may hold some of them.
    """

    @property
    def bytes_written(self) -> int: ...

    def is_closing(self) -> bool: ...

    def get_write_buffer_size(self) -> int: ...


class ProgressJournal:
    """Progress of all open streams of a gateway. Belongs to one event loop."""

    def __init__(
        self,
        note: Callable[[Notes], None],
        flush_s: float = PROGRESS_FLUSH_S,
        call_later: CallLater | None = None,
    ) -> None:
        """`note`: records usage by request id, and returns at once. `flush_s`: how long notes wait
        for notes of other streams. `call_later`: the event loop's by default."""
        self._note = note
        self._flush_s = flush_s
        self._call_later = call_later
        self._open_streams: dict[str, StreamProgress] = {}
        self._due_streams: dict[str, StreamProgress] = {}
        self._is_ticking = False

    @contextmanager
    def following(
        self, request_id: str, source: DeltaSource, connection: CountedConnection
    ) -> Iterator[StreamProgress]:
        """Track one stream while its response is written."""
        stream = StreamProgress(self, request_id, source, connection)
        self._open_streams[request_id] = stream
        if not self._is_ticking:
            self._is_ticking = True
            self._schedule(PROGRESS_INTERVAL_S, self._tick)
        try:
            yield stream
        finally:
            del self._open_streams[request_id]
            self._due_streams.pop(request_id, None)

    def flush_soon(self, stream: StreamProgress) -> None:
        """Note this stream's progress within `flush_s`."""
        if not self._due_streams:
            self._schedule(self._flush_s, self._flush_due)
        self._due_streams[stream.request_id] = stream

    def _flush_due(self) -> None:
        due, self._due_streams = self._due_streams, {}
        self._write(due)

    def _tick(self) -> None:
        """Note streams that have too few tokens for a note of their own."""
        self._is_ticking = bool(self._open_streams)
        if self._open_streams:
            for stream in self._open_streams.values():
                stream.mark()
            self._write(self._open_streams)
            self._schedule(PROGRESS_INTERVAL_S, self._tick)

    def _write(self, streams: dict[str, StreamProgress]) -> None:
        delivered = {request_id: stream.take_delivered() for request_id, stream in streams.items()}
        notes = {request_id: usage for request_id, usage in delivered.items() if usage is not None}
        if notes:
            self._note(notes)

    def _schedule(self, seconds: float, call: Callable[[], None]) -> None:
        (self._call_later or asyncio.get_running_loop().call_later)(seconds, call)


class StreamProgress:
    """Progress of one stream.

    `is_behind`: the source is ahead of the written bytes. The writer sets it before it takes
    deltas, and calls `wrote` after writing them.
    """

    def __init__(
        self,
        journal: ProgressJournal,
        request_id: str,
        source: DeltaSource,
        connection: CountedConnection,
    ) -> None:
        self._journal = journal
        self.request_id = request_id
        self._source = source
        self._connection = connection
        self._marked_seen = 0
        self._mark_at = PROGRESS_TOKENS
        self._marked_tokens = 0
        self._marks: deque[tuple[int, UsageRecord]] = deque()
        self.is_behind = False

    def wrote(self) -> None:
        """All deltas of the source have been handed to the transport. O(1)."""
        self.is_behind = False
        if self._source.tokens_seen >= self._mark_at:
            self.mark()
            if self._marks:
                self._journal.flush_soon(self)

    def mark(self) -> None:
        """Remember the usage that has been written, and the byte offset at which it ends."""
        if self.is_behind or self._source.tokens_seen == self._marked_seen:
            return
        usage = self._source.delivered_usage()
        if usage.out > self._marked_tokens:
            self._marked_seen = self._source.tokens_seen
            self._marked_tokens, self._mark_at = usage.out, self._marked_seen + PROGRESS_TOKENS
            self._marks.append((self._connection.bytes_written, usage))

    def take_delivered(self) -> UsageRecord | None:
        """Return the usage that the socket has taken since the last call; None if nothing more.

        A closing connection has dropped its buffer, so its sizes say nothing.
        """
        connection = self._connection
        if not self._marks or connection.is_closing():
            return None
        delivered_bytes = connection.bytes_written - connection.get_write_buffer_size()
        usage = None
        while self._marks and self._marks[0][0] <= delivered_bytes:
            usage = self._marks.popleft()[1]
        return usage
