"""A tenant that promises itself all it can, for hours, beside one that asks for nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.attacks.attacked_server import AttackedServer


def body(server: AttackedServer, first: int, words: int, **more: Any) -> dict[str, Any]:
    """Return a chat of a prompt that no other request has."""
    text = " ".join(str(first + number) for number in range(words))
    return {**server.chat(), "messages": [{"role": "user", "content": text}], **more}


@pytest.mark.slow
def test_promises_leave_the_quiet_tenant_its_prompts(server: AttackedServer) -> None:
    """The attacker renews its promises; the quiet tenant's long prompts are still admitted."""
    quiet, attacker = server.tenant("quiet-promises"), server.tenant("attacker-promises")
    path, ttl = "/v1/chat/completions", {"mode": "implicit", "ttl": "12h"}
    told = []
    for number in range(40):
        asked = body(server, 1_000 + 100 * number, 60, prompt_cache_options=ttl)
        answer = server.ask(attacker, path, asked)
        assert answer.status == 200
        told.append(json.loads(answer.body)["usage"].get("trunkline"))
    longest = [body(server, 90_000 + 100 * number, 60) for number in range(10)]

    assert [server.ask(quiet, path, one).status for one in longest] == [200] * 10
    assert told[0] is None
    assert told[-1]["cache"]["bound"] == "quota"


@pytest.mark.slow
def test_deploy_keeps_what_was_written(start_server: Callable[..., AttackedServer]) -> None:
    """A clean stop and start, with another engine: read and billed as read, not written again."""
    server = start_server()
    key = server.tenant("kept")
    mark = {"type": "ephemeral", "ttl": "1h"}
    text = " ".join(map(str, range(1_000, 1_060)))
    asked = {
        **server.chat(),
        "system": [{"type": "text", "text": text, "cache_control": mark}],
    }
    usages = []
    for _ in range(2):
        answer = server.ask(key, "/v1/messages", asked, headers={"anthropic-version": "2023-06-01"})
        usages.append(json.loads(answer.body)["usage"])
        assert server.stop() == 0
        server.start()
    written = usages[0]["cache_creation_input_tokens"]

    assert written > 60
    assert usages[1]["cache_read_input_tokens"] == written
    assert usages[1]["cache_creation_input_tokens"] == 0
