"""An end of a TLS connection that belongs to an event loop: frames leave and arrive.

It is to engines elsewhere what `FrameWire` is to a child's socket. It knows no message. The kernel
ends a connection to a host that is gone: what is sent and not acknowledged for `USER_TIMEOUT_S`
ends it, and an idle one is asked for signs of life.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from engine.client.tls_files import TlsError, holder_of, told
from engine.wire import FrameError, FrameReader

HANDSHAKE_S: Final = 10.0
"""Longest time for a connection's handshake. An engine that loads its model answers after it."""
USER_TIMEOUT_S: Final = 2.5
"""The kernel counts it from the first repetition, 0.2 to 0.4 s after what got no answer."""
KEEPALIVE: Final = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3))
UNANSWERED: Final = (
    f"It accepts connections, but no engine has answered for {HANDSHAKE_S:g} s: it is drained, or"
    " still starts; expected an engine that serves."
)


class TlsWire(asyncio.Protocol):
    """One end of a connection; `dial` and `accept` open it, `follow` takes its frames.

    Like `FrameWire`: `on_end` is called once when the other end has gone or breaks the framing;
    frames leave in order, and a peer that reads slowly delays no caller.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._on_frame: Callable[[bytes], None] | None = None
        self._on_end: Callable[[], None] = lambda: None
        self._on_sent: Callable[[], None] = lambda: None
        self._early: list[bytes] = []
        self._later: list[bytes] | None = None
        """Frames that leave at the end of this turn of the loop; None if nothing was sent in it."""
        self._is_closed = False
        self.error: FrameError | None = None
        self.reason = ""
        """Why the connection ended, where the kernel or TLS says it."""

    async def dial(self, host: str, port: int, context: ssl.SSLContext) -> None:
        """Connect to an address. Raises OSError, TlsError and TimeoutError."""
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(
                *(lambda: self, host, port),
                ssl=context,
                server_hostname="engine",
                ssl_handshake_timeout=HANDSHAKE_S,
            )
        except ssl.SSLCertVerificationError as error:
            raise TlsError(told(error)) from error
        except ConnectionAbortedError as error:  # of asyncio, after the handshake's time
            raise TimeoutError(UNANSWERED) from error
        except ssl.SSLError as error:
            raise TlsError(f"it speaks no TLS 1.3: {told(error)}; expected an engine") from error
        self._keep_watch()

    async def accept(self, end: socket.socket, context: ssl.SSLContext) -> None:
        """Answer the handshake of a connection that was accepted. Raises OSError and TlsError."""
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: self, end, ssl=context, ssl_handshake_timeout=HANDSHAKE_S
            )
        except ConnectionAbortedError as error:  # of asyncio, after the handshake's time
            raise TlsError(f"no handshake within {HANDSHAKE_S:g} s; expected a gateway") from error
        except ssl.SSLError as error:
            raise TlsError(told(error)) from error
        self._keep_watch()

    def follow(
        self,
        on_frame: Callable[[bytes], None],
        on_end: Callable[[], None],
        on_sent: Callable[[], None] = lambda: None,
    ) -> TlsWire:
        """Hand frames on from now on; see `FrameWire`."""
        self._on_frame, self._on_end, self._on_sent = on_frame, on_end, on_sent
        if self._is_closed:
            asyncio.get_running_loop().call_soon(on_end)
        elif self._early:
            early, self._early = self._early, []
            asyncio.get_running_loop().call_soon(self.data_received, b"".join(early))
        return self

    @property
    def peer(self) -> str:
        """Whom the other end's certificate names; see `holder_of`."""
        transport = self._transport
        return "" if transport is None else holder_of(transport.get_extra_info("peercert"))

    @property
    def unsent(self) -> int:
        """Number of bytes that the connection has not taken."""
        unsent = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return unsent + sum(map(len, self._later or ()))

    def send(self, frame: bytes) -> None:
        """Send a frame after all earlier ones: at once, or in one write with the others of a turn
        of the loop. asyncio logs each further write to a peer that is gone, until it says so."""
        if self._later is not None:
            self._later.append(frame)
            return
        self._later = []
        asyncio.get_running_loop().call_soon(self._send_later)
        self._write(frame)

    def _send_later(self) -> None:
        later, self._later = self._later, None
        if later:
            self._write(b"".join(later))
            if not self.unsent:
                self._on_sent()

    def _write(self, data: bytes) -> None:
        transport = self._transport
        if transport is not None and not self._is_closed and not transport.is_closing():
            transport.write(data)

    def close(self) -> None:
        """Stop reading and drop unsent bytes. Safe to repeat."""
        self._send_later()
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()

    # -- called by the transport ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._on_frame is None:
            self._early.append(data)
            return
        try:
            for frame in self._reader.feed(data):
                self._on_frame(frame)
                if self._is_closed:
                    return
        except FrameError as error:
            self.error = error
            self.close()
            self._on_end()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._on_sent()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if exc is not None:
            self.reason = told(exc)
        if not self._is_closed:
            self._is_closed = True
            self._on_end()

    def _keep_watch(self) -> None:
        """Have the kernel end the connection if the other host is gone."""
        end = None if self._transport is None else self._transport.get_extra_info("socket")
        if end is None or sys.platform != "linux":
            return
        with suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE:
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            timeout_ms = int(USER_TIMEOUT_S * 1000)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
