"""Thinking: formats found in templates, outputs split at any cut, grammars behind a thought."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from engine.api import Grammar
from gateway.dialects.canonical import Thinking
from gateway.structured_output.grammars import behind_thought
from gateway.structured_output.thinking import (
    NO_THINKING,
    HarmonySplitter,
    ThinkingFormat,
    ThinkingSplitter,
    detect_thinking,
)
from gateway.structured_output.tool_call_parser import Cut, ParsedCall, ToolCallParser
from gateway.structured_output.tool_styles import HERMES
from tests.tables import each_row
from tests.tiny_tokenizer import tokenizer_document

TAGS = ThinkingFormat("tags", "<think>", "</think>", switch="enable_thinking")
SCHEMA = (
    '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],'
    '"additionalProperties":false}'
)


@each_row(
    ("source", "variables", "expected"),
    [
        ("{{ messages }}", frozenset(), NO_THINKING),
        (
            "{% if enable_thinking %}<think>{% endif %}{{ message.reasoning_content }}",
            frozenset({"enable_thinking"}),
            ThinkingFormat(
                "tags", "<think>", "</think>", "enable_thinking", history="reasoning_content"
            ),
        ),
        (
            "content.split('</think>')[-1]",
            frozenset({"thinking"}),
            ThinkingFormat("tags", "<think>", "</think>", "thinking"),
        ),
        (
            "<|channel|>analysis<|message|>{{ message.thinking }}",
            frozenset({"reasoning_effort"}),
            ThinkingFormat("harmony", reads_effort=True, history="thinking"),
        ),
    ],
)
def test_format_is_found_in_the_template(
    source: str, variables: frozenset[str], expected: ThinkingFormat
) -> None:
    """As tools are: no setting names it."""
    assert detect_thinking(source, variables) == expected


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<seed:think>", "</seed:think>"),
        ("<mm:think>", "</mm:think>"),
        ("[THINK]", "[/THINK]"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
    ],
)
def test_other_tags_are_found_and_split(opening: str, closing: str) -> None:
    """In the answer they would stand as text. One tag in the template is enough."""
    style = ThinkingFormat("tags", opening, closing)
    splitter = ThinkingSplitter(style, is_open=False)

    for source in (f"{{{{ '{opening}' }}}}", f"{{{{ text.split('{closing}') }}}}"):
        assert detect_thinking(source, frozenset()) == style
    assert split_whole(splitter, f"{opening}hm{closing}\nYes", [3]) == ("hm", "Yes")


@each_row(
    ("wanted", "variables", "budget"),
    [
        (Thinking(), (), None),
        (Thinking(is_on=False), (("enable_thinking", False),), None),
        (Thinking(effort="none"), (("enable_thinking", False),), None),
        (Thinking(effort="high"), (("enable_thinking", True),), None),
        (Thinking(effort="low"), (("enable_thinking", True),), 1024),
        (Thinking(budget_tokens=0), (("enable_thinking", False),), 0),
        (Thinking(budget_tokens=99, effort="low"), (("enable_thinking", True),), 99),
    ],
)
def test_request_sets_the_templates_switch_and_a_budget(
    wanted: Thinking, variables: tuple[tuple[str, object], ...], budget: int | None
) -> None:
    """A request without a word about thinking changes nothing."""
    assert TAGS.variables(wanted) == variables
    assert TAGS.budget(wanted) == budget


def split_whole(
    splitter: ThinkingSplitter | HarmonySplitter, text: str, cuts: list[int]
) -> tuple[str, str]:
    """Return thought and text of an output that comes in pieces."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    found = [splitter.push(text[a:b]) for a, b in pairwise(places)]
    found.append(splitter.finish())
    return "".join(f.thought for f in found), "".join(f.text for f in found)


