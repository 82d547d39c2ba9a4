"""Grammars of harmony: budgets, formats and forced calls, tried on the engine's own matcher."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from engine.grammar.grammar import GrammarLimits, Vocabulary, compile_grammar
from gateway.dialects.canonical import OutputFormat, Prompt, Tool, ToolChoice
from gateway.prompt import Renderer
from gateway.structured_output.harmony_grammar import harmony_grammar
from gateway.structured_output.thinking import HARMONY_MARKERS
from tests.tables import each_row
from tests.thinking_models import harmony_model
from tests.tiny_tokenizer import byte_tokens

SCHEMA = (
    '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],'
    '"additionalProperties":false}'
)
FORMAT = OutputFormat("json_schema", SCHEMA, "f")
GET, PUT = Tool("get", "", SCHEMA, "tools[0]"), Tool("put", "", SCHEMA, "tools[1]", strict=True)
REQUIRED = ToolChoice("required")
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.get <|constrain|>json<|message|>"

Allows = Callable[..., bool]


@pytest.fixture(scope="session", params=["tokens", "text"])
def allows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Allows:
    """Return whether a text may be a whole answer, its markers special tokens or text."""
    card = harmony_model(tmp_path_factory.mktemp("harmony"))
    renderer = Renderer(card)
    vocabulary = Vocabulary.load(card.tokenizer_path, card.config.vocab, [0], GrammarLimits())
    are_tokens = request.param == "tokens"
    ids = {text: renderer.tokenizer.encode(text, specials=True)[0] for text in HARMONY_MARKERS}

    def allowed(text: str, budget: int | None = None, **prompt: Any) -> bool:
        grammar = harmony_grammar(Prompt(**prompt), ids if are_tokens else {}, budget)
        assert grammar is not None
        matcher = compile_grammar(grammar, vocabulary).matcher.fork()
        pieces = re.split(r"(<\|\w+\|>)", text)
        tokens = [
            token
            for piece in pieces
            for token in ([ids[piece]] if are_tokens and piece in ids else byte_tokens(piece))
        ]
        return all(map(matcher.consume, tokens)) and matcher.is_accepting

    return allowed


def test_no_grammar_without_a_format_a_call_or_a_budget() -> None:
    """Any text is allowed then, in any channel."""
    assert harmony_grammar(Prompt(), {}, None) is None
    assert harmony_grammar(Prompt(tools=(GET,)), {}, None) is None
    assert harmony_grammar(Prompt(tools=(PUT,), tool_choice=ToolChoice("none")), {}, None) is None


@each_row(
    ("text", "is_allowed"),
    [
        (FINAL + '{"a":1}', True),
        (THOUGHT + FINAL + '{"a":1}', True),
        (THOUGHT + '<|channel|>final <|constrain|>json<|message|>{"a":1}', True),
        (THOUGHT + FINAL + '{"b":1}', False),
        (THOUGHT + FINAL + "yes", False),
        (THOUGHT + THOUGHT + FINAL + '{"a":1}', False),
        ('{"a":1}', False),
    ],
)
def test_format_holds_the_final_message(allows: Allows, text: str, *, is_allowed: bool) -> None:
    """The thought before it is free."""
    assert allows(text, output_format=FORMAT) is is_allowed


@each_row(
    ("text", "is_allowed"),
    [
        (CALL + '{"a":1}', True),
        (THOUGHT + CALL + '{"a":1}', True),
        (THOUGHT + '<|channel|>commentary to=functions.put<|message|>{"a":1}', True),
        (THOUGHT + ' to=functions.put<|channel|>commentary json<|message|>{"a":1}', True),
        (THOUGHT + CALL + '{"b":1}', False),
        (THOUGHT + CALL.replace("get", "cut") + '{"a":1}', False),
        (THOUGHT + FINAL + "no", False),
    ],
)
def test_forced_call_is_a_message_to_a_function(
    allows: Allows, text: str, *, is_allowed: bool
) -> None:
    """To one of the tools, with arguments that satisfy its schema."""
    assert allows(text, tools=(GET, PUT), tool_choice=REQUIRED) is is_allowed


def test_named_tool_is_the_only_one(allows: Allows) -> None:
    """A choice by name forces that tool."""
    choice = ToolChoice("required", ("put",))

    assert allows(CALL.replace("get", "put") + '{"a":1}', tools=(GET, PUT), tool_choice=choice)
    assert not allows(CALL + '{"a":1}', tools=(GET, PUT), tool_choice=choice)


@each_row(
    ("text", "is_allowed"),
    [
        (THOUGHT + FINAL + "No call.", True),
        (THOUGHT + CALL.replace("get", "put") + '{"a":1}', True),
        (THOUGHT + CALL.replace("get", "put") + '{"b":1}', False),
        (THOUGHT + CALL + '{"b":1}', True),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL + "{}",
            True,
        ),
    ],
)
def test_strict_tool_holds_only_its_own_arguments(
    allows: Allows, text: str, *, is_allowed: bool
) -> None:
    """Text and calls of other tools stay free."""
    assert allows(text, tools=(GET, PUT)) is is_allowed


@each_row(("budget", "is_allowed"), [(0, False), (1, False), (2, True), (9, True)])
def test_budget_bounds_the_thought(allows: Allows, budget: int, *, is_allowed: bool) -> None:
    """The thought of two tokens fits a budget of two; a budget of 0 allows none."""
    assert allows(THOUGHT + FINAL + "Yes.", budget) is is_allowed
    assert allows(FINAL + "Yes.", budget)
