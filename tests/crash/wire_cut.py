"""A TCP proxy to a PostgreSQL server that can cut connections.

It cuts before a commit reaches the server, before its answer comes back, or without the server
noticing. It can also behave like a connection pooler.
"""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal

from tenancy.storage.postgres_address import PostgresAddress, read_address
from tests.unit.tenancy.own_folder import own_folder

SOCKET = ".s.PGSQL.5432"
COMMIT = b"commit\0"
KEY_DATA = b"K\0\0\0\x0c"
"""The header of BackendKeyData: a session's process id and a secret follow."""

Where = Literal["before", "after", "hung"]


class Wire:
    """A socket in front of the server's. `cuts`: at the next commits, in order.

    `is_away`: new connections are refused. `is_pooler`: sessions get the process id of another
    session, or only this `refusal`.
    """

    def __init__(self, server: Path) -> None:
        self._server = server
        self._owned = ExitStack()
        self.folder = self._owned.enter_context(own_folder("trunkline-wire-"))
        self.cuts: list[Where] = []
        self.is_away = False
        self.is_pooler = False
        self.refusal = b""
        self._open: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.folder / SOCKET))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def address(self, database: str) -> PostgresAddress:
        """Return the address of a database of the server through this proxy."""
        return read_address(f"postgresql://trunkline@/{database}?host={self.folder}", {}, "")

    def close(self) -> None:
        """Close all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in list(self._open):
            self._end(end)
        for thread in self._threads:
            thread.join(60)
        self._owned.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.is_away:
                client.close()
                continue
            upstream = socket.socket(socket.AF_UNIX)
            upstream.connect(str(self._server / SOCKET))
            self._open |= {client, upstream}
            answered = threading.Event()
            answered.set()
            for thread in (
                threading.Thread(target=self._up, args=(client, upstream, answered)),
                threading.Thread(target=self._down, args=(client, upstream, answered)),
            ):
                self._threads.append(thread)
                thread.start()

    def _up(self, client: socket.socket, upstream: socket.socket, clear: threading.Event) -> None:
        with suppress(OSError):
            while data := client.recv(65_536):
                if COMMIT in data and self.cuts:
                    where = self.cuts.pop(0)
                    if where == "hung":  # the server notices nothing and waits
                        self._end(client)
                        return
                    if where == "before":
                        break
                    clear.clear()  # drop the answer
                upstream.sendall(data)
        if clear.is_set():
            self._end(client)
            self._end(upstream)

    def _down(self, client: socket.socket, upstream: socket.socket, clear: threading.Event) -> None:
        with suppress(OSError):
            while data := upstream.recv(65_536):
                if not clear.is_set():
                    break
                if self.refusal:
                    client.sendall(self.refusal)
                    break
                if self.is_pooler and (at := data.find(KEY_DATA)) >= 0:
                    number = at + len(KEY_DATA)
                    data = data[:number] + bytes(4) + data[number + 4 :]
                client.sendall(data)
        self._end(client)
        self._end(upstream)

    def _end(self, end: socket.socket) -> None:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
        self._open.discard(end)
