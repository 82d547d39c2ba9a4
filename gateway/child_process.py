"""A child process of the gateway, kept running: the engine, the ledger's writer, analytics.

`ChildProcess` starts one process after another: it reports, reaps, pauses and starts the next when
one is lost. The standard input of each is a socket; a process takes the end of it for the
gateway's end, and exits. `FrameWire` is the gateway's end for the ledger and analytics, whose other
end is `tenancy.ledger.child_process`; `engine.client.client` has its own. This module knows no
message. All of it belongs to one event loop, and blocks it nowhere.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, repeat
from math import inf

from msgspec import Struct

from engine.errors import EngineError
from tenancy.errors import TenancyError
from tenancy.ledger.child_process import FrameReader

READ_BYTES = 2**12
"""Answers are small."""

REAP_S = 1.0
"""A lost process has this long to log why and to exit."""

Report = Callable[[str, dict[str, object]], None]
"""Logs what happens to a process: an event's name and its facts."""


class RestartPolicy(Struct, frozen=True):
    """When a lost process is replaced.

    `pauses_s`: the pauses before the first, the second, … start in a row; the last one repeats. A
    process that served for `steady_s` starts the row anew. After `deaths_max` deaths within
    `deaths_window_s` the process stays down; 0: it is always replaced.
    """

    pauses_s: tuple[float, ...]
    steady_s: float = 10.0
    deaths_max: int = 0
    deaths_window_s: float = 60.0


class RestartLimit(Exception):
    """Too many deaths in a short time; the process stays down."""


class ChildProcess:
    """One process after another, each for one call of `live`.

    `live` spawns a process, calls `set_ready` once the process serves, and returns why the process
    was lost or could not be started. It raises an error that another start would not mend, and
    which `wait_ready` raises then. `pausing` is called before each pause.

    Reports NAME_started, NAME_died (it had served), NAME_not_started, NAME_restart_limit.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        policy: RestartPolicy,
        report: Report,
        live: Callable[[], Awaitable[str]],
        pausing: Callable[[], None] = lambda: None,
    ) -> None:
        assert policy.pauses_s[-1] > 0, "restarts without a pause would keep the loop busy"
        self._name = name
        self._command = command
        self._policy = policy
        self._report = report
        self._live, self._pausing = live, pausing
        self._loop = asyncio.get_running_loop()
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()  # the first process serves, or `failure` is set
        self._ready_s = inf  # since when the process serves
        self.failure: Exception | None = None
        self.may_restart = True
        self.restarts = 0

    @property
    def pid(self) -> int:
        """The id of the living process; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Keep a process running from now on. Returns at once."""
        self._task = asyncio.create_task(self._keep())

    async def wait_ready(self) -> None:
        """Wait until the first process serves. Raises the error of `live`, or RestartLimit."""
        await self._settled.wait()
        if self.failure is not None:
            raise self.failure

    async def stop(self) -> None:
        """Cancel `live` and start no other process; the one that runs goes on. Safe to repeat."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def end(self, timeout_s: float) -> int | None:
        """Wait for the exit of a process whose socket is closed, and kill it after `timeout_s`.

        Returns the exit status; None where there is no process. When it is cancelled, the next
        call reaps the process.
        """
        process = self._process
        if process is None:
            return None
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        self._process = None
        return process.returncode

    # -- called by `live` ----------------------------------------------------------------------

    async def spawn(self) -> socket.socket:
        """Start the command in a session of its own, with one end of a new socket pair as its
        standard input. Returns the other end. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        return ours

    def set_ready(self, **facts: object) -> None:
        """The process serves from now on. `facts`: for the log."""
        self._ready_s = self._loop.time()
        self._report(f"{self._name}_started", {"pid": self.pid, **facts})
        self._settled.set()

    # -- one process after another -------------------------------------------------------------

    async def _keep(self) -> None:
        policy = self._policy
        pauses_s = _row(policy.pauses_s)
        deaths_s: deque[float] = deque(maxlen=policy.deaths_max)
        while True:
            self._ready_s = inf
            try:
                reason = await self._live()
            except Exception as error:
                await self.end(REAP_S)
                self._give_up("not_started", error)
                return
            status = await self.end(REAP_S)
            if not self.may_restart:
                return
            now_s = self._loop.time()
            served_s = now_s - self._ready_s
            self.restarts += 1
            self._report(
                f"{self._name}_{'died' if served_s >= 0 else 'not_started'}",
                {"reason": reason, "status": status, "restarts": self.restarts},
            )
            deaths_s.append(now_s)
            if policy.deaths_max and len(deaths_s) == policy.deaths_max:
                within_s = now_s - deaths_s[0]
                if within_s < policy.deaths_window_s:
                    message = f"The {self._name} died {len(deaths_s)} times in {within_s:.0f} s."
                    self._give_up("restart_limit", RestartLimit(message))
                    return
            if served_s > policy.steady_s:
                pauses_s = _row(policy.pauses_s)
            if pause_s := next(pauses_s):
                self._pausing()
                await asyncio.sleep(pause_s)

    def _give_up(self, event: str, error: Exception) -> None:
        self.failure = error
        is_ours = isinstance(error, EngineError | TenancyError | RestartLimit)
        reason = str(error) if is_ours else type(error).__name__  # others may quote a value
        self._report(f"{self._name}_{event}", {"reason": reason})
        self._settled.set()


def _row(pauses_s: tuple[float, ...]) -> Iterator[float]:
    """Yield the pauses, and then the last one for ever."""
    return chain(pauses_s, repeat(pauses_s[-1]))


class FrameWire:
    """The gateway's open end of a child's wire.

    When the child closes its end, however that came, `ended` is called once, and this end is
    closed by then. Frames leave in order; nothing waits for a child that reads slowly.
    """

    def __init__(
        self, end: socket.socket, heard: Callable[[bytes], None], ended: Callable[[], None]
    ) -> None:
        """`end`: owned by the wire from now on. `heard`: called with each frame's body."""
        self._loop = asyncio.get_running_loop()
        self._end = end
        self._heard, self._ended = heard, ended
        self._reader = FrameReader()
        self._unsent = bytearray()  # what the socket has not taken
        end.setblocking(False)
        self._loop.add_reader(end, self._read)

    @property
    def unsent(self) -> int:
        """Bytes that the socket has not taken."""
        return len(self._unsent)

    def send(self, frame: bytes) -> None:
        """Send a frame after all earlier ones. Bytes that the socket does not take now leave when
        it can. One system call, where the child keeps up."""
        if self._unsent:
            self._unsent += frame
            return
        sent = self._try_to_send(frame)
        if sent < len(frame):
            self._unsent += memoryview(frame)[sent:]
            self._loop.add_writer(self._end, self._send_rest)

    def end(self) -> None:
        """Tell the child that no more frames come; it finishes, and closes. Safe to repeat."""
        with suppress(OSError):  # The child has gone already.
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Hear no more, and lose unsent bytes. Safe to repeat."""
        if self._end.fileno() >= 0:
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)
            self._end.close()

    def _send_rest(self) -> None:
        sent = self._try_to_send(self._unsent)
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._end)

    def _try_to_send(self, data: bytes | bytearray) -> int:
        try:
            return self._end.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)  # The child has gone; `_read` is about to see it.

    def _read(self) -> None:
        try:
            data = self._end.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            self._ended()
            return
        for frame in self._reader.feed(data):
            self._heard(frame)
