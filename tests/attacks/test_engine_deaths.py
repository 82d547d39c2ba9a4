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

from tests.attacks.conftest import MakeHouse
from tests.attacks.house import Answer, House, flood

PATIENCE_S = 120.0
CLIENTS = 24


def engine_pid(house: House) -> int:
    """Return the process id of the house's engine; 0 while there is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if (
                int(fields[1]) == house.pid
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


def is_ready(house: House) -> bool:
    """Return whether the house takes requests."""
    return house.ask("", "/readyz", method="GET").status == 200


def kill_engine(house: House) -> None:
    """Kill the engine, as the out-of-memory killer does, and wait for the next."""
    pid = engine_pid(house)
    os.kill(pid, signal.SIGKILL)
    until(lambda: engine_pid(house) not in (0, pid) and is_ready(house))


@pytest.mark.slow
def test_honest_clients_are_served_after_two_kills(house: House) -> None:
    """All of them were in the step at both. Each tries again, as clients do."""
    key = house.tenant("honest")
    numbers = iter(range(CLIENTS))
    mine = threading.local()

    def ask() -> tuple[int, int, str]:
        if not hasattr(mine, "number"):
            mine.number = next(numbers)
        body = house.chat(f"question {mine.number}", max_tokens=300)
        answer = house.ask(key, "/v1/chat/completions", body)
        if answer.status != 200:
            threading.Event().wait(0.1)
        return mine.number, answer.status, answer.code

    def served(since: int) -> set[int]:
        seen = [one for one in done[since:] if isinstance(one, tuple)]
        return {number for number, status, _ in seen if status == 200}

    with flood(ask, CLIENTS) as done:
        until(lambda: len(done) >= CLIENTS)
        kill_engine(house)
        kill_engine(house)
        since = len(done)
        until(lambda: len(served(since)) == CLIENTS)

    codes = {one[2] for one in done if isinstance(one, tuple)}
    assert codes <= {"", "engine_restarting", "engine_starting"}
    assert house.log_events("engine_poisoned") == []


@pytest.mark.slow
def test_server_comes_back_after_any_number_of_kills(make_house: MakeHouse) -> None:
    """Five deaths in a minute kept it down for good. Meanwhile it is not ready, and alive."""
    house = make_house()
    key = house.tenant("honest")
    seen: list[tuple[int, int]] = []

    def look() -> bool:
        ready = house.ask("", "/readyz", method="GET").status
        seen.append((ready, house.ask("", "/healthz", method="GET").status))
        return ready == 200

    for _ in range(6):
        os.kill(engine_pid(house), signal.SIGKILL)
        until(lambda: not look())
        until(look)

    answer = house.ask(key, "/v1/chat/completions", house.chat())
    assert answer.status == 200
    assert set(seen) == {(200, 200), (503, 200)}


@pytest.mark.slow
def test_refusal_without_an_engine_says_when_to_come_again(make_house: MakeHouse) -> None:
    """A client that follows `Retry-After` meets an engine."""
    house = make_house()
    key = house.tenant("honest")
    refused: list[Answer] = []

    def ask() -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            answer = house.ask(key, "/v1/chat/completions", house.chat())
            if answer.status == 503:
                refused.append(answer)
            return answer.status == 200
        return False

    os.kill(engine_pid(house), signal.SIGKILL)
    until(lambda: not ask())
    until(ask)

    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
