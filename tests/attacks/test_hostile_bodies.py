"""One body that was costly by its shape: brackets, texts, parts, JSON values."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable

import pytest

from tests.attacks.attacked_server import AttackedServer, flood
from tests.attacks.probe import Probe, check_undisturbed

pytestmark = pytest.mark.slow

PAUSE_BETWEEN_S = 0.3
"""Between two bodies: their client shares the machine with the server that it attacks."""


def chat_of(server: AttackedServer, content: object, **more: object) -> dict[str, object]:
    return {**server.chat(), "messages": [{"role": "user", "content": content}], **more}


def brackets(server: AttackedServer) -> tuple[str, object]:
    """Row 1: a pattern of open brackets, tried from each one to the end (10.8 s)."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "[" * 20_000}}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    return "/v1/chat/completions", server.chat(response_format=form)


def long_text(server: AttackedServer) -> tuple[str, object]:
    """Row 2: a long text that was tokenized without letting other threads run (1.9 s)."""
    words = "".join(f"the quick brown fox {number} " for number in range(110_000))
    return "/v1/messages/count_tokens", chat_of(server, words)


def long_text_to_show(server: AttackedServer) -> tuple[str, object]:
    """The same text, with each of its tokens in the answer."""
    words = "".join(f"the quick brown fox {number} " for number in range(110_000))
    return "/tokenize", {"prompt": words, "return_token_strs": True}


def many_ids(server: AttackedServer) -> tuple[str, object]:
    """As many token ids as a body may have values."""
    return "/detokenize", {"tokens": [*range(1_000)] * 199}


def empty_parts(server: AttackedServer) -> tuple[str, object]:
    """Row 16: parts of a message (1.7 s)."""
    return "/v1/chat/completions", chat_of(server, [{"type": "text", "text": ""}] * 380_000)


def many_keys(server: AttackedServer) -> tuple[str, object]:
    """Row 16: JSON values that mean nothing (0.25 to 0.42 s)."""
    return "/v1/chat/completions", server.chat(metadata={f"k{n:06x}": 0 for n in range(500_000)})


def many_prompts(server: AttackedServer) -> tuple[str, object]:
    """Row 16: prompts just short enough to be tokenized on the loop (0.73 s)."""
    prompts = ["".join(f"{n}x{word} " for word in range(800))[:4_000] for n in range(128)]
    return "/v1/completions", {"model": server.model, "prompt": prompts, "max_tokens": 1}


BODIES: dict[str, Callable[[AttackedServer], tuple[str, object]]] = {
    made.__name__: made
    for made in (
        brackets,
        long_text,
        long_text_to_show,
        many_ids,
        empty_parts,
        many_keys,
        many_prompts,
    )
}


@pytest.mark.parametrize("shape", BODIES)
def test_a_body_of_any_shape_stops_no_other_tenant(server: AttackedServer, shape: str) -> None:
    """The attacker has no limit of requests; each body is answered or refused by its size."""
    quiet, key = Probe(server, server.tenant(f"quiet-{shape}")), server.tenant(f"shape-{shape}")
    path, asked = BODIES[shape](server)
    packed = gzip.compress(json.dumps(asked).encode())
    headers = {"Content-Encoding": "gzip", "anthropic-version": "2023-06-01"}

    def send() -> int:
        status = server.ask(key, path, packed, headers=headers).status
        time.sleep(PAUSE_BETWEEN_S)
        return status

    alone = quiet.observe_alone(100)
    with flood(send, threads=1) as statuses:
        beside = quiet.observe(100)

    check_undisturbed(alone, beside)
    assert statuses
    assert set(statuses) <= {200, 400, 413}
