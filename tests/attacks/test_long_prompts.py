"""A flood of long prompts that no cache knows, beside a quiet tenant with a cached prefix."""

from __future__ import annotations

import itertools

import pytest

from tests.attacks.attacked_server import AttackedServer, flood
from tests.attacks.probe import Probe, check_undisturbed

pytestmark = pytest.mark.slow

PROMPT_TOKENS = 1_500
FIRST_TOKEN_TIMES = 8.0
"""A request of a few missing tokens waits for the rest of one step of the flood and for its own
step. Where two cores take longer than the target for the least slice of a prompt (32 tokens), a
step of the flood takes 95 ms, its own 36 in place of 17: about 5 times in all, and 71 before steps
were bounded by time. The goal of 4 holds where a slice fits the target (2.1 and 2.2 times)."""
QUIET_TEXT = "You are a librarian who knows each book. " * 60


def test_long_prompts_leave_the_quiet_tenant_its_time(default_server: AttackedServer) -> None:
    """Four clients have prompts computed without end (twelve made it 71 times the time alone)."""
    server = default_server
    quiet = Probe(server, server.tenant("quiet", floor_blocks=200), QUIET_TEXT)
    key, serial = server.tenant("flood"), itertools.count()

    def send() -> int:
        number = next(serial)
        ids = [100 + (number * 7_919 + place * 31) % 48_000 for place in range(PROMPT_TOKENS)]
        body = {"model": server.model, "prompt": ids, "max_tokens": 4, "temperature": 0}
        return server.ask(key, "/v1/completions", body).status

    alone = quiet.observe_alone(20)
    with flood(send, threads=4) as statuses:
        beside = quiet.observe(20)

    check_undisturbed(alone, beside, first_token_times=FIRST_TOKEN_TIMES, pause_s=None)
    assert set(statuses) <= {200, 503}
