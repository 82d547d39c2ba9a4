"""Child processes of the gateway, kept running: engines, ledger, encoder and analytics.

`ChildProcess` starts a process, reports what happens to it, reaps it when it is lost, pauses, and
starts the next one. The standard input of each is a socket; the end of that socket tells the
process that the gateway is gone, and the process exits. `engine.client.frame_wire` is the gateway's
end. This module knows no message. All objects belong to one event loop and do not block it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, repeat
from math import inf

from msgspec import Struct

from engine.errors import EngineError
from engine.processes import child_environment
from tenancy.errors import TenancyError

REAP_S = 1.0
"""Seconds that a lost process has to log the reason and to exit."""

Report = Callable[[str, dict[str, object]], None]
"""Logs an event of a process: its name and its fields."""


class RestartPolicy(Struct, frozen=True):
    """When a lost process is replaced.

    A process that served for `steady_s` starts the sequence anew.
    """

    pauses_s: tuple[float, ...]
    """The pauses before the first, the second, … consecutive restart; the last one repeats, for
    ever."""
    steady_s: float = 10.0
    first_starts_max: int = 0
    """Attempts until a process has served for the first time; with 0 they are without end, too."""


class StartLimit(Exception):
    """No process has served in several attempts; no further one is made."""


class ChildProcess:
    """Runs one process after another, each in one call of `run_process`.

    `run_process` spawns a process, calls `set_ready` once the process serves, and returns why the
    process was lost or could not be started. It raises an error that another start would not cure:
    before a process has served, no other is started, and `wait_ready` raises the same error. Later
    an error is a failed start as any other: what has served once is never given up. `on_pause` is
    called before each pause.

    Reports NAME_started, NAME_died (it had served), NAME_not_started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        policy: RestartPolicy,
        report: Report,
        run_process: Callable[[], Awaitable[str]],
        on_pause: Callable[[], None] = lambda: None,
        variables: Sequence[str] = (),
    ) -> None:
        """`variables`: patterns of those that the process gets of this one's environment beside
        `engine.processes.BASE`."""
        assert policy.pauses_s[-1] > 0, "restarts without a pause would keep the loop busy"
        self._name = name
        self._command = command
        self._policy = policy
        self._variables = variables
        self._report = report
        self._run_process, self._on_pause = run_process, on_pause
        self._loop = asyncio.get_running_loop()
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()  # set once the first process serves or `failure` is set
        self._has_served = False
        self._ready_at_s = inf  # loop time since which the process serves
        self._starts_at_s = 0.0  # loop time at which the present pause ends
        self.failure: Exception | None = None
        self.may_restart = True
        self.restarts = 0

    @property
    def pid(self) -> int:
        """Id of the running process; 0 without a process."""
        return self._process.pid if self._process is not None else 0

    @property
    def pause_left_s(self) -> float:
        """Seconds until the next process is started; 0 while one starts or runs."""
        return max(0.0, self._starts_at_s - self._loop.time())

    def start(self) -> None:
        """Keep a process running from now on. Returns at once."""
        self._task = asyncio.create_task(self._supervise())

    async def wait_ready(self) -> None:
        """Wait until the first process serves. Raises the error of `run_process`, or StartLimit."""
        await self._settled.wait()
        if self.failure is not None:
            raise self.failure

    async def stop(self) -> None:
        """Cancel `run_process` and start no other process; the running one goes on. Safe to
        repeat."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def end(self, timeout_s: float) -> int | None:
        """Wait for the exit of a process after its socket was closed, and kill it after
        `timeout_s`.

        Returns the exit status, or None without a process. After a cancellation, the next call
        reaps the process.
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

    # -- called by `run_process` ---------------------------------------------------------------

    async def spawn(
        self, pass_fds: Sequence[int] = (), variables: Mapping[str, str] | None = None
    ) -> socket.socket:
        """Start the command in a new session, with one end of a socket pair as its standard input.

        The process inherits the descriptors `pass_fds`, and the variables that it needs, changed
        by `variables`. Returns the other end. Raises OSError.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=theirs.fileno(),
                    pass_fds=pass_fds,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                    env={**child_environment(os.environ, *self._variables), **(variables or {})},
                )
        except BaseException:
            ours.close()
            raise
        return ours

    def set_ready(self, **facts: object) -> None:
        """Declare that the process serves. `facts`: more fields for the log."""
        self._ready_at_s = self._loop.time()
        self._has_served = True
        self._report(f"{self._name}_started", {"pid": self.pid, **facts})
        self._settled.set()

    # -- one process after another -------------------------------------------------------------

    async def _supervise(self) -> None:
        policy = self._policy
        pauses_s = _pause_sequence(policy.pauses_s)
        while True:
            self._ready_at_s = inf
            error: Exception | None = None
            try:
                reason = await self._run_process()
            except Exception as raised:
                error, reason = raised, _quotable(raised)
            status = await self.end(REAP_S)
            if error is not None and not self._has_served:
                self._give_up(error)
                return
            if not self.may_restart:
                return
            served_s = self._loop.time() - self._ready_at_s
            self.restarts += 1
            self._report(
                f"{self._name}_{'died' if served_s >= 0 else 'not_started'}",
                {"reason": reason, "status": status, "restarts": self.restarts},
            )
            if not self._has_served and self.restarts == policy.first_starts_max:
                message = f"The {self._name} did not start in {self.restarts} attempts: {reason}"
                self._give_up(StartLimit(message))
                return
            if served_s > policy.steady_s:
                pauses_s = _pause_sequence(policy.pauses_s)
            if pause_s := next(pauses_s):
                self._on_pause()
                self._starts_at_s = self._loop.time() + pause_s
                await asyncio.sleep(pause_s)

    def _give_up(self, error: Exception) -> None:
        self.failure = error
        self._report(f"{self._name}_not_started", {"reason": _quotable(error)})
        self._settled.set()


def _quotable(error: Exception) -> str:
    """Return an error's message for the log, or only its type: other messages may quote a value."""
    is_ours = isinstance(error, EngineError | TenancyError | StartLimit)
    return str(error) if is_ours else type(error).__name__


def _pause_sequence(pauses_s: tuple[float, ...]) -> Iterator[float]:
    """Yield the pauses, then the last one for ever."""
    return chain(pauses_s, repeat(pauses_s[-1]))
