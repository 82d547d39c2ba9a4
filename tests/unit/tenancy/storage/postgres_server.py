"""A PostgreSQL server of a test's own, in a temporary folder, on a Unix socket."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path

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
IN_MEMORY = Path("/dev/shm")
PATIENCE_S = 60.0
SETTINGS = (
    *("listen_addresses=", "shared_buffers=16MB", "max_connections=60", "autovacuum=off"),
    *("wal_level=minimal", "max_wal_senders=0"),
)
MODEL = "model"
"""The database that others are copied from."""


class Server:
    """One server. `folder` is its own, with the data and the socket."""

    def __init__(
        self,
        *,
        is_in_memory: bool = True,
        port: int = PORT,
        prepare: Callable[[Path], Sequence[str]] = lambda _: (),
    ) -> None:
        """`is_in_memory`: on a disk in memory, where there is one. `port`: of its socket, and where
        it listens if a setting says so. `prepare`: puts files into its
        folder before it starts, and says more settings."""
        assert BINARIES is not None, "whoever asks has looked whether there are binaries"
        self._binaries = BINARIES
        # Not the test's own folder: another user must be able to enter.
        place = IN_MEMORY if is_in_memory and os.access(IN_MEMORY, os.W_OK) else None
        self._owned = ExitStack()
        home = self._owned.enter_context(own_folder("trunkline-postgres-", place))
        home.chmod(0o711)
        self.folder = home / "server"
        self.folder.mkdir(mode=0o700)
        self._user = "nobody" if os.geteuid() == 0 else None  # the server refuses to be root
        self._give()
        self._port = port
        self._names = count(1)
        initdb = ["initdb", "-D", "data", "-A", "trust", "-U", "trunkline", "-E", "UTF8"]
        made = self._spawn([*initdb, "--locale=C.UTF-8", "--no-sync"])
        assert made.wait(PATIENCE_S) == 0, (self.folder / "log").read_text()
        self._settings = (*SETTINGS, f"port={port}", *prepare(self.folder))
        self._give()
        self.start()

    @property
    def pid(self) -> int:
        """Of the postmaster."""
        return self._process.pid

    def start(self) -> None:
        """Start it, and wait until it answers; what it was doing when it died is recovered."""
        self._process = self._spawn(self._command())
        self.wait_ready()

    def wait_ready(self) -> None:
        """Until it answers: it is starting, or recovers from the death of one of its processes."""
        pause, until_s = threading.Event(), time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < until_s, (self.folder / "log").read_text()
            if self._process.poll() is not None:  # children of one that was killed still end
                self._process = self._spawn(self._command())
            with suppress(ConnectionLost, StatementFailed):
                PostgresConnection(self.address("postgres"), {}, PATIENCE_S).close()
                return
            pause.wait(0.02)

    def _command(self) -> list[str]:
        settings = [arg for setting in self._settings for arg in ("-c", setting)]
        return ["postgres", "-D", "data", "-k", str(self.folder), *settings]

    def stop(self) -> None:
        """As its administrator does: quickly, and in order."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(PATIENCE_S)

    def kill(self) -> None:
        """As a power failure does, but for the disk: those that serve connections go too, which
        would answer for a moment more on a busy machine."""
        children: list[str] = []
        with suppress(FileNotFoundError):  # where there is no /proc
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        self._process.kill()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        self._process.wait(PATIENCE_S)

    def close(self) -> None:
        """Stop it, and leave nothing."""
        if self._process.poll() is None:
            self.stop()
        self._owned.close()

    def url(self, database: str) -> str:
        """As the configuration has it."""
        return f"postgresql://trunkline@:{self._port}/{database}?host={self.folder}"

    def address(self, database: str) -> PostgresAddress:
        """The same, read."""
        return read_address(self.url(database), {}, "")

    def database(self, *, is_empty: bool = False) -> str:
        """A new one, with our schema in it unless it is to be empty."""
        name = f"test_{next(self._names)}"
        connection = PostgresConnection(self.address("postgres"), {}, PATIENCE_S)
        try:
            if not is_empty and not connection.rows(_KNOWN, (MODEL,)):
                connection.execute(f"create database {MODEL}")
                PostgresStore(self.address(MODEL)).close()
            connection.execute(
                f"create database {name} template {'template0' if is_empty else MODEL}"
            )
        finally:
            connection.close()
        return name

    def drop(self, database: str) -> None:
        """Remove it, whoever is connected."""
        connection = PostgresConnection(self.address("postgres"), {}, PATIENCE_S)
        try:
            connection.execute(f"drop database {database} with (force)")
        finally:
            connection.close()

    def _give(self) -> None:
        """What is in its folder belongs to whom it runs as."""
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
