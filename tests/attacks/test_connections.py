"""Connections and descriptors: idle strangers, one tenant's hoard, and a server that stops."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter

import pytest

from tests.attacks.attacked_server import AttackedServer, flood
from tests.attacks.conftest import StartServer
from tests.attacks.probe import Probe, check_undisturbed

pytestmark = pytest.mark.slow

IDLE = 700
SETTINGS = "[server]\nconnections_max = 300\n"


def open_idle(server: AttackedServer, stack: contextlib.ExitStack, head: bytes) -> None:
    """Open connections from ten addresses, and leave each idle after one request."""
    for number in range(IDLE):
        with contextlib.suppress(OSError):
            connection = stack.enter_context(server.connect(f"127.0.0.{2 + number % 10}"))
            connection.sendall(head)


@pytest.mark.parametrize("who", ["strangers", "a tenant"])
def test_idle_connections_leave_room_for_others(start_server: StartServer, who: str) -> None:
    """More than twice the places: the quiet tenant opens a new connection for each chat."""
    server = start_server(SETTINGS, descriptors=1_024)
    key = "" if who == "strangers" else server.tenant("hoard")
    quiet = Probe(server, server.tenant("quiet"))
    alone, before_mib = quiet.observe_alone(), server.resident_mib()
    path = "/v1/models" if key else "/healthz"
    with contextlib.ExitStack() as stack:
        open_idle(server, stack, server.head(key, path, method="GET"))
        beside = quiet.observe()
        descriptors, most_mib = server.open_descriptors(), server.resident_mib()

    check_undisturbed(alone, beside, pause_s=None)
    assert descriptors < 400
    assert most_mib < before_mib + 30
    assert server.log_events("accept_failed") == []


def test_flood_of_strangers_is_told_in_few_lines(server: AttackedServer) -> None:
    """Thousands of refused requests a second once were as many lines."""
    quiet = Probe(server, server.tenant("quiet-lines"))
    alone = quiet.observe_alone()
    with flood(lambda: server.ask("", "/v1/chat/completions", b"{}").status, 4) as done:
        beside = quiet.observe()
    server.ask("", "/v1/chat/completions", b"{}")
    told = [line for line in server.log_events("request") if line["status"] in (401, 429)]
    seconds = Counter(line["at"][:19] for line in told)

    check_undisturbed(alone, beside, pause_s=None)
    assert {401} <= set(done) <= {401, 429}
    assert max(seconds.values()) <= 40  # a second of the wall clock may touch two of the loop's


def test_clients_of_a_stopping_server_are_told(start_server: StartServer) -> None:
    """Clients ask without a pause; each gets an answer, or cannot connect any more."""
    server = start_server()
    key = server.tenant("busy")
    endings: Counter[str] = Counter()
    stopping = threading.Event()

    def act() -> None:
        body = server.chat(max_tokens=100)
        try:
            answer = server.ask(key, "/v1/chat/completions", body)
            closes = answer.headers.get("Connection") == "close"
            endings[f"{answer.status} {answer.code}".strip()] += 1
            assert closes or not stopping.is_set() or answer.status == 200
        except ConnectionRefusedError:
            endings["refused"] += 1

    with flood(act, 8) as results:
        stopping.wait(0.5)
        stopping.set()
        status = server.stop()

    cut = [one for one in results if isinstance(one, OSError)]
    assert (status, cut) == (0, [])
    assert endings.keys() <= {"200", "503 shutting_down", "refused"}
    assert len(server.log_events("stopping")) == len(server.log_events("stopped")) == 1


def test_refused_client_reads_its_answer_while_it_sends(server: AttackedServer) -> None:
    """Clients at a full speed see a 401 or a 413, never a reset."""
    head = server.head("sk-wrong", "/v1/chat/completions", "Content-Length: 9000000")
    answers: Counter[bytes] = Counter()
    for _ in range(40):
        with server.connect("127.0.0.99") as connection:  # no wrong keys came from there
            connection.sendall(head + b" " * 9_000_000)
            connection.shutdown(socket.SHUT_WR)
            answers[connection.recv(65_536)[:13]] += 1

    assert answers == {b"HTTP/1.1 401 ": 40}
