"""A choice's text becomes deltas: calls separated, formats checked, logprobs kept with text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal, cast

import pytest

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
from gateway.structured_output.thinking import ThinkingFormat
from gateway.structured_output.tool_call_parser import Cut
from gateway.structured_output.tool_styles import HERMES
from tests.tables import each_row

CALL = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = (Tool("get"),)


def check(renderer: Renderer, text: str, prompt: Prompt) -> tuple[list[Delta], OutputParser]:
    """Return all deltas of a text pushed at once."""
    output = OutputParser(3, prompt, renderer, lambda: "call_1")
    return output.push(Text(3, text)) + output.finish(), output


def test_separates_call_from_text(renderer: Renderer) -> None:
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
def test_call_stays_text_if_not_allowed(renderer: Renderer, prompt: Prompt) -> None:
    """No tools, choice "none", or a tool that was not offered."""
    deltas, output = check(renderer, CALL, prompt)

    assert "".join(delta.text for delta in deltas if isinstance(delta, Text)) == CALL
    assert not output.has_calls


@pytest.mark.parametrize("cut", ["limit", "stop_string"])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_call_that_is_cut_off_has_neither_text_nor_logprobs(
    renderer: Renderer, mode: Literal["auto", "required"], cut: Cut
) -> None:
    """Markup would be shown as the answer. Logprobs list the tokens of the shown text."""
    prompt = Prompt(tools=TOOLS, tool_choice=ToolChoice(mode))
    tokens = tuple(TokenText(byte, bytes([byte]), -1.0) for byte in b"<tool_call>\n")
    output = OutputParser(0, prompt, renderer, lambda: "call_1")

    assert output.push(Text(0, "<tool_call>\n", tokens)) + output.finish(cut) == []


@pytest.mark.parametrize(("mode", "shown"), [("auto", "<tool"), ("required", "")])
def test_forced_call_has_no_text_before_a_stop_string(
    renderer: Renderer, mode: Literal["auto", "required"], shown: str
) -> None:
    """A stop string that is part of the marker ends such an answer inside it."""
    prompt = Prompt(tools=TOOLS, tool_choice=ToolChoice(mode))
    output = OutputParser(0, prompt, renderer, lambda: "call_1")
    deltas = output.push(Text(0, "<tool")) + output.finish("stop_string")

    assert "".join(delta.text for delta in deltas if isinstance(delta, Text)) == shown


def test_is_full_after_one_call_if_not_parallel(renderer: Renderer) -> None:
    choice = ToolChoice("auto", parallel=False)
    deltas, output = check(renderer, f"{CALL}\n{CALL}", Prompt(tools=TOOLS, tool_choice=choice))

    assert output.is_full
    assert {delta.call for delta in deltas if isinstance(delta, CallText)} == {0}


def test_logprobs_stay_with_their_text(renderer: Renderer) -> None:
    """Tokens of a call have none; held text keeps its tokens."""

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
def test_checks_format_of_finished_text(
    renderer: Renderer, text: str, prompt: Prompt, is_as_asked: bool
) -> None:
    """Not of calls."""
    assert check(renderer, text, prompt)[1].satisfies_format() is is_as_asked


def test_call_ids_are_deterministic_and_unique() -> None:
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


TAGS = ThinkingFormat("tags", "<think>", "</think>")
HARMONY = ThinkingFormat("harmony")


@each_row(
    ("thinking", "texts", "reported"),
    [
        (TAGS, ["<", "b>", "!"], ["<", "b>", "!"]),
        (TAGS, ["<think>", "hm", "</think>", "\n", "Yes"], ["Yes"]),
        (TAGS, ["Yes", "", "!"], ["Yes", "", "!"]),
        (TAGS, ["<"], ["<"]),
        (HARMONY, ["<", "|b", "!"], ["<", "|b", "!"]),
        (HARMONY, ["<|"], ["<|"]),
        (HARMONY, ["<|channel|>", "final", "<|message|>", "Yes", "!"], ["Yes", "!"]),
        (
            HARMONY,
            [
                *("<|channel|>", "analysis", "<|message|>", "hm", "<|end|>", "<|start|>"),
                *("assistant", "<|channel|>", "final", "<|message|>", "Yes"),
            ],
            ["Yes"],
        ),
        (HARMONY, ["Yes", "", "!"], ["Yes", "", "!"]),
    ],
)
def test_logprobs_follow_the_text_of_an_answer_that_may_think(
    thinking: ThinkingFormat, texts: list[str], reported: list[str]
) -> None:
    """One token per text. Also while it is not decided whether the text is a thought or a header:
    tokens of text are reported, those of thoughts and headers are not."""
    renderer = SimpleNamespace(thinking=thinking, tool_style=HERMES)
    parser = OutputParser(0, Prompt(), cast("Renderer", renderer), lambda: "", "possible")
    found = [
        delta
        for number, text in enumerate(texts)
        for delta in parser.push(Text(0, text, (TokenText(number, text.encode(), -1.0),)))
    ]
    found += parser.finish()
    tokens = [token for delta in found if isinstance(delta, Text) for token in delta.tokens]

    assert [token.data.decode() for token in tokens] == reported
