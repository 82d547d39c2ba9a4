"""Random conversations with random breakpoints, in every dialect: usage must add up. One
conversation goes through four APIs in any order, over one cache. The parts of a prompt sum to the
whole, and a repeated request reads what it read and wrote before."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from gateway.retention_classes import CachingConfig
from tests.unit.gateway.gateway_fixture import GatewayFixture

WORDS = ["trunk", "branch", "leaf", "root", "bark", "ring", "sap", "bud", "twig", "crown"]


@dataclass(frozen=True)
class Part:
    """A text, and the minutes of the breakpoint after it, if any."""

    text: str
    minutes: int | None


@dataclass(frozen=True)
class Talk:
    """`turns`: of user and assistant in alternation, user first and last."""

    system: tuple[Part, ...]
    turns: tuple[tuple[Part, ...], ...]
    tools: int


@dataclass(frozen=True)
class Counted:
    """A prompt's tokens, by its dialect's own fields."""

    total: int
    read: int
    written: int


def drawn(draw: random.Random) -> Talk:
    """Draw at most four breakpoints, longer promises first, as the strictest dialect requires."""
    sizes = [draw.randint(0, 2), *(draw.randint(1, 2) for _ in range(draw.choice([1, 3, 5])))]
    texts = [[" ".join(draw.choices(WORDS, k=6)) for _ in range(size)] for size in sizes]
    places = [(turn, part) for turn, size in enumerate(sizes) for part in range(size)]
    marked = sorted(draw.sample(places, min(len(places), draw.randint(1, 4))))
    hours = draw.randint(0, len(marked))
    minutes = {place: 60 if n < hours else 5 for n, place in enumerate(marked)}
    turns = [
        tuple(Part(text, minutes.get((turn, part))) for part, text in enumerate(some))
        for turn, some in enumerate(texts)
    ]
    return Talk(turns[0], tuple(turns[1:]), draw.choice([0, 0, 2]))


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def role(number: int) -> str:
    return "assistant" if number % 2 else "user"


def anthropic(talk: Talk, draw: random.Random) -> dict[str, Any]:
    def block(part: Part) -> dict[str, Any]:
        ttl = "1h" if part.minutes == 60 else "5m"
        mark = {"cache_control": {"type": "ephemeral", "ttl": ttl}} if part.minutes else {}
        return {"type": "text", "text": part.text, **mark}

    return {
        "max_tokens": 2,
        "system": [block(part) for part in talk.system],
        "messages": [
            {"role": role(n), "content": [block(part) for part in turn]}
            for n, turn in enumerate(talk.turns)
        ],
        "tools": [{"name": f"f{n}", "input_schema": SCHEMA} for n in range(talk.tools)],
    }


def openai_part(part: Part, kind: str, draw: random.Random) -> dict[str, Any]:
    native = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": draw.choice(["30m", "12h"])}}
    ttl = "1h" if part.minutes == 60 else "5m"
    mark = draw.choice([native, {"cache_control": {"type": "ephemeral", "ttl": ttl}}])
    return {"type": kind, "text": part.text, **(mark if part.minutes else {})}


def options(draw: random.Random) -> dict[str, Any]:
    return {"prompt_cache_options": {"mode": draw.choice(["implicit", "explicit"])}}


def openai_turns(talk: Talk, draw: random.Random, kinds: Callable[[str], str]) -> list[Any]:
    turns = [("system", talk.system), *((role(n), turn) for n, turn in enumerate(talk.turns))]
    return [
        {"role": who, "content": [openai_part(part, kinds(who), draw) for part in turn]}
        for who, turn in turns
        if turn
    ]


def chat(talk: Talk, draw: random.Random) -> dict[str, Any]:
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": SCHEMA}}
        for n in range(talk.tools)
    ]
    messages = openai_turns(talk, draw, lambda _: "text")
    return {"max_tokens": 2, "messages": messages, "tools": tools or None, **options(draw)}


def responses(talk: Talk, draw: random.Random) -> dict[str, Any]:
    tools = [{"type": "function", "name": f"f{n}", "parameters": SCHEMA} for n in range(talk.tools)]
    items = openai_turns(
        talk, draw, lambda who: "output_text" if who == "assistant" else "input_text"
    )
    for item in items:
        if item["role"] == "assistant":  # what was said by the model has no marks there
            item["content"] = [{**part, "annotations": []} for part in item["content"]]
            for part in item["content"]:
                part.pop("prompt_cache_breakpoint", None)
                part.pop("cache_control", None)
    return {"max_output_tokens": 2, "input": items, "tools": tools, **options(draw)}


def gemini(talk: Talk, draw: random.Random) -> dict[str, Any]:
    """Send to Gemini's dialect: it has no breakpoints and reads all cached tokens."""
    found: dict[str, Any] = {
        "contents": [
            {
                "role": "model" if n % 2 else "user",
                "parts": [{"text": part.text} for part in turn],
            }
            for n, turn in enumerate(talk.turns)
        ],
        "generationConfig": {"maxOutputTokens": 2},
    }
    if talk.system:
        found["systemInstruction"] = {"parts": [{"text": part.text} for part in talk.system]}
    if talk.tools:
        declared = [{"name": f"f{n}", "parametersJsonSchema": SCHEMA} for n in range(talk.tools)]
        found["tools"] = [{"functionDeclarations": declared}]
    return found


