"""The engine's process is killed, and killed again: honest clients are served afterwards."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attacks.attacked_server import Answer, AttackedServer, flood
from tests.attacks.conftest import StartServer

PATIENCE_S = 120.0
CLIENTS = 24


def engine_pid(server: AttackedServer) -> int:
    """Return the process id of the server's engine; 0 while there is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if (
                int(fields[1]) == server.pid
                and fields[0] != "Z"
                and b"engine.server.server" in words
            ):
                return int(folder.name)
    return 0


def until(holds: Callable[[], bool]) -> None:
    """Wait until the condition holds; fail after `PATIENCE_S`."""
    until_s = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < until_s, "the condition never held"
        pause.wait(0.02)


def is_ready(server: AttackedServer) -> bool:
    """Return whether the server takes requests."""
    return server.ask("", "/readyz", method="GET").status == 200


def kill_engine(server: AttackedServer) -> None:
    """Kill the engine, as the out-of-memory killer does, and wait for the next."""
    pid = engine_pid(server)
    os.kill(pid, signal.SIGKILL)
    until(lambda: engine_pid(server) not in (0, pid) and is_ready(server))


@pytest.mark.slow
def test_honest_clients_are_served_after_two_kills(server: AttackedServer) -> None:
    """All of them were in the step at both. Each tries again, as clients do."""
    key = server.tenant("honest")
    numbers = iter(range(CLIENTS))
    mine = threading.local()

    def ask() -> tuple[int, int, str]:
        if not hasattr(mine, "number"):
            mine.number = next(numbers)
        body = server.chat(f"question {mine.number}", max_tokens=300)
        answer = server.ask(key, "/v1/chat/completions", body)
        if answer.status != 200:
            threading.Event().wait(0.1)
        return mine.number, answer.status, answer.code

    def served(since: int) -> set[int]:
        seen = [one for one in done[since:] if isinstance(one, tuple)]
        return {number for number, status, _ in seen if status == 200}

    with flood(ask, CLIENTS) as done:
        until(lambda: len(done) >= CLIENTS)
        kill_engine(server)
        kill_engine(server)
        since = len(done)
        until(lambda: len(served(since)) == CLIENTS)

    codes = {one[2] for one in done if isinstance(one, tuple)}
    assert codes <= {"", "engine_restarting", "engine_starting"}
    assert server.log_events("engine_poisoned") == []


@pytest.mark.slow
def test_server_comes_back_after_any_number_of_kills(start_server: StartServer) -> None:
    """Five deaths in a minute kept it down for good. Meanwhile it is not ready, and alive."""
    server = start_server()
    key = server.tenant("honest")
    seen: list[tuple[int, int]] = []

    def look() -> bool:
        ready = server.ask("", "/readyz", method="GET").status
        seen.append((ready, server.ask("", "/healthz", method="GET").status))
        return ready == 200

    for _ in range(6):
        os.kill(engine_pid(server), signal.SIGKILL)
        until(lambda: not look())
        until(look)

    answer = server.ask(key, "/v1/chat/completions", server.chat())
    assert answer.status == 200
    assert set(seen) == {(200, 200), (503, 200)}


@pytest.mark.slow
def test_refusal_without_an_engine_says_when_to_come_again(start_server: StartServer) -> None:
    """A client that follows `Retry-After` meets an engine."""
    server = start_server()
    key = server.tenant("honest")
    refused: list[Answer] = []

    def ask() -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            answer = server.ask(key, "/v1/chat/completions", server.chat())
            if answer.status == 503:
                refused.append(answer)
            return answer.status == 200
        return False

    os.kill(engine_pid(server), signal.SIGKILL)
    until(lambda: not ask())
    until(ask)

    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
