"""Long answers of one tenant in every batch slot: a quiet tenant gets its share at once."""

from __future__ import annotations

import pytest

from tests.attacks.attacked_server import AttackedServer, flood
from tests.attacks.conftest import StartServer
from tests.attacks.probe import Probe, check_undisturbed

SLOTS = 16
SETTINGS = f"""
[engine]
device = "cpu"
threads = 1
kv_memory_mib = 64
sequences_max = {SLOTS}
"""


def hold(server: AttackedServer, key: str, samples: int) -> int:
    """Stream one long answer of several samples to its end; return its status."""
    body = server.chat("count up for ever", max_tokens=400, n=samples, stream=True, temperature=1)
    return server.ask(key, "/v1/chat/completions", body).status


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 16], ids=["one sample", "n = 16"])
def test_long_answers_leave_a_slot_to_the_quiet_tenant(
    start_server: StartServer, samples: int
) -> None:
    """Before, the quiet tenant waited until an answer ended: 39 s, or for ever. The bound is wider
    than elsewhere: its token is computed in one step with the attacker's, and a step takes longer
    with sixteen rows than with one.
    """
    server = start_server(SETTINGS)
    quiet = Probe(server, server.tenant("quiet"))
    key = server.tenant("attacker")
    alone = quiet.observe_alone()
    with flood(lambda: hold(server, key, samples), threads=2 * SLOTS // samples + 2) as answers:
        beside = quiet.observe()

    assert answers
    check_undisturbed(alone, beside, first_token_times=8.0, pause_s=None)