@pytest.mark.parametrize(
    ("text", "is_open", "thought", "answer"),
    [
        ("<think>\nhm, well\n</think>\n\nYes.", False, "hm, well", "Yes."),
        ("hm, well\n</think>\n\nYes.", True, "hm, well", "Yes."),
        (" \n<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("Yes, <think> is a tag.", False, "", "Yes, <think> is a tag."),
        ("<thin air", False, "", "<thin air"),
        ("cut off <", True, "cut off <", ""),
        ("a </thin b </think>c", True, "a </thin b", "c"),
        ("<think></think>", False, "", ""),
        ("", True, "", ""),
    ],
)
@given(cuts=st.lists(st.integers(0, 99), max_size=8))
def test_output_is_split_the_same_at_every_cut(
    text: str, is_open: bool, thought: str, answer: str, cuts: list[int]
) -> None:
    """Tokens cut markers anywhere."""
    splitter = ThinkingSplitter(TAGS, is_open=is_open)

    assert split_whole(splitter, text, cuts) == (thought, answer)


@given(
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "<", "/", " ", "\n", "a"]), max_size=9),
    cuts=st.lists(st.integers(0, 99), max_size=8),
    is_open=st.booleans(),
)
def test_split_does_not_depend_on_the_pieces(
    pieces: list[str], cuts: list[int], is_open: bool
) -> None:
    """The property over all texts of the markers' characters."""
    text = "".join(pieces)
    cut, whole = (ThinkingSplitter(TAGS, is_open=is_open) for _ in range(2))

    assert split_whole(cut, text, cuts) == split_whole(whole, text, [])


def accepts(grammar: Grammar, text: str) -> bool:
    """Return whether the grammar allows a text as a complete answer."""
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(grammar.text))
    assert not matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    return matcher.consume_tokens(tokens) and matcher.is_accepting()


TOKENIZER = LLTokenizer(json.dumps(tokenizer_document()))


@each_row(
    ("text", "open_ok", "possible_ok"),
    [
        ('hm</think>{"a":1}', True, False),
        ('<think>hm {"b": 2}</think>\n\n{"a":1}', True, True),
        ('{"a":1}', False, True),
        ('hm</think>{"b":1}', False, False),
        ("hm</think>no", False, False),
        ('hm</think>\u1680{"a":1}', False, False),
    ],
)
def test_format_begins_behind_the_thought(text: str, open_ok: bool, possible_ok: bool) -> None:
    """A thought is free; what follows it must satisfy the schema."""
    schema = Grammar("json_schema", SCHEMA)
    opened = behind_thought(schema, TAGS, "open", {}, Thinking())
    possible = behind_thought(schema, TAGS, "possible", {}, Thinking())

    assert opened is not None
    assert possible is not None
    assert accepts(opened, text) is open_ok
    assert accepts(possible, text) is possible_ok


def test_budget_forces_the_thoughts_end() -> None:
    """A budget is a grammar: after so many tokens only the closing tag is allowed."""
    grammar = behind_thought(None, TAGS, "open", {}, Thinking(budget_tokens=12))

    assert grammar is not None  # in the tiny vocabulary, the closing tag alone is 8 tokens
    assert accepts(grammar, "abcdefghijkl</think>the answer")
    assert accepts(grammar, "abc</think>the answer, which is longer than twelve tokens")
    assert not accepts(grammar, "abcdefghijklm</think>the answer")


@pytest.mark.parametrize(
    "inner",
    [Grammar("regex", "x/y|z"), Grammar("lark", 'start: word\nword: "x/y" | "z"')],
    ids=lambda grammar: grammar.kind,
)
def test_other_grammars_begin_behind_the_thought(inner: Grammar) -> None:
    """Names of an inner grammar's rules do not meet those around it."""
    grammar = behind_thought(inner, TAGS, "open", {}, Thinking())

    assert grammar is not None
    assert accepts(grammar, "hm</think>x/y")
    assert not accepts(grammar, "hm</think>w")


def test_grammar_of_a_model_that_does_not_think_is_unchanged() -> None:
    """Also where the template closed the thought before the answer."""
    schema = Grammar("json_schema", SCHEMA)
    assert behind_thought(schema, NO_THINKING, "", {}, Thinking(budget_tokens=5)) is schema
    assert behind_thought(None, TAGS, "", {}, Thinking(budget_tokens=5)) is None
    assert behind_thought(None, TAGS, "open", {}, Thinking()) is None


