"""Work before any limit is asked: calls that no limit counted, and bodies that no handler reads."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from gateway.http.middleware import REFUSALS_AT_ONCE, REFUSALS_PER_S
from tests.attacks.attacked_server import AttackedServer, flood
from tests.attacks.probe import Probe, check_undisturbed

pytestmark = pytest.mark.slow

WORDS = " ".join(f"w{number}" for number in range(900))[:4_000]
CALLS: dict[str, tuple[str, str, dict[str, object] | None]] = {
    "count": (
        "POST",
        "/v1/messages/count_tokens",
        {"messages": [{"role": "user", "content": WORDS}]},
    ),
    "tokenize": ("POST", "/tokenize", {"prompt": WORDS, "return_token_strs": True}),
    "quote": (
        "POST",
        "/v1/cache/quote",
        {"endpoint": "/v1/completions", "request": {"prompt": [[7] * 400] * 100}},
    ),
    "erasure": ("DELETE", "/v1/cache", None),
    "malformed body": ("POST", "/v1/chat/completions", {"messages": [{}] * 1_000}),
}
BODY_BYTES = 10 * 2**20


@contextlib.contextmanager
def held(server: AttackedServer, count: int) -> Iterator[list[socket.socket]]:
    """Yield this many connections, closed at the end."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(server.connect(f"127.0.0.{2 + n % 50}")) for n in range(count)]


@pytest.mark.parametrize("call", CALLS)
def test_calls_beyond_a_tenants_minute_leave_others_alone(
    server: AttackedServer, call: str
) -> None:
    """One request a minute is one of any kind; all the others are refused unread."""
    name = call.replace(" ", "-")
    quiet = Probe(server, server.tenant(f"quiet-{name}"))
    key = server.tenant(f"flood-{name}", requests_per_minute=1, requests_at_once=1)
    method, path, body = CALLS[call]
    alone = quiet.observe_alone()
    with flood(lambda: server.ask(key, path, body, method=method).status, 4) as done:
        beside = quiet.observe()
    seen = Counter(done)

    check_undisturbed(alone, beside, pause_s=None)
    assert seen.keys() <= {200, 400, 429}, seen
    assert seen[200] + seen[400] <= 2
    assert seen[429] > 10


@pytest.mark.parametrize("connections", [8, 48])
def test_refusals_of_one_tenant_have_a_pace(server: AttackedServer, connections: int) -> None:
    """A tenant over its limit asks again at once on each of its connections, whatever
    `Retry-After` says: the burst is answered, then so many a second, and the quiet tenant's
    connections wait for none of them."""
    quiet = Probe(server, server.tenant(f"quiet-{connections}"))
    key = server.tenant(f"asks-again-{connections}", requests_per_minute=1)
    alone = quiet.observe_alone()
    body, began_s = server.chat(), time.monotonic()
    with flood(lambda: server.ask(key, "/v1/chat/completions", body).status, connections) as done:
        beside = quiet.observe(200)
        seen, elapsed_s = Counter(done), time.monotonic() - began_s
    sys.stdout.write(f"{seen[429]} refusals in {elapsed_s:.1f} s\n")

    check_undisturbed(alone, beside, pause_s=None)
    assert seen[200] <= 1
    assert 10 < seen[429] <= REFUSALS_AT_ONCE + elapsed_s * REFUSALS_PER_S + connections, seen


def test_bodies_of_one_tenant_fill_its_share_and_no_more(server: AttackedServer) -> None:
    """Sixty uploads that nearly end, of a tenant without limits: 64 MiB of them are taken, and the
    others are told why not while they still send."""
    quiet, key = Probe(server, server.tenant("quiet-bodies")), server.tenant("uploads")
    alone, before_mib = quiet.observe_alone(), server.resident_mib()
    head = server.head(key, "/v1/chat/completions", f"Content-Length: {BODY_BYTES}")
    piece, refused = b" " * (BODY_BYTES - 100), 0
    with held(server, 60) as connections:
        for connection in connections:
            connection.sendall(head + piece)
        beside, most_mib = quiet.observe(), server.resident_mib()
        for connection in connections:
            connection.settimeout(0.01)
            with contextlib.suppress(TimeoutError):
                refused += connection.recv(65_536).startswith(b"HTTP/1.1 429 ")

    check_undisturbed(alone, beside, pause_s=None)
    assert refused == 54
    assert most_mib < before_mib + 160


def test_pipelined_answers_without_a_reader_are_not_made(server: AttackedServer) -> None:
    """Answers of 60 kB, replayed again and again: a connection holds a few of them."""
    quiet, key = Probe(server, server.tenant("quiet-pipeline")), server.tenant("pipeline")
    asked = {"model": server.model, "prompt": [[7, 8, 9]] * 56, "max_tokens": 4, "logprobs": 5}
    body = json.dumps({**asked, "temperature": 0, "ignore_eos": True, "echo": True}).encode()
    first = server.ask(key, "/v1/completions", body, headers={"Idempotency-Key": "k"})
    lines = ("Idempotency-Key: k", f"Content-Length: {len(body)}")
    one = server.head(key, "/v1/completions", *lines) + body
    alone, before_mib = quiet.observe_alone(), server.resident_mib()
    with held(server, 4) as connections:
        for connection in connections:
            connection.settimeout(2.0)
            with contextlib.suppress(OSError):  # the server receives no more
                connection.sendall(one * 4_000)
        beside, most_mib = quiet.observe(), server.resident_mib()

    assert (first.status, len(first.body) > 20_000) == (200, True)
    check_undisturbed(alone, beside, pause_s=None)
    assert most_mib < before_mib + 40
