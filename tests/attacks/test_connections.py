"""Connections and descriptors: idle strangers, one tenant's hoard, and a server that stops."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter

import pytest

from tests.attacks.conftest import MakeHouse
from tests.attacks.house import House, flood
from tests.attacks.probe import Probe, check_undisturbed

pytestmark = pytest.mark.slow

IDLE = 700
SETTINGS = "[server]\nconnections_max = 300\n"


def open_idle(house: House, stack: contextlib.ExitStack, head: bytes) -> None:
    """Open connections from ten addresses, and leave each idle after one request."""
    for number in range(IDLE):
        with contextlib.suppress(OSError):
            connection = stack.enter_context(house.connect(f"127.0.0.{2 + number % 10}"))
            connection.sendall(head)


@pytest.mark.parametrize("who", ["strangers", "a tenant"])
def test_idle_connections_leave_room_for_others(make_house: MakeHouse, who: str) -> None:
    """More than twice the places: the quiet tenant opens a new connection for each chat."""
    house = make_house(SETTINGS, descriptors=1_024)
    key = "" if who == "strangers" else house.tenant("hoard")
    quiet = Probe(house, house.tenant("quiet"))
    alone, before_mib = quiet.observe_alone(), house.resident_mib()
    path = "/v1/models" if key else "/healthz"
    with contextlib.ExitStack() as stack:
        open_idle(house, stack, house.head(key, path, method="GET"))
        beside = quiet.observe()
        descriptors, most_mib = house.open_descriptors(), house.resident_mib()

    check_undisturbed(alone, beside, pause_s=None)
    assert descriptors < 400
    assert most_mib < before_mib + 30
    assert house.log_events("accept_failed") == []


def test_flood_of_strangers_is_told_in_few_lines(house: House) -> None:
    """Thousands of refused requests a second once were as many lines."""
    quiet = Probe(house, house.tenant("quiet-lines"))
    alone = quiet.observe_alone()
    with flood(lambda: house.ask("", "/v1/chat/completions", b"{}").status, 4) as done:
        beside = quiet.observe()
    house.ask("", "/v1/chat/completions", b"{}")
    told = [line for line in house.log_events("request") if line["status"] in (401, 429)]
    seconds = Counter(line["at"][:19] for line in told)

    check_undisturbed(alone, beside, pause_s=None)
    assert {401} <= set(done) <= {401, 429}
    assert max(seconds.values()) <= 40  # a second of the wall clock may touch two of the loop's


def test_clients_of_a_stopping_server_are_told(make_house: MakeHouse) -> None:
    """Clients ask without a pause; each gets an answer, or cannot connect any more."""
    house = make_house()
    key = house.tenant("busy")
    endings: Counter[str] = Counter()
    stopping = threading.Event()

    def act() -> None:
        body = house.chat(max_tokens=100)
        try:
            answer = house.ask(key, "/v1/chat/completions", body)
            closes = answer.headers.get("Connection") == "close"
            endings[f"{answer.status} {answer.code}".strip()] += 1
            assert closes or not stopping.is_set() or answer.status == 200
        except ConnectionRefusedError:
            endings["refused"] += 1

    with flood(act, 8) as results:
        stopping.wait(0.5)
        stopping.set()
        status = house.stop()

    cut = [one for one in results if isinstance(one, OSError)]
    assert (status, cut) == (0, [])
    assert endings.keys() <= {"200", "503 shutting_down", "refused"}
    assert len(house.log_events("stopping")) == len(house.log_events("stopped")) == 1


def test_refused_client_reads_its_answer_while_it_sends(house: House) -> None:
    """Clients at a full speed see a 401 or a 413, never a reset."""
    head = house.head("sk-wrong", "/v1/chat/completions", "Content-Length: 9000000")
    answers: Counter[bytes] = Counter()
    for _ in range(40):
        with house.connect("127.0.0.99") as connection:  # no wrong keys came from there
            connection.sendall(head + b" " * 9_000_000)
            connection.shutdown(socket.SHUT_WR)
            answers[connection.recv(65_536)[:13]] += 1

    assert answers == {b"HTTP/1.1 401 ": 40}
