"""Texts, schemas and bodies that take long to prepare delay only the tenant that sends them."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import string
import time

import pytest

from tests.attacks.attacked_server import Answer, AttackedServer, flood
from tests.attacks.probe import Observed, Probe, check_undisturbed
from tests.unit.gateway.gateway_fixture import GatewayFixture

COUNT, CHAT = "/v1/messages/count_tokens", "/v1/chat/completions"
HEADERS = {"Content-Encoding": "gzip", "anthropic-version": "2023-06-01"}

OBSERVED = 4
AUC_MAX = 0.55
TRIALS = 1_000
TEXTS_BETWEEN = 20
"""Short texts between two trials, less than one request's work: until then the processor's own
caches still hold the vocabulary's entries for the words."""


def attack(server: AttackedServer, name: str, number: int) -> tuple[str, dict[str, object]]:
    """Return the path and the body of one request of an attack; each has a text of its own."""
    said = [{"role": "user", "content": f"{number}"}]
    match name:
        case "long counts":
            text = f"{number} " + "the quick brown fox " * 300
            return COUNT, {"messages": [{"role": "user", "content": text}]}
        case "text that cannot fit":
            text = f"{number} " + "the quick brown fox " * 100_000
            return COUNT, {"messages": [{"role": "user", "content": text}]}
        case "messages":
            roles = ("user", "assistant")
            messages = [{"role": roles[n % 2], "content": f"{number}"} for n in range(2_000)]
            return CHAT, {"messages": messages, "max_tokens": 9_000}
        case "tools":
            tools = [
                {"name": f"t{number}_{n}", "input_schema": {"type": "object"}} for n in range(500)
            ]
            return COUNT, {"messages": said, "tools": tools}
        case "values":
            return CHAT, {"messages": said, "metadata": [[]] * 3_000_000}
        case _:
            schema = {
                "properties": {"a": {"type": "string", "pattern": "[" * 60_000 + f"{number}"}}
            }
            form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
            return CHAT, {"messages": said, "response_format": form, "max_tokens": 9_000}


ATTACKS = ("long counts", "text that cannot fit", "messages", "tools", "values", "pattern")


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_long_work_leaves_the_quiet_tenant_alone(server: AttackedServer, name: str) -> None:
    """Four connections of one tenant, whose requests are refused or only counted."""
    word = name.replace(" ", "-")
    quiet, key = Probe(server, server.tenant(f"quiet-{word}")), server.tenant(f"attacker-{word}")
    numbers = itertools.count()

    def act() -> Answer:
        path, body = attack(server, name, next(numbers))
        data = gzip.compress(json.dumps({"model": server.model, **body}).encode(), 1)
        return server.ask(key, path, data, headers=HEADERS)

    alone = quiet.observe_alone()
    with flood(act) as done:
        while not done:
            quiet.observe(1)
        # What the work costs shows each time; what else the machine does delays one chat or other.
        beside = min((quiet.observe() for _ in range(OBSERVED)), key=slowest)

    assert any(isinstance(one, Answer) for one in done), done
    check_undisturbed(alone, beside)


def slowest(observed: Observed) -> float:
    """Return the larger of the longest pause and the longest time to a first token, in seconds."""
    return max(observed.longest_pause_s, *observed.first_token_s)


def auc(hits: list[float], misses: list[float]) -> float:
    """Return how likely a hit is faster than a miss."""
    wins = sum((hit < miss) + (hit == miss) / 2 for hit in hits for miss in misses)
    return wins / (len(hits) * len(misses))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole text", "rare words"])
async def test_time_does_not_tell_what_another_tenant_sent(
    gateway: GatewayFixture, kind: str
) -> None:
    """The renderer, without the network's noise: a text that another tenant sent takes as long as a
    new one. `rare words`: the same words, but another text, which only a cache of words would know.
    """
    renderer, draw = gateway.renderer, random.Random(5)
    tokenizer = renderer.tokenizer

    def words() -> str:
        return " ".join("".join(draw.choices(string.ascii_lowercase, k=10)) for _ in range(60))

    def spent_s(text: str) -> float:
        text = text.encode().decode()  # in memory of its own, as each request's text
        began_s = time.perf_counter()
        tokenizer.encode(text, specials=False, owner=2)
        return time.perf_counter() - began_s

    found: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(TRIALS):
        known, new = words(), words()
        tokenizer.encode(known, specials=False, owner=1)
        tail = "" if kind == "whole text" else " and more"
        for _ in range(TEXTS_BETWEEN):
            tokenizer.encode(words(), specials=False, owner=3)
        arms = [(known + tail, True), (new + tail, False)]
        draw.shuffle(arms)
        for text, is_known in arms:
            found[is_known].append(spent_s(text))

    assert auc(found[True], found[False]) <= AUC_MAX
