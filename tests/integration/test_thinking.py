"""Models that think, from a request to its next turn: tags and harmony in every dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.model_store import ModelCard
from tests.integration.thinking_clients import CLIENTS, Client, Thoughtful, as_turns
from tests.thinking_models import harmony_model, tags_model
from tests.unit.gateway.gateway_fixture import GatewayFixture

LONG = "The trunk is shared, the branches are one's own, and every leaf knows it. " * 4
WORDS = {
    "tags": "let me see\n</think>\n\nYes.",
    "harmony": "<|channel|>analysis<|message|>let me see<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Yes.",
}
DIRECT = {"tags": "Yes.", "harmony": "<|channel|>final<|message|>Yes."}
AROUND = {
    "tags": "</think>",
    "harmony": "<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>"
    " <|constrain|>json",
}
"""The markers around a thought, which are counted as thinking."""
BUDGET = 6
THOUGHT_TOKENS = len("let me see") + 1
"""In a vocabulary of bytes, the least that the thought and the marker at its end take."""


@pytest.fixture(scope="session")
def cards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelCard]:
    """Return a model for each format."""
    return {
        "tags": tags_model(tmp_path_factory.mktemp("tags")),
        "harmony": harmony_model(tmp_path_factory.mktemp("harmony")),
    }


@pytest.fixture(params=["tags", "harmony"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=sorted(CLIENTS))
def client(request: pytest.FixtureRequest) -> Client:
    return CLIENTS[request.param]


@pytest.fixture(params=[False, True], ids=["unary", "streamed"])
def streams(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def unopened_gateway(
    cards: dict[str, ModelCard], kind: str, tmp_path: Path
) -> Iterator[GatewayFixture]:
    """Yield a gateway that serves the model and can hold answers to grammars."""
    gateway = GatewayFixture(cards[kind], tmp_path)
    gateway.context_tokens = 2_048
    gateway.takes_grammars = True
    yield gateway
    gateway.discard()


def say(gateway: GatewayFixture, text: str, *, ends: bool = True) -> None:
    """Set the text that the model answers, markers as special tokens."""
    ids = gateway.renderer.tokenizer.encode(text, specials=True)
    gateway.runner.words = (*ids, *gateway.renderer.card.stop_token_ids[:1]) if ends else ids


def tokens_of(gateway: GatewayFixture, text: str) -> int:
    """Return how many tokens an output takes, its stop token too."""
    return len(gateway.renderer.tokenizer.encode(text, specials=True)) + 1


def thinks(client: Client) -> dict[str, Any]:
    """Return the fields that turn thinking on: the template of tags then opens the thought."""
    return client.effort("high")


async def test_answer_and_usage_tell_thoughts_apart(
    gateway: GatewayFixture, kind: str, client: Client, *, streams: bool
) -> None:
    """Thought and text arrive in the dialect's own fields, and their tokens are counted once."""
    say(gateway, WORDS[kind])
    turns = [client.question(LONG)]
    answer = await client.ask(gateway, turns, streams=streams, **thinks(client))

    assert (answer.thought, answer.text) == ("let me see", "Yes.")
    assert answer.output_tokens == tokens_of(gateway, WORDS[kind])
    if answer.thinking_tokens is not None:
        most = answer.output_tokens - len("Yes.")
        assert THOUGHT_TOKENS <= answer.thinking_tokens <= most
    await gateway.check_quiet()
    assert [entry[3] for entry in gateway.entries()] == [answer.output_tokens]


async def test_next_turn_drops_the_thought_and_reads_the_cache(
    gateway: GatewayFixture, kind: str, client: Client, *, streams: bool
) -> None:
    """The template keeps thoughts of a last answer alone, so the next prompt begins as the last
    one did; its blocks are found, and the usage says so."""
    say(gateway, WORDS[kind])
    turns = [client.question(LONG)]
    on = thinks(client)
    first = await client.ask(gateway, turns, streams=streams, **on)
    turns += [*as_turns(first.turn), client.question("And?")]
    second = await client.ask(gateway, turns, streams=streams, **on)
    again = await client.ask(gateway, turns[:1], streams=streams, **on)

    shared = first.prompt_tokens - first.prompt_tokens % 16
    assert second.text == "Yes."
    assert first.cached_tokens == 0
    assert shared - 16 <= second.cached_tokens <= first.prompt_tokens + 16
    assert shared - 16 <= again.cached_tokens < first.prompt_tokens
    added = second.prompt_tokens - first.prompt_tokens
    assert added < len("Yes.And?") + 2 * 40  # the template's own words, and no thought
    await gateway.check_quiet()


async def test_effort_none_answers_at_once(
    gateway: GatewayFixture, kind: str, client: Client, *, streams: bool
) -> None:
    """By the template's switch, by harmony's lowest effort, or by a budget of no tokens."""
    say(gateway, DIRECT[kind])
    fields = client.effort("none")
    answer = await client.ask(gateway, [client.question("hi")], streams=streams, **fields)

    assert (answer.thought, answer.text) == ("", "Yes.")
    assert kind == "harmony" or answer.thinking_tokens in (0, None)
    await gateway.check_quiet()


def rest_of(answer: Thoughtful) -> str:
    """Return what an answer has behind its thought, as canonical JSON."""
    text = answer.calls[0] if answer.calls else answer.text
    return json.dumps(json.loads(text), separators=(",", ":"))


async def test_format_and_budget_hold_behind_the_thought(
    gateway: GatewayFixture, kind: str, client: Client
) -> None:
    """A model that would think for ever is stopped by its budget, and answers in the format."""
    say(gateway, "" if kind == "tags" else "<|channel|>analysis<|message|>", ends=False)
    least = 1_024 if client is CLIENTS["messages"] else BUDGET  # that dialect's own lower bound
    fields = _merged(client.budget(least), client.schema)
    answer = await client.ask(gateway, [client.question("hi")], streams=True, **fields)

    assert rest_of(answer) == '{"a":7}'
    if answer.thinking_tokens is not None:
        assert answer.thinking_tokens <= BUDGET + tokens_of(gateway, AROUND[kind])
    await gateway.check_quiet()


async def test_forced_call_follows_the_thought(
    gateway: GatewayFixture, kind: str, client: Client
) -> None:
    """Its arguments satisfy the tool's schema, as the model's own format writes them."""
    say(gateway, WORDS[kind].removesuffix("Yes.").removesuffix("final<|message|>"), ends=False)
    fields = {**thinks(client), **client.forced}
    answer = await client.ask(gateway, [client.question("hi")], streams=True, **fields)

    assert answer.thought == "let me see"
    assert rest_of(answer) == '{"a":7}'
    assert answer.text == ""
    await gateway.check_quiet()


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return both fields; objects of the same name are merged, thinking's too."""
    merged = dict(first)
    for name, value in second.items():
        known = merged.get(name)
        if isinstance(known, dict) and isinstance(value, dict):
            merged[name] = _merged(value, known)
        else:
            merged[name] = value
    return merged
