"""Sampling settings at the ends of their ranges, which must not end a request at the operator's
cost, nor erase what anyone was promised."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest

from tests.attacks.attacked_server import Answer, AttackedServer

VALUES: Final[Mapping[str, list[Any]]] = {
    "temperature": [0, 5e-324, 1e-300, 1e-38, 1e-10, 1, 2],
    "top_p": [0, 5e-324, 1e-30, 0.5, 1],
    "min_p": [0, 1e-320, 0.5, 1],
    "top_k": [-1, 0, 1, 2, 2**31 - 1],
    "repetition_penalty": [5e-324, 1e-45, 1e-38, 0.01, 0.5, 1, 100],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "seed": [-(2**63), 0, 2**63 - 1],
    "n": [1, 3],
    "top_logprobs": [0, 20],
    "min_tokens": [0, 12],
    "stop_token_ids": [[0], list(range(64))],
    "ignore_eos": [True, False],
    "logit_bias": [
        {str(token): -100 for token in range(200)},
        {str(token): 100 for token in range(200)},
        {"5": 5e-324},
    ],
}
"""Values of each field: the least, the greatest, and those that fp32 does not have."""

CONSTRAINTS: Final[tuple[Mapping[str, Any], ...]] = (
    {},
    {"response_format": {"type": "json_object"}},
    {"guided_choice": ["a", "bb"]},
    {"guided_regex": "[ab]{3,5}"},
    {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "required",
    },
)


def extreme(rng: random.Random) -> dict[str, Any]:
    """Return some extreme settings, mostly with a constraint on the answer."""
    names = rng.sample(sorted(VALUES), rng.randrange(3, 10))
    settings = {name: rng.choice(VALUES[name]) for name in names}
    if "top_logprobs" in settings:
        settings["logprobs"] = True
    return {**settings, **rng.choice(CONSTRAINTS)}


def promised(server: AttackedServer, key: str, question: str, **more: Any) -> Answer:
    """Ask behind a prefix that is kept for an hour."""
    text = " ".join(map(str, range(3_000, 3_060)))
    control = {"type": "ephemeral", "ttl": "1h"}
    asked = {
        **server.chat(question, max_tokens=2),
        "system": [{"type": "text", "text": text, "cache_control": control}],
        **more,
    }
    return server.ask(key, "/v1/messages", asked, headers={"anthropic-version": "2023-06-01"})


@pytest.mark.slow
def test_no_sampling_settings_end_at_the_operators_cost(server: AttackedServer) -> None:
    """600 requests, with and without a constraint: each is answered, charged or refused before it
    ran, and a prefix that another tenant was promised is read as before."""
    quiet, attacker = server.tenant("quiet-sampling"), server.tenant("attacker-sampling")
    written = json.loads(promised(server, quiet, "first").body)["usage"]
    rng = random.Random(11)
    bodies = [server.chat(f"x {number}", max_tokens=12) | extreme(rng) for number in range(600)]
    with ThreadPoolExecutor(6) as pool:
        path = "/v1/chat/completions"
        answers = list(pool.map(lambda body: server.ask(attacker, path, body), bodies))

    failed = [
        (answer, body) for answer, body in zip(answers, bodies, strict=True) if answer.status >= 500
    ]
    assert failed == []
    assert sum(answer.status == 200 for answer in answers) > 300
    read = json.loads(promised(server, quiet, "second").body)["usage"]
    assert read["cache_read_input_tokens"] == written["cache_creation_input_tokens"] > 60


@pytest.mark.slow
def test_no_sampling_settings_erase_the_own_promise(server: AttackedServer) -> None:
    """Breaking it would be credited, with each later read for nothing."""
    key = server.tenant("own-promise")
    written = json.loads(promised(server, key, "first").body)["usage"]
    rng = random.Random(12)
    for number in range(40):
        settings = {**extreme(rng), "repetition_penalty": rng.choice([5e-324, 0.01, 100])}
        text = " ".join(map(str, range(3_000, 3_060)))
        messages = [{"role": "system", "content": text}, {"role": "user", "content": str(number)}]
        body = server.chat(messages=messages) | settings
        assert server.ask(key, "/v1/chat/completions", body).status in (200, 400)

    read = json.loads(promised(server, key, "second").body)["usage"]
    assert read["cache_read_input_tokens"] == written["cache_creation_input_tokens"] > 60