def anthropic_counts(usage: dict[str, Any]) -> Counted:
    read, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
    assert sum(usage["cache_creation"].values()) == written
    return Counted(usage["input_tokens"] + read + written, read, written)


def chat_counts(usage: dict[str, Any]) -> Counted:
    details = usage["prompt_tokens_details"]
    read, written = details["cached_tokens"], details["cache_write_tokens"]
    return Counted(usage["prompt_tokens"], read, written)


def responses_counts(usage: dict[str, Any]) -> Counted:
    details = usage["input_tokens_details"]
    split = details.get("cache_write_tokens_details", {})
    assert sum(split.values()) == details["cache_write_tokens"]
    return Counted(usage["input_tokens"], details["cached_tokens"], details["cache_write_tokens"])


def gemini_counts(usage: dict[str, Any]) -> Counted:
    assert usage["totalTokenCount"] == usage["promptTokenCount"] + usage["candidatesTokenCount"]
    return Counted(usage["promptTokenCount"], usage.get("cachedContentTokenCount", 0), 0)


DIALECTS: dict[str, tuple[str, Any, Any]] = {
    "anthropic": ("/v1/messages", anthropic, anthropic_counts),
    "chat": ("/v1/chat/completions", chat, chat_counts),
    "responses": ("/v1/responses", responses, responses_counts),
    "gemini": ("/v1/models/tiny:generateContent", gemini, gemini_counts),
}


@pytest.fixture
async def gateway(unopened_gateway: GatewayFixture) -> AsyncIterator[GatewayFixture]:
    unopened_gateway.context_tokens = 2_048
    # A clipped lease is read in full the second time, so each tenant may promise the pool.
    caching = CachingConfig(promised_share_default=1.0)
    unopened_gateway.config = msgspec.structs.replace(unopened_gateway.config, caching=caching)
    await unopened_gateway.open()
    yield unopened_gateway
    await unopened_gateway.close()


async def asked(gateway: GatewayFixture, name: str, body: dict[str, Any]) -> Counted:
    """Send and return the usage, which must equal the header."""
    path, _, count = DIALECTS[name]
    sent = body if name == "gemini" else {"model": gateway.model, **body}
    status, answer, response = await gateway.ask(path, sent)
    assert status == 200, answer
    found: Counted = count(answer.get("usage") or answer["usageMetadata"])
    parts = dict(part.split("=") for part in response.headers["X-Trunkline-Cache"].split("; "))
    read, written, fresh = (int(parts[key]) for key in ("read", "write", "fresh"))
    assert (read, written) == (found.read, found.written)
    assert read + written + fresh == found.total
    return found


@pytest.mark.parametrize("seed", range(12))
async def test_sums_hold_and_repeated_request_reads_what_it_wrote(
    gateway: GatewayFixture, seed: int
) -> None:
    """In each dialect's own terms, also after calls of the other dialects."""
    draw = random.Random(seed)
    for _ in range(3):
        talk = drawn(draw)
        totals = set()
        for name in draw.sample(sorted(DIALECTS), len(DIALECTS)):
            body = DIALECTS[name][1](talk, draw)
            first, second = await asked(gateway, name, body), await asked(gateway, name, body)

            assert first.total == second.total
            totals.add(first.total)
            if name == "gemini":
                assert first.read <= second.read < second.total
            else:
                assert (second.read, second.written) == (first.read + first.written, 0)
        assert len(totals) == 1, "one conversation is one prompt in every dialect"
    await gateway.check_quiet()


@pytest.mark.parametrize("seed", range(4))
async def test_cached_content_is_read_in_full(gateway: GatewayFixture, seed: int) -> None:
    """The third way to keep a prefix: by name, without sending it again."""
    draw = random.Random(seed)
    kept = gemini(drawn(draw), draw)
    kept |= {"model": "models/tiny", "ttl": "300s"}
    del kept["generationConfig"]
    status, resource, _ = await gateway.ask("/v1/cachedContents", kept)
    assert status == 200, resource
    tokens = resource["usageMetadata"]["totalTokenCount"]
    body = {
        "contents": [{"role": "user", "parts": [{"text": "and now"}]}],
        "cachedContent": resource["name"],
        "generationConfig": {"maxOutputTokens": 2},
    }
    found = [await asked(gateway, "gemini", body) for _ in range(2)]

    assert all(tokens <= one.read < one.total for one in found)
    assert found[0].total == found[1].total
    await gateway.check_quiet()
