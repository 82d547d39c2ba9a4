"""A choice's text on its way to deltas: calls taken out, formats looked at, logprobs in place."""

from __future__ import annotations

import pytest

from engine.model_store import ModelCard
from gateway.dialects.canonical import (
    CallText,
    Delta,
    OutputFormat,
    Prompt,
    Text,
    TokenText,
    Tool,
    ToolChoice,
)
from gateway.generation.choice import OutputParser, call_id_generator
from gateway.prompt import Renderer

CALL = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = (Tool("get"),)


@pytest.fixture(scope="session")
def renderer(card: ModelCard) -> Renderer:
    """The tiny model's: its template knows no tools."""
    return Renderer(card)


def check(renderer: Renderer, text: str, prompt: Prompt) -> tuple[list[Delta], OutputParser]:
    """All deltas of a text that comes in one piece."""
    output = OutputParser(3, prompt, renderer, lambda: "call_1")
    return output.push(Text(3, text)) + output.finish(), output


def test_a_call_is_no_text(renderer: Renderer) -> None:
    """And text before it is."""
    deltas, output = check(renderer, f"Hm. {CALL}", Prompt(tools=TOOLS))

    assert deltas == [
        Text(3, "Hm. "),
        CallText(3, 0, "call_1", "get"),
        CallText(3, 0, arguments='{"a": 1}'),
    ]
    assert output.has_calls


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt(),
        Prompt(tools=TOOLS, tool_choice=ToolChoice("none")),
        Prompt(tools=(*TOOLS, Tool("put")), tool_choice=ToolChoice("auto", ("put",))),
    ],
)
def test_where_no_call_may_be_it_is_text(renderer: Renderer, prompt: Prompt) -> None:
    """No tools, none wanted, or not this one."""
    deltas, output = check(renderer, CALL, prompt)

    assert "".join(delta.text for delta in deltas if isinstance(delta, Text)) == CALL
    assert not output.has_calls


def test_one_call_is_enough_where_calls_are_not_parallel(renderer: Renderer) -> None:
    """What follows is of no use."""
    choice = ToolChoice("auto", parallel=False)
    deltas, output = check(renderer, f"{CALL}\n{CALL}", Prompt(tools=TOOLS, tool_choice=choice))

    assert output.is_full
    assert {delta.call for delta in deltas if isinstance(delta, CallText)} == {0}


def test_logprobs_go_with_their_text(renderer: Renderer) -> None:
    """Tokens that spelt a call go nowhere; held text takes its tokens along."""

    def token(text: str) -> Text:
        return Text(0, text, (TokenText(len(text), text.encode(), -1.0),))

    output = OutputParser(0, Prompt(tools=TOOLS), renderer, lambda: "id")
    deltas = [d for text in ("Hm", " <to", "ast>", CALL, " so") for d in output.push(token(text))]
    deltas += output.finish()
    kept = [t.data for d in deltas if isinstance(d, Text) for t in d.tokens]

    assert kept == [b"Hm", b" <to", b"ast>", b" so"]


@pytest.mark.parametrize(
    ("text", "prompt", "is_as_asked"),
    [
        ('{"a": 1}', Prompt(output_format=OutputFormat("json_object")), True),
        ("a: 1", Prompt(output_format=OutputFormat("json_object")), False),
        (CALL, Prompt(output_format=OutputFormat("json_object"), tools=TOOLS), True),
        ("a: 1", Prompt(output_format=OutputFormat("json_object"), tools=TOOLS), False),
        ("a: 1", Prompt(), True),
    ],
)
def test_a_finished_text_is_looked_at(
    renderer: Renderer, text: str, prompt: Prompt, is_as_asked: bool
) -> None:
    """A call is not held to the format of text."""
    assert check(renderer, text, prompt)[1].satisfies_format() is is_as_asked


def test_ids_of_calls_are_the_requests_own() -> None:
    """The same for the same call, different for every other, and of the usual form."""
    ids = {
        (request, index, number): call_id
        for request in ("a", "b")
        for index in (0, 1)
        for make in [call_id_generator(request, index)]
        for number, call_id in enumerate((make(), make()))
    }

    assert len(set(ids.values())) == len(ids) == 8
    assert all(len(i) == 29 and i.startswith("call_") for i in ids.values())
    assert call_id_generator("a", 0)() == ids["a", 0, 0]
