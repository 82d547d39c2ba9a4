"""Predictions as long as the context, beside a quiet tenant: who sends them pays for them."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from gateway.dialects.canonical import Call, GenerationParameters, Prompt, Rendered
from gateway.engines.waiting_requests import WaitingBounds, WaitingRequests
from gateway.errors import Kind, Refusal
from gateway.generation.admission import admit
from tests.attacks.attacked_server import AttackedServer, flood
from tests.attacks.probe import Probe, check_undisturbed
from tests.unit.gateway.generation.test_admission import NOW, identity


@pytest.mark.slow
def test_long_predictions_leave_the_quiet_tenant_alone(server: AttackedServer) -> None:
    """Four clients predict a new text of hundreds of tokens with each question of two words."""
    quiet = Probe(server, server.tenant("quiet"))
    key, serial = server.tenant("attacker"), itertools.count()

    def send() -> int:
        number = next(serial)
        text = " ".join(f"w{number + place}" for place in range(60))
        body = {
            "model": server.model,
            "messages": [{"role": "user", "content": "count on"}],
            "max_tokens": 4,
            "prediction": {"type": "content", "content": text},
        }
        return server.ask(key, "/v1/chat/completions", body).status

    alone = quiet.observe_alone()
    with flood(send, threads=4) as statuses:
        beside = quiet.observe()

    check_undisturbed(alone, beside)
    assert 200 in statuses
    assert set(statuses) <= {200, 400, 503}


def test_waiting_predictions_fill_the_queue_as_prompts_do() -> None:
    """A tenant whose waiting predictions take the queue's tokens is refused, with a retry time; one
    with little waiting is not."""
    waiting = WaitingRequests(WaitingBounds(64, 10_000))
    waiting.enter(1, 1.0, [9_900])
    now = replace(NOW, waiting=waiting)
    call = Call("m", (Prompt(token_ids=(1, 2)),), GenerationParameters())
    rendered = [Rendered((1, 2), prediction=(5,) * 200)]

    with pytest.raises(Refusal) as refused:
        admit(call, rendered, identity(1), "id", now, b"a", [()])
    assert refused.value.kind is Kind.BUSY
    assert admit(call, rendered, identity(2), "id", now, b"b", [()])[0].sent_tokens == 202
