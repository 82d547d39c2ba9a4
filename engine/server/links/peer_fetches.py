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

from engine.api import Clock, Fidelity, Peer
from engine.client.tls_files import holder_of, tls_context
from engine.errors import EngineError
from engine.moves import (
    FetchBlocks,
    FetchedBlocks,
    FetchedRun,
    FetchRuns,
    NearPools,
    PeerMiss,
)
from engine.protocol import (
    PROTOCOL_VERSION,
    Hello,
    PeerEnd,
    PeerLent,
    PeerMessage,
    PeerRun,
    PeerWant,
    Rejected,
    encode,
    pack_tokens,
    read_peer,
)

FETCHES_MAX: Final = 4
"""Fetches at a time; a further one of copies fails at once, one of blocks waits."""
HEAD_BYTES_MAX: Final = 2**20
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
        pools: NearPools | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`name`: this engine's, in the certificate in the folder `tls`. `view`: a slot's bytes.
        `pools`: of this host's engines, for near fetches."""
        self.pools = pools
        self._name, self._tls, self._model_digest = name, tls, model_digest
        self._view, self._clock = view, clock
        self._lock = threading.Lock()
        self._outcomes: list[FetchedRun] = []
        self._copied: list[FetchedBlocks] = []
        self._open: dict[int, _Fetch] = {}
        self._queued: dict[int, _Fetch] = {}

    def fetch(self, command: FetchRuns) -> None:
        """See `Peers`. Starts a thread."""
        assert command.peer is not None, "shared stores are of the storage process"
        if not self._begin(_Fetch(self, command, command.peer, self._run)):
            with self._lock:
                self._outcomes += [FetchedRun(command.call_id, "busy")] * len(command.slots)

    def fetch_blocks(self, command: FetchBlocks) -> None:
        """See `NearPeers`. Starts a thread, at once or when another fetch has ended: these are
        short."""
        with self._lock:
            self._queued[command.call_id] = _Fetch(self, command, command.peer, self._run_near)
        self._begin_next()

    def stop(self, call_id: int) -> None:
        """See `Peers`."""
        with self._lock:
            one = self._open.get(call_id) or self._queued.get(call_id)
        if one is not None:
            one.stop()

    def poll(self) -> list[FetchedRun]:
        """See `Peers`."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def poll_blocks(self) -> list[FetchedBlocks]:
        """See `NearPeers`."""
        with self._lock:
            outcomes, self._copied = self._copied, []
        return outcomes

    def close(self) -> None:
        """See `Peers`. Waits for the threads, a second at most for all."""
        with self._lock:
            threads = list(self._open.values())
            self._queued.clear()
        for one in threads:
            one.stop()
        until_s = self._clock() + CLOSE_S
        for one in threads:
            one.thread.join(max(0.0, until_s - self._clock()))
        if self.pools is not None and not any(one.thread.is_alive() for one in threads):
            self.pools.close()

    def now_s(self) -> float:
        """Return the time by which deadlines count."""
        return self._clock()

    def _begin_next(self) -> None:
        """Begin the fetch that has waited longest, if there is room."""
        with self._lock:
            call_id, one = next(iter(self._queued.items()), (0, None))
            if one is None or len(self._open) >= FETCHES_MAX:
                return
            self._open[call_id] = self._queued.pop(call_id)
            one.thread.start()  # inside: what is open can be joined

    def _begin(self, one: _Fetch) -> bool:
        with self._lock:
            if len(self._open) >= FETCHES_MAX:
                return False
            self._open[one.command.call_id] = one
            one.thread.start()
        return True

    # -- called by threads ------------------------------------------------------------------------

    def _run(self, one: _Fetch) -> None:
        """Carry out a fetch of copies; each of its runs gets its outcome."""
        command, done = one.command, 0
        assert isinstance(command, FetchRuns), "it was begun so"

        def read(wire: ssl.SSLSocket) -> PeerMiss:
            nonlocal done
            for slot in command.slots:
                message = one.read(wire)
                if not isinstance(message, PeerRun):
                    return _why(message)
                if not self._came(one, command, message, slot, wire):
                    return "damaged"
                done += 1
            return ""

        why = one.read_all(self._open_connection, read)
        with self._lock:
            left = len(command.slots) - done
            self._outcomes += [FetchedRun(command.call_id, why or "lacking")] * left
            del self._open[command.call_id]
        self._begin_next()

    def _came(
        self, one: _Fetch, command: FetchRuns, run: PeerRun, slot: int, wire: ssl.SSLSocket
    ) -> bool:
        """Read a copy into its slot; return whether its bytes are right."""
        began_s = self._clock()
        content = self._view(slot, command.form.slot_bytes)
        one.receive_into(wire, content)
        if xxhash.xxh3_128_digest(content) != run.check:
            return False
        took_s = self._clock() - began_s
        outcome = FetchedRun(command.call_id, "", run.check, run.limit_s, took_s)
        with self._lock:
            self._outcomes.append(outcome)
        return True

    def _run_near(self, one: _Fetch) -> None:
        """Carry out a fetch of blocks: read them, then ask whether they were held till then."""
        command, limits, took_s = one.command, tuple[float | None, ...](), 0.0
        fidelity: Fidelity = "exact"
        assert isinstance(command, FetchBlocks), "it was begun so"
        assert self.pools is not None, "no domain, no near peer"
        pools = self.pools

        def read(wire: ssl.SSLSocket) -> PeerMiss:
            nonlocal limits, took_s, fidelity
            lent = one.read(wire)
            lent_s = self._clock()
            if not isinstance(lent, PeerLent):
                return _why(lent)
            count = min(len(lent.blocks), len(lent.limits_s), len(command.blocks))
            try:
                pools.read(lent.handle, lent.blocks[:count], command.blocks[:count])
            except (OSError, ValueError, ArithmeticError, RuntimeError):
                return "unreadable"
            took_s = self._clock() - lent_s
            wire.sendall(encode(PeerEnd("")))
            end = one.read(wire)
            if not isinstance(end, PeerEnd) or end.why:
                return _why(end)
            passed_s, fidelity = self._clock() - lent_s, lent.fidelity
            limits = tuple(
                None if limit is None else max(0.0, limit - passed_s)
                for limit in lent.limits_s[:count]
            )
            return "" if count == len(command.blocks) else "lacking"

        why = one.read_all(self._open_connection, read)
        with self._lock:
            self._copied.append(FetchedBlocks(command.call_id, why, limits, took_s, fidelity))
            del self._open[command.call_id]
        self._begin_next()

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
            *(("", 0, True) if isinstance(command, FetchBlocks) else _form_of(command)),
        )
        hello = Hello(PROTOCOL_VERSION, role="peer", name=self._name, wanted=wanted)
        wire.sendall(encode(hello))
        return wire


class _Fetch:
    """One fetch, with its thread, which calls `run`."""

    def __init__(
        self,
        owner: PeerFetches,
        command: FetchRuns | FetchBlocks,
        peer: Peer,
        run: Callable[[_Fetch], None],
    ) -> None:
        self.command, self.peer = command, peer
        self.thread = threading.Thread(target=run, args=(self,), name="peer", daemon=True)
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
        self,
        open_connection: Callable[[_Fetch, socket.socket], ssl.SSLSocket],
        read: Callable[[ssl.SSLSocket], PeerMiss],
    ) -> PeerMiss:
        """Open a connection and `read` from it; return why something is missing."""
        try:
            address = self.peer.host, self.peer.port
            with (
                socket.create_connection(address, timeout=self._left_s()) as end,
                open_connection(self, end) as wire,
            ):
                self._end = wire
                return read(wire)
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

    def read(self, wire: ssl.SSLSocket) -> PeerMessage:
        """Return the next message. Raises OSError, TimeoutError, EngineError."""
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


def _why(message: PeerMessage) -> PeerMiss:
    """Return why nothing more comes, by the message that came instead."""
    if isinstance(message, PeerEnd):
        return "busy" if message.why == "busy" else "lacking"
    return "refused" if isinstance(message, Rejected) else "lost"


def _form_of(command: FetchRuns) -> tuple[str, int]:
    return command.form.name, command.form.slot_bytes
