"""The connection of another engine that fetches a prefix from this one, and who may.

A `RunReader`: the engine's thread hands over what is held for it, and the event loop sends it, copy
by copy. What a slow reader has not taken stays held, within the bounds of a share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial

from msgspec.structs import astuple

from engine.api import EngineInfo
from engine.client.peer_tickets import is_valid_ticket
from engine.client.tls_wire import TlsWire
from engine.core.core import Core
from engine.moves import LentBlocks, RunReader, ShareRuns
from engine.protocol import Hello, PeerEnd, PeerLent, PeerRun, encode, unpack_tokens
from engine.server.links.gateway_link import call_in_loop
from engine.server.service import EngineService


def refusal(
    hello: Hello, holder: str, info: EngineInfo, keys: Iterable[bytes], now_s: float
) -> str:
    """Return why an engine whose certificate names `holder` gets nothing; "" if it may. `keys`: of
    the gateways that are connected; `now_s`: by the machine's clock. O(tokens, keys)."""
    wanted = hello.wanted
    if wanted is None:
        return "A peer wants nothing; expected a prefix."
    if holder != f"engine/{hello.name}":
        return f"The certificate names {holder!r}; expected 'engine/{hello.name}'."
    if wanted.model_digest != info.model_digest:
        return f"Its KV is of {wanted.model_digest[-24:]}; expected {info.model_digest[-24:]}."
    what = wanted.ticket, wanted.namespace, wanted.token_ids, hello.name, now_s
    if not is_valid_ticket(keys, *what):
        return "The ticket is of no gateway here, for another prefix, or over."
    return ""


class PeerLink:
    """One share. `ended`: the other engine has left."""

    def __init__(self, wire: TlsWire, service: EngineService) -> None:
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._service, self._wire = service, wire
        self._unread = 0
        wire.follow(self._on_frame, self._on_end, self._on_sent)

    def close(self) -> None:
        """Let go what is held. Safe to repeat."""
        self._on_end()

    def begin(self, hello: Hello) -> None:
        """Have what is wanted sent."""
        wanted = hello.wanted
        assert wanted is not None, "it was not refused"
        tokens, how = unpack_tokens(wanted.token_ids), (wanted.format, wanted.is_near)
        what = ShareRuns(wanted.namespace, tokens, wanted.first, *how)
        self._service.call(lambda core: begin_share(core, what, self))

    # -- `RunReader`, in the engine's thread ----------------------------------------------------

    def take(self, check: bytes, limit_s: float | None, content: memoryview) -> None:
        """See `RunReader`."""
        call_in_loop(self._loop, partial(self._write, PeerRun(check, limit_s), content))

    def lend(self, lent: LentBlocks) -> None:
        """See `RunReader`."""
        call_in_loop(self._loop, partial(self._send, encode(PeerLent(*astuple(lent)))))

    def end(self, why: str) -> None:
        """See `RunReader`."""
        call_in_loop(self._loop, partial(self._send, encode(PeerEnd(why))))

    # -- in the event loop ----------------------------------------------------------------------

    def _write(self, run: PeerRun, content: memoryview) -> None:
        self._send(encode(run) + bytes(content))
        self._unread += 1
        if self.ended.is_set() or not self._wire.unsent:
            self._on_sent()

    def _send(self, data: bytes) -> None:
        if not self.ended.is_set():
            self._wire.send(data)

    def _on_frame(self, frame: bytes) -> None:
        """Take the only message behind the Hello: it has read what was lent."""
        self._service.call(partial(_returned, self))

    def _on_sent(self) -> None:
        unread, self._unread = self._unread, 0
        if unread:
            self._service.call(partial(_told_sent, self, unread))

    def _on_end(self) -> None:
        if not self.ended.is_set():
            self.ended.set()
            self._service.call(partial(_leave, self))
            self._on_sent()


def begin_share(core: Core, wanted: ShareRuns, reader: RunReader) -> None:
    """Begin a share in the engine's thread; it ends at once where there is no host memory."""
    sharing = None if core.levels is None else core.levels.sharing
    if sharing is None:
        reader.end("lacking")
    else:
        sharing.begin(wanted, reader, core.clock())


def _told_sent(reader: RunReader, count: int, core: Core) -> None:
    if core.levels is not None and core.levels.sharing is not None:
        for _ in range(count):
            core.levels.sharing.told_sent(reader)


def _returned(reader: RunReader, core: Core) -> None:
    if core.levels is not None and core.levels.sharing is not None:
        core.levels.sharing.returned(reader)


def _leave(reader: RunReader, core: Core) -> None:
    if core.levels is not None and core.levels.sharing is not None:
        core.levels.sharing.leave(reader)
