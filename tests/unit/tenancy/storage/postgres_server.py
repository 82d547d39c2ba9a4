"""A PostgreSQL server for tests, in a temporary folder, on a Unix socket."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path

import pytest

from tenancy.storage.postgres import PostgresStore
from tenancy.storage.postgres_address import PORT, PostgresAddress, read_address
from tenancy.storage.postgres_connection import ConnectionLost, PostgresConnection, StatementFailed
from tests.unit.tenancy.own_folder import own_folder

BINARIES = next(
    (
        path
        for path in (Path("/usr/lib/postgresql/15/bin"), *map(Path, os.get_exec_path()))
        if all(os.access(path / name, os.X_OK) for name in ("initdb", "postgres"))
    ),
    None,
)
PATIENCE_S = 60.0
SETTINGS = (
    *("listen_addresses=", "shared_buffers=16MB", "max_connections=60", "autovacuum=off"),
    *("wal_level=minimal", "max_wal_senders=0"),
)
MODEL = "model"
"""The database that others are copied from."""


class Server:
    """One server. `folder`: its own, with the data and the socket."""

    def __init__(
        self,
        *,
        port: int = PORT,
        prepare: Callable[[Path], Sequence[str]] = lambda _: (),
    ) -> None:
        """`port`: of the socket, and of TCP if a setting enables it. `prepare`: writes files into
        the folder before the start and returns more settings."""
        assert BINARIES is not None, "the caller has checked that there are binaries"
        self._binaries = BINARIES
        # Not pytest's folder: another user must be able to enter.
        self._owned = ExitStack()
        home = self._owned.enter_context(own_folder("trunkline-postgres-"))
        home.chmod(0o711)
        self.folder = home / "server"
        self.folder.mkdir(mode=0o700)
        self._user = "nobody" if os.geteuid() == 0 else None  # the server refuses to run as root
        self._chown_folder()
        self._port = port
        self._names = count(1)
        initdb = ["initdb", "-D", "data", "-A", "trust", "-U", "trunkline", "-E", "UTF8"]
        made = self._spawn([*initdb, "--locale=C.UTF-8", "--no-sync"])
        assert made.wait(PATIENCE_S) == 0, (self.folder / "log").read_text()
        self._settings = (*SETTINGS, f"port={port}", *prepare(self.folder))
        self._chown_folder()
        self.start()

    @property
    def pid(self) -> int:
        """Process id of the postmaster."""
        return self._process.pid

    def start(self) -> None:
        """Start, and wait until the server answers; it recovers from an earlier kill."""
        self._process = self._spawn(self._command())
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the server answers, during a start or a recovery."""
        pause, until_s = threading.Event(), time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < until_s, (self.folder / "log").read_text()
            if self._process.poll() is not None:  # children of a killed server are still ending
                self._process = self._spawn(self._command())
            with suppress(ConnectionLost, StatementFailed):
                PostgresConnection(self.address("postgres"), {}, PATIENCE_S).close()
                return
            pause.wait(0.02)

    def _command(self) -> list[str]:
        settings = [arg for setting in self._settings for arg in ("-c", setting)]
        return ["postgres", "-D", "data", "-k", str(self.folder), *settings]

    def stop(self) -> None:
        """Shut down as an administrator does: quickly and in order."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(PATIENCE_S)

    def kill(self) -> None:
        """Kill all processes, as a power failure does except for the disk. Backends are killed,
        too: on a busy machine they would answer for a moment longer."""
        children: list[str] = []
        with suppress(FileNotFoundError):  # without /proc
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        self._process.kill()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        self._process.wait(PATIENCE_S)

    def close(self) -> None:
        """Stop, and remove the folder."""
        if self._process.poll() is None:
            self.stop()
        self._owned.close()

    def url(self, database: str) -> str:
        """Return the URL of a database, as a configuration has it."""
        return f"postgresql://trunkline@:{self._port}/{database}?host={self.folder}"

    def address(self, database: str) -> PostgresAddress:
        """Return the parsed URL."""
        return read_address(self.url(database), {}, "")

    def database(self, *, is_empty: bool = False) -> str:
        """Create a database, with the schema unless it is to be empty."""
        name, model = f"test_{next(self._names)}", "template0" if is_empty else MODEL
        connection = PostgresConnection(self.address("postgres"), {}, PATIENCE_S)
        try:
            if not is_empty and not connection.rows(_KNOWN, (MODEL,)):
                connection.execute(f"create database {MODEL}")
                PostgresStore(self.address(MODEL)).close()
            # Copied as files, which takes half the time of writing every page to the log.
            connection.execute(f"create database {name} template {model} strategy file_copy")
        finally:
            connection.close()
        return name

    def drop(self, database: str) -> None:
        """Remove a database, and end its connections."""
        connection = PostgresConnection(self.address("postgres"), {}, PATIENCE_S)
        try:
            connection.execute(f"drop database {database} with (force)")
        finally:
            connection.close()

    def _chown_folder(self) -> None:
        """Give the folder to the user that the server runs as."""
        if self._user is not None:
            who = pwd.getpwnam(self._user)
            for file in (self.folder, *self.folder.iterdir()):
                os.chown(file, who.pw_uid, who.pw_gid)

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [self._binaries / command[0], *command[1:]],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=self._user,
                group=None if self._user is None else pwd.getpwnam(self._user).pw_gid,
                extra_groups=None if self._user is None else [],
            )


_KNOWN = "select 1 from pg_database where datname = ?"


def own_server() -> Iterator[Server]:
    """Yield a server, for as long as a fixture lasts; skip the test where there are no binaries."""
    if BINARIES is None:
        pytest.skip("PostgreSQL's initdb and postgres are not here")
    server = Server()
    yield server
    server.close()
