"""`compare_prompts`: where two bodies part, by field, character and token, in each dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.model_store import ModelCard
from gateway.dialects.families import guess_family
from gateway.errors import Refusal
from gateway.findings.prompt_diff import compare_prompts
from gateway.prompt import Renderer
from tests.unit.gateway.prompt.chat_templates import HERMES, with_template

STABLE = (
    "You answer questions about leave, travel and pay from the handbook of the company. Be short,"
    " be polite, and name the paragraph that the answer is from."
)
BODIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chat": (
        "openai",
        "messages[0].content",
        {"messages": [{"role": "system", "content": "?"}, {"role": "user", "content": "Hi"}]},
    ),
    "completions": ("openai", "prompt", {"prompt": "?"}),
    "responses": ("openai", "instructions", {"instructions": "?", "input": "Hi"}),
    "anthropic": (
        "anthropic",
        "system",
        {"max_tokens": 1, "system": "?", "messages": [{"role": "user", "content": "Hi"}]},
    ),
    "gemini": (
        "gemini",
        "systemInstruction.parts[0]",
        {
            "systemInstruction": {"parts": [{"text": "?"}]},
            "contents": [{"role": "user", "parts": [{"text": "Hi"}]}],
        },
    ),
}


@pytest.fixture(scope="session")
def native_tools(card: ModelCard, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """A template that writes tools itself, behind the system text."""
    return with_template(card, HERMES, tmp_path_factory.mktemp("hermes"))


def filled(shape: dict[str, Any], text: str, **more: Any) -> bytes:
    """Return a body with a text in the place of the question mark."""
    body = {"model": "m", **shape, **more}
    return json.dumps(body).replace('"?"', json.dumps(text)).encode()


@pytest.mark.parametrize("name", BODIES)
def test_place_is_named_in_the_dialects_own_words(renderer: Renderer, name: str) -> None:
    dialect, path, shape = BODIES[name]
    first, second = [filled(shape, f"Ticket {number}. {STABLE}") for number in ("123", "173")]
    found = compare_prompts(renderer, first, second, dialect)

    assert guess_family(first) == dialect
    assert found.path == found.other_path == path
    assert found.character == len("Ticket 1")
    assert found.token == found.shared_tokens
    assert found.cause == ("prompt_changes" if name == "completions" else "system_changes")
    assert "tokens that stay the same" in found.reason
    rest = found.second_tokens - found.shared_tokens
    assert 0.8 * rest < found.repeated_tokens <= rest


def test_reordered_tools_are_named(renderer: Renderer, native_tools: Renderer) -> None:
    """With tools before the system text and behind it."""
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": f"Say {name} to all of them"},
        }
        for name in ("hello", "good_night", "see_you")
    ]
    shape = {**BODIES["chat"][2], "tools": tools}
    reverse = {**shape, "tools": tools[::-1]}
    for one in (renderer, native_tools):
        found = compare_prompts(one, filled(shape, STABLE), filled(reverse, STABLE), "openai")
        assert found.cause == "tools_reordered"
        assert found.path == "tools[0].function"


def test_system_text_before_native_tools_is_named(native_tools: Renderer) -> None:
    """The template writes the system text first, though tools come first in the API's order."""
    tool = {"type": "function", "function": {"name": "hello", "description": f"{STABLE} Say hi."}}
    shape = {**BODIES["chat"][2], "tools": [tool]}
    first, second = [filled(shape, f"It is {number} o'clock.") for number in ("10", "11")]
    found = compare_prompts(native_tools, first, second, "openai")

    assert (found.cause, found.path) == ("system_changes", "messages[0].content")
    assert found.repeated_tokens > 150


def test_conversation_that_goes_on_shares_all(renderer: Renderer) -> None:
    turns = [{"role": "user", "content": STABLE}]
    more = [*turns, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "So?"}]
    first = json.dumps({"model": "m", "messages": turns}).encode()
    second = json.dumps({"model": "m", "messages": more}).encode()
    found = compare_prompts(renderer, first, second, "openai")

    assert found.cause == ""
    assert found.shared_tokens == found.first_tokens < found.second_tokens
    assert compare_prompts(renderer, first, first, "openai").shared_share == 1.0


def test_a_prompt_of_two_lines_is_compared_too(renderer: Renderer) -> None:
    """What is tried first: a time before one sentence."""
    bodies = [
        json.dumps(
            {
                "model": "m",
                "messages": [
                    {"role": "system", "content": f"It is 10:0{minute}. You answer questions."},
                    {"role": "user", "content": "How many days of leave are left?"},
                ],
            }
        ).encode()
        for minute in (1, 2)
    ]
    found = compare_prompts(renderer, bodies[0], bodies[1], "openai")

    assert (found.cause, found.path) == ("system_changes", "messages[0].content")
    assert found.repeated_tokens > 10
    assert "put what changes behind" in found.reason


def test_another_question_is_no_fault(renderer: Renderer) -> None:
    _, _, shape = BODIES["responses"]
    other = {**shape, "input": "Who pays for the train?"}
    found = compare_prompts(renderer, filled(shape, STABLE), filled(other, STABLE), "openai")

    assert (found.cause, found.reason) == ("messages", "the messages differ")
    assert (found.path, found.character, found.repeated_tokens) == ("input", 0, 0)


@pytest.mark.parametrize(("field", "cause"), [("model", "model"), ("cache_salt", "partition")])
def test_requests_of_other_scopes_share_nothing(renderer: Renderer, field: str, cause: str) -> None:
    _, _, shape = BODIES["chat"]
    first, second = [filled(shape, STABLE, **{field: value}) for value in ("a", "b")]
    found = compare_prompts(renderer, first, second, "openai")

    assert (found.cause, found.shared_tokens) == (cause, 0)


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{",
        b'{"model":"m"}',
        b'{"model":"m","input":"x","previous_response_id":"resp_1"}',
        b'{"model":"m","prompt":["a","b"]}',
    ],
)
def test_unusable_bodies_are_refused(renderer: Renderer, body: bytes) -> None:
    with pytest.raises(Refusal):
        compare_prompts(renderer, body, body, "openai")
    if not body.startswith(b'{"'):
        with pytest.raises(Refusal):
            guess_family(body)
