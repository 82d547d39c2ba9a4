"""Fetches prefixes from other engines: `engine.moves.Peers` over TLS, a thread for each.

A thread reads a copy into its slot and compares the digest; one that has other bytes is no outcome
that counts, and its slot is never used. Nothing waits for a thread: at its deadline, or when it is
stopped, what it has not got has failed.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash

from engine.api import Clock, Peer
from engine.client.tls_files import holder_of, tls_context
from engine.errors import EngineError
from engine.moves import FetchedRun, FetchRuns, PeerMiss
from engine.protocol import (
    PROTOCOL_VERSION,
    Hello,
    PeerEnd,
    PeerMessage,
    PeerRun,
    PeerWant,
    Rejected,
    encode,
    pack_tokens,
    read_peer,
)

FETCHES_MAX: Final = 4
"""Fetches at a time; a further one fails at once."""
HEAD_BYTES_MAX: Final = 2**16
"""Bytes of a frame from another engine; copies follow outside of frames."""
CLOSE_S: Final = 1.0
_LENGTH = struct.Struct("<I")


class PeerFetches:
    """The fetches of one engine. One thread fetches, stops, polls and closes."""

    def __init__(
        self,
        name: str,
        tls: Path,
        model_digest: str,
        view: Callable[[int, int], memoryview],
        clock: Clock = time.monotonic,
    ) -> None:
        """`name`: this engine's, in the certificate in the folder `tls`. `view`: a slot's bytes."""
        self._name, self._tls, self._model_digest = name, tls, model_digest
        self._view, self._clock = view, clock
        self._lock = threading.Lock()
        self._outcomes: list[FetchedRun] = []
        self._open: dict[int, _Fetch] = {}

    def fetch(self, command: FetchRuns) -> None:
        """See `Peers`. Starts a thread."""
        assert command.peer is not None, "shared stores are of the storage process"
        one = _Fetch(self, command, command.peer)
        with self._lock:
            if len(self._open) >= FETCHES_MAX:
                self._outcomes += [FetchedRun(command.call_id, "busy")] * len(command.slots)
                return
            self._open[command.call_id] = one
        one.thread.start()

    def stop(self, call_id: int) -> None:
        """See `Peers`."""
        with self._lock:
            one = self._open.get(call_id)
        if one is not None:
            one.stop()

    def poll(self) -> list[FetchedRun]:
        """See `Peers`."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self) -> None:
        """See `Peers`. Waits for the threads, a second at most for all."""
        with self._lock:
            threads = list(self._open.values())
        for one in threads:
            one.stop()
        until_s = self._clock() + CLOSE_S
        for one in threads:
            one.thread.join(max(0.0, until_s - self._clock()))

    # -- called by threads ------------------------------------------------------------------------

    def run(self, one: _Fetch) -> None:
        """Carry out a fetch; each of its runs gets its outcome."""
        command, why = one.command, one.read_all(self._open_connection)
        left = len(command.slots) - one.done
        with self._lock:
            self._outcomes += [FetchedRun(command.call_id, why or "lacking")] * left
            del self._open[command.call_id]

    def came(self, one: _Fetch, run: PeerRun, slot: int, wire: ssl.SSLSocket) -> bool:
        """Read a copy into its slot; return whether its bytes are right."""
        began_s = self._clock()
        content = self._view(slot, one.command.form.slot_bytes)
        one.receive_into(wire, content)
        if xxhash.xxh3_128_digest(content) != run.check:
            return False
        took_s = self._clock() - began_s
        outcome = FetchedRun(one.command.call_id, "", run.check, run.limit_s, took_s)
        with self._lock:
            self._outcomes.append(outcome)
        return True

    def now_s(self) -> float:
        """Return the time by which deadlines count."""
        return self._clock()

    def _open_connection(self, one: _Fetch, end: socket.socket) -> ssl.SSLSocket:
        """Return a connection that has asked for what is wanted. Raises OSError, EngineError."""
        command, peer = one.command, one.peer
        context = tls_context(self._tls, is_server=False)
        wire = context.wrap_socket(end, server_hostname="engine")
        if holder_of(wire.getpeercert()) != f"engine/{peer.name}":
            wire.close()
            raise EngineError("unauthorized", "another engine answers there")
        tokens = pack_tokens(command.tokens)
        wanted = PeerWant(
            *(self._model_digest, command.namespace, tokens, peer.ticket, command.first),
            *(command.form.name, command.form.slot_bytes),
        )
        hello = Hello(PROTOCOL_VERSION, role="peer", name=self._name, wanted=wanted)
        wire.sendall(encode(hello))
        return wire


class _Fetch:
    """One fetch, with its thread. `done`: runs that have come."""

    def __init__(self, owner: PeerFetches, command: FetchRuns, peer: Peer) -> None:
        self.command, self.peer, self.done = command, peer, 0
        self.thread = threading.Thread(target=owner.run, args=(self,), name="peer", daemon=True)
        self._owner = owner
        self._until_s = owner.now_s() + command.timeout_s
        self._is_stopped = threading.Event()
        self._end: socket.socket | None = None

    def stop(self) -> None:
        """Have it fail soon."""
        self._is_stopped.set()
        if (end := self._end) is not None:
            with suppress(OSError):
                socket.socket.shutdown(end, socket.SHUT_RDWR)

    def read_all(
        self, open_connection: Callable[[_Fetch, socket.socket], ssl.SSLSocket]
    ) -> PeerMiss:
        """Read all runs; return why some are missing."""
        try:
            address = self.peer.host, self.peer.port
            with (
                socket.create_connection(address, timeout=self._left_s()) as end,
                open_connection(self, end) as wire,
            ):
                self._end = wire
                return self._read_runs(wire)
        except TimeoutError:
            why: PeerMiss = "late"
        except (OSError, EngineError, ValueError):
            why = "lost"
        return "stopped" if self._is_stopped.is_set() else why

    def receive_into(self, wire: ssl.SSLSocket, view: memoryview) -> None:
        """Fill a view. Raises OSError at the end of the connection, TimeoutError."""
        while len(view):
            wire.settimeout(self._left_s())
            count = wire.recv_into(view)
            if not count:
                raise ConnectionError("the connection has ended")
            view = view[count:]

    def _read_runs(self, wire: ssl.SSLSocket) -> PeerMiss:
        for slot in self.command.slots:
            message = self._read(wire)
            if isinstance(message, Rejected):
                return "refused"
            if isinstance(message, PeerEnd):
                return "busy" if message.why == "busy" else "lacking"
            if not self._owner.came(self, message, slot, wire):
                return "damaged"
            self.done += 1
        return ""

    def _read(self, wire: ssl.SSLSocket) -> PeerMessage:
        size = bytearray(_LENGTH.size)
        self.receive_into(wire, memoryview(size))
        (length,) = _LENGTH.unpack(size)
        if length > HEAD_BYTES_MAX:
            raise ConnectionError(f"a frame of {length} bytes; expected {HEAD_BYTES_MAX} at most")
        body = bytearray(length)
        self.receive_into(wire, memoryview(body))
        return read_peer(bytes(body))

    def _left_s(self) -> float:
        left_s = self._until_s - self._owner.now_s()
        if left_s <= 0 or self._is_stopped.is_set():
            raise TimeoutError
        return left_s
