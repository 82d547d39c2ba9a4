"""An answer larger than a frame between engine and gateway costs no other stream an event."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.attacked_server import Answer, AttackedServer, flood
from tests.attacks.probe import Probe
from tests.models import tiny_config, write_folder

PROMPT_TOKENS = 3_000
LOGPROBS = 20


@pytest.fixture
def long_context(tmp_path: Path) -> Iterator[AttackedServer]:
    """Yield a server whose model has room for a prompt with more than a frame of logprobs."""
    model = write_folder(tmp_path / "long", tiny_config(context=4_096))
    settings = "[engine]\nthreads = 1\nkv_blocks = 1024\nprefill_chunk_tokens_max = 2048\n"
    server = AttackedServer(tmp_path, str(model), settings)
    server.start()
    yield server
    server.stop()


@pytest.mark.slow
def test_prompts_with_logprobs_leave_other_streams_whole(long_context: AttackedServer) -> None:
    """1.9 MB of logprobs for each answer; the quiet tenant's streams end as ever."""
    quiet = Probe(long_context, long_context.tenant("quiet"))
    attacker = long_context.tenant("attacker")
    chance = random.Random(1)
    alone = quiet.observe_alone(10)

    def attack() -> Answer:
        prompt = [chance.randrange(5, 250) for _ in range(PROMPT_TOKENS)]
        body = {"model": long_context.model, "prompt": prompt, "max_tokens": 1, "echo": True}
        return long_context.ask(attacker, "/v1/completions", {**body, "logprobs": LOGPROBS})

    with flood(attack, 1) as done:
        beside = quiet.observe(10)
        while not done:
            beside = quiet.observe(10)

    assert alone.refused == beside.refused == 0
    assert beside.hit_ratio == alone.hit_ratio
    for answer in done:
        assert isinstance(answer, Answer)
        assert answer.status == 200, answer.body[:300]
        logprobs = json.loads(answer.body)["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == PROMPT_TOKENS + 1
