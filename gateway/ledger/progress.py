"""How far streams have come, noted in the ledger every 16 tokens or 250 ms, whichever comes first.

A token counts once the client's socket has taken the bytes that say it: what still lies in this
process dies with it. Notes are made early, so that they are durable in time, and those of all
streams within some milliseconds are one. It knows no dialect, no price and no request; `answer`
tells it of each write, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from gateway.dialects.canonical import UsageRecord

NOTE_TOKENS = 8
NOTE_S = 0.2
"""Earlier than is promised: the rest is for gathering and for the disk."""

GATHER_S = 0.02
"""A commit costs ten times what it says: 50 a second at most, for all streams together."""

GATHER_FAR_S = 0.04
"""Over a server it costs twice that, and others wait for its lock. Streams of up to 170 tokens/s
are noted in time, where it is 300 in a file."""

CallLater = Callable[[float, Callable[[], None]], object]
Notes = dict[str, UsageRecord]


class Source(Protocol):
    """`gateway.generation.output_stream.OutputStream`, as far as it matters here. `tokens_seen`:
    that the engine has sent; the text of some may have been held back."""

    @property
    def tokens_seen(self) -> int: ...

    def delivered_usage(self) -> UsageRecord:
        """Of what its deltas have said in full."""


class CountedConnection(Protocol):
    """`gateway.http.connection.Connection`, as far as it matters here. `bytes_written`: those
    handed to the socket's transport, which may hold some."""

    @property
    def bytes_written(self) -> int: ...

    def is_closing(self) -> bool: ...

    def get_write_buffer_size(self) -> int: ...


class ProgressJournal:
    """The progress of all open streams of one gateway. Belongs to one loop."""

    def __init__(
        self,
        note: Callable[[Notes], None],
        gather_s: float = GATHER_S,
        call_later: CallLater | None = None,
    ) -> None:
        """`note`: keeps usage by request id, and returns at once. `gather_s`: how long notes wait
        for others'. `call_later`: the loop's."""
        self._note = note
        self._gather_s = gather_s
        self._call_later = call_later
        self._open: dict[str, StreamProgress] = {}
        self._due: dict[str, StreamProgress] = {}
        self._is_ticking = False

    @contextmanager
    def following(
        self, request_id: str, source: Source, connection: CountedConnection
    ) -> Iterator[StreamProgress]:
        """One stream, for as long as it is written."""
        stream = StreamProgress(self, request_id, source, connection)
        self._open[request_id] = stream
        if not self._is_ticking:
            self._is_ticking = True
            self._later(NOTE_S, self._tick)
        try:
            yield stream
        finally:
            del self._open[request_id]
            self._due.pop(request_id, None)

    def is_due(self, stream: StreamProgress) -> None:
        """Enough has been written to be noted soon."""
        if not self._due:
            self._later(self._gather_s, self._gather)
        self._due[stream.request_id] = stream

    def _gather(self) -> None:
        due, self._due = self._due, {}
        self._write(due)

    def _tick(self) -> None:
        """Whatever was not enough to be noted by itself."""
        self._is_ticking = bool(self._open)
        if self._open:
            for stream in self._open.values():
                stream.mark()
            self._write(self._open)
            self._later(NOTE_S, self._tick)

    def _write(self, streams: dict[str, StreamProgress]) -> None:
        taken = {request_id: stream.taken() for request_id, stream in streams.items()}
        notes = {request_id: usage for request_id, usage in taken.items() if usage is not None}
        if notes:
            self._note(notes)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        (self._call_later or asyncio.get_running_loop().call_later)(seconds, call)


class StreamProgress:
    """One stream's. `is_behind`: its source is ahead of what has been written; whoever writes sets
    it before deltas are taken, and `wrote` ends it."""

    __slots__ = (
        *("_due_at", "_journal", "_marked", "_marks", "_seen", "_source", "_connection"),
        *("is_behind", "request_id"),
    )

    def __init__(
        self,
        journal: ProgressJournal,
        request_id: str,
        source: Source,
        connection: CountedConnection,
    ) -> None:
        self._journal = journal
        self.request_id = request_id
        self._source = source
        self._connection = connection
        self._seen = 0
        self._due_at = NOTE_TOKENS
        self._marked = 0
        self._marks: deque[tuple[int, UsageRecord]] = deque()
        self.is_behind = False

    def wrote(self) -> None:
        """All that its source has said was handed to the transport. O(1), and nearly nothing."""
        self.is_behind = False
        if self._source.tokens_seen >= self._due_at:
            self.mark()
            if self._marks:
                self._journal.is_due(self)

    def mark(self) -> None:
        """Remember what has been written, and at which byte it ends."""
        if self.is_behind or self._source.tokens_seen == self._seen:
            return
        usage = self._source.delivered_usage()
        if usage.out > self._marked:
            self._seen = self._source.tokens_seen
            self._marked, self._due_at = usage.out, self._seen + NOTE_TOKENS
            self._marks.append((self._connection.bytes_written, usage))

    def taken(self) -> UsageRecord | None:
        """What the socket has taken since it was asked last; None for nothing more.

        A connection that closes has dropped what it held: it says nothing any more."""
        connection = self._connection
        if not self._marks or connection.is_closing():
            return None
        taken = connection.bytes_written - connection.get_write_buffer_size()
        usage = None
        while self._marks and self._marks[0][0] <= taken:
            usage = self._marks.popleft()[1]
        return usage