def harmony() -> HarmonySplitter:
    """Return a splitter whose calls are read in the style of Hermes."""
    return HarmonySplitter(HERMES.opening, HERMES.closing, HERMES.arguments)


HARMONY = (
    "<|channel|>analysis<|message|>let me see<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
    '<|message|>{"city": "Bern"}<|call|>'
)


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        (
            "<|channel|>analysis<|message|>hm<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Yes.",
            "hm",
            "Yes.",
        ),
        (
            HARMONY,
            "let me see",
            'I look.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}'
            "\n</tool_call>",
        ),
        (
            HARMONY.removesuffix("<|call|>"),  # the stop token is silent
            "let me see",
            'I look.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}'
            "\n</tool_call>",
        ),
        ("<|start|>assistant<|channel|>final<|message|>a < b <| c", "", "a < b <| c"),
        (
            " to=functions.get_weather<|channel|>commentary json<|message|>{}<|call|>",
            "",
            '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>',
        ),
        ("Yes, without a channel.", "", "Yes, without a channel."),
        ("<|channel|>analysis<|message|>cut off <|e", "cut off <|e", ""),
        ("<|channel|>ana", "", ""),
    ],
)
@given(cuts=st.lists(st.integers(0, 299), max_size=8))
def test_harmony_is_split_the_same_at_every_cut(
    text: str, thought: str, answer: str, cuts: list[int]
) -> None:
    """Analysis is thought, the rest text; a call becomes text that the parser of calls reads."""
    assert split_whole(harmony(), text, cuts) == (thought, answer)


def test_call_in_harmony_is_read_by_the_parser_of_calls() -> None:
    """Also while the model still writes its arguments."""
    splitter = harmony()
    parser = ToolCallParser(HERMES, ["get_weather"], lambda: "call_1")
    pieces = [piece for at in HARMONY for piece in parser.push(splitter.push(at).text)]
    pieces += parser.push(splitter.finish().text) + parser.finish()
    calls = [piece for piece in pieces if isinstance(piece, ParsedCall)]

    assert calls[0].name == "get_weather"
    assert json.loads("".join(call.arguments for call in calls)) == {"city": "Bern"}
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == "I look."


@pytest.mark.parametrize("cut", ["", "limit", "stop_string"])
def test_call_in_harmony_that_is_cut_off_has_no_complete_arguments(cut: Cut) -> None:
    """A client would run it with half of its arguments; `<|call|>` itself is silent."""
    splitter = harmony()
    parser = ToolCallParser(HERMES, ["move"], lambda: "call_1")
    head = "<|channel|>commentary to=functions.move<|message|>"
    pieces = parser.push(splitter.push(head + '{"from": "a"').text)
    if not cut:
        pieces += parser.push(splitter.push(', "to": "b"}').text)
    pieces += parser.push(splitter.finish(cut).text) + parser.finish()
    arguments = "".join(piece.arguments for piece in pieces if isinstance(piece, ParsedCall))

    assert arguments == ('{"from": "a"' if cut else '{"from": "a", "to": "b"}')


@pytest.mark.parametrize("is_harmony", [False, True])
def test_limit_leaves_no_part_of_a_marker(*, is_harmony: bool) -> None:
    """Neither of the tags around a thought, nor of the messages of harmony, at any length."""
    text = "<think>hm</think>Yes" if not is_harmony else "".join(HARMONY)
    for end in range(len(text) + 1):
        splitter = harmony() if is_harmony else ThinkingSplitter(TAGS, is_open=False)
        split = splitter.push(text[:end])
        last = splitter.finish("limit")
        shown = split.thought + last.thought + split.text + last.text

        assert shown.count("<") == shown.count("<tool_call>") + shown.count("</tool_call>")


def test_stop_string_leaves_the_bracket_before_it() -> None:
    """It was no part of a tag: the stop string followed."""
    splitter = ThinkingSplitter(TAGS, is_open=True)

    assert splitter.push("a ").thought == "a"
    assert splitter.push("<").thought == ""
    assert splitter.finish("stop_string").thought == " <"
