"""Schemas made to be slow to compile delay the tenant that sends them, and no other."""

from __future__ import annotations

import itertools
import statistics
import time

import pytest

from tests.attacks.attacked_server import Answer, AttackedServer, flood
from tests.attacks.conftest import StartServer

TIMES = 4.0
"""Most times that another tenant's new schema may take, of the time alone."""
NOISE_S = 0.1


def constrained(server: AttackedServer, schema: object, **more: object) -> dict[str, object]:
    """Return a chat whose answer follows a schema."""
    wanted = {"name": "n", "schema": schema, "strict": True}
    response_format = {"type": "json_schema", "json_schema": wanted}
    return {**server.chat(max_tokens=4, response_format=response_format), **more}


def bomb(number: int) -> dict[str, object]:
    """Return a schema of 50 bytes that takes the compiler's whole time and memory."""
    return {"type": "integer", "multipleOf": 999_983 + 2 * number}


def small(number: int) -> dict[str, object]:
    """Return a schema that no request has sent before."""
    properties = {f"v{number}": {"type": "boolean"}}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


class NewSchemas:
    """A quiet tenant that sends a new schema each time."""

    def __init__(self, server: AttackedServer, name: str) -> None:
        self._server, self._key = server, server.tenant(name)
        self._numbers = itertools.count()

    def median_s(self, count: int = 7) -> float:
        """Return the median time to an answer."""
        return statistics.median(self._ask() for _ in range(count))

    def _ask(self) -> float:
        began_s = time.monotonic()
        body = constrained(self._server, small(next(self._numbers)))
        answer = self._server.ask(self._key, "/v1/chat/completions", body)
        assert answer.status == 200, answer
        return time.monotonic() - began_s


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["one namespace", "a namespace for each"])
def test_bombs_delay_no_other_tenant(server: AttackedServer, spread: str) -> None:
    """`cache_salt` makes namespaces, which must not make turns."""
    name = spread.replace(" ", "-")
    quiet, attacker = NewSchemas(server, f"quiet-{name}"), server.tenant(f"attacker-{name}")
    numbers = itertools.count(0 if spread == "one namespace" else 10_000)

    def attack() -> Answer:
        number = next(numbers)
        more = {} if spread == "one namespace" else {"cache_salt": f"p{number}"}
        body = constrained(server, bomb(number), **more)
        return server.ask(attacker, "/v1/chat/completions", body)

    quiet.median_s()  # the compiler's processes have started
    alone_s = quiet.median_s()
    with flood(attack, 12) as done:
        while not done:
            quiet.median_s(1)
        beside_s = quiet.median_s()

    assert beside_s <= TIMES * max(NOISE_S, alone_s), (alone_s, beside_s)
    statuses = {one.status for one in done if isinstance(one, Answer)}
    assert statuses <= {200, 400, 429, 503}, statuses  # a fast machine compiles some in time


@pytest.mark.slow
def test_waiting_for_grammars_does_not_make_the_engine_look_stuck(
    start_server: StartServer,
) -> None:
    """No step is taken while all requests wait for a grammar, for longer than a step may take."""
    server = start_server("[engine]\nthreads = 1\nkv_blocks = 256\nstep_timeout_s = 2.0\n")
    attacker = server.tenant("attacker")
    numbers = itertools.count()

    def attack() -> Answer:
        body = constrained(server, bomb(next(numbers)))
        return server.ask(attacker, "/v1/chat/completions", body)

    until_s = time.monotonic() + 8.0
    with flood(attack, 4) as done:
        while time.monotonic() < until_s or not done:
            assert server.ask("", "/healthz", method="GET").status == 200

    assert server.log_events("engine_stuck") == []
    assert server.log_events("engine_died") == []
