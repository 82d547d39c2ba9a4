"""Every parser that meets client text: input doubled, time less than tripled.

Each case repeats a hostile piece and doubles the input `DOUBLINGS` times, so that a single step (a
bound that is passed, a cache that is outgrown) does not look like growth: a linear parser then
takes 16 times the time, a quadratic one 256 times. The smaller input takes at least `FLOOR_S`; the
best of several runs counts.
"""

from __future__ import annotations

import gc
import itertools
import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dialects.canonical import OutputFormat, Prompt, Role, Segment, Tool, ToolCall
from gateway.errors import Refusal
from gateway.prompt import Detokenizer, Renderer
from gateway.structured_output.gbnf import GbnfError, is_gbnf, translate_gbnf
from gateway.structured_output.grammars import build_grammar
from gateway.structured_output.json_text import (
    count_values,
    nesting_depth,
    parse_arguments,
    parse_schema,
)
from gateway.structured_output.output_check import satisfies
from gateway.structured_output.schemas.patterns import (
    first_unsupported,
    translate_pattern,
    translate_schema,
)
from gateway.structured_output.thinking import (
    HarmonySplitter,
    ThinkingFormat,
    ThinkingSplitter,
)
from gateway.structured_output.tool_call_parser import ToolCallParser
from gateway.structured_output.tool_styles import HERMES, LLAMA3, MISTRAL, ToolStyle
from tests.examples import examples
from tests.models import prepared
from tests.unit.gateway.dialects.requests import ENDPOINTS, HI

TAGS = ThinkingFormat("tags", "<think>", "</think>")
FLOOR_S = 0.002
DOUBLINGS = 4
GROWTH_MAX = 3.0**DOUBLINGS
ATTEMPTS = 6
PIECES_MAX = 2**18

T = TypeVar("T")


def seconds(run: Callable[[T], object], given_: T) -> float:
    """Return this thread's processor time of one run."""
    gc.disable()  # the collector walks the test's own inputs
    began_s = time.thread_time()
    with suppress(Refusal):  # for its size, after as much work as that takes
        run(given_)
    spent_s = time.thread_time() - began_s
    gc.enable()
    return spent_s


def growth(
    run: Callable[[T], object],
    make: Callable[[int], T],
    start: int = 64,
    attempts: int = ATTEMPTS,
) -> float:
    """Return how many times as long `DOUBLINGS` doublings take: the least of so many attempts.

    Input is first doubled until it takes `FLOOR_S`; 0 if it never does.
    """
    count = start
    small_s = seconds(run, make(count))
    while small_s < FLOOR_S:
        count *= 2
        if count > PIECES_MAX:
            return 0.0
        small_s = seconds(run, make(count))
    small, large = make(count), make(count * 2**DOUBLINGS)
    found: list[float] = []
    while len(found) < attempts and min(found, default=GROWTH_MAX) >= GROWTH_MAX:
        found.append(seconds(run, large) / max(seconds(run, small), FLOOR_S))
    return min(found)


def repeated(piece: str, before: str = "", after: str = "") -> Callable[[int], str]:
    return lambda count: before + piece * count + after


def test_quadratic_work_is_found() -> None:
    """The measurement itself is right: the expression that the scanner of patterns replaced."""
    former = re.compile(r"\[(?:\\.|[^\]\\])*\]")

    found = growth(lambda text: former.findall(text), repeated("["), attempts=1)

    assert found > GROWTH_MAX


def parts_of(ids: list[str], kind: str) -> list[dict[str, Any]]:
    """Return a part of Gemini's for each id."""
    return [{kind: {"name": "f", "id": one}} for one in ids]


HISTORIES: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "chat": lambda ids: {
        "messages": [HI]
        + [
            {"role": "assistant", "content": [{"type": "text", "text": one, "new": 1}], "added": {}}
            for one in ids
        ]
    },
    "responses": lambda ids: {
        "input": [
            {"type": "function_call", "call_id": one, "name": "f", "arguments": "{}", "new": 1}
            for one in ids[::2]
        ]
        + [
            {"type": "function_call_output", "call_id": one, "output": "x"}
            for one in reversed(ids[::2])
        ]
    },
    "messages": lambda ids: {
        "messages": [
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": one, "name": "f", "input": {}, "new": 1}
                    for one in ids
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": one} for one in reversed(ids)],
            },
        ]
    },
    "gemini": lambda ids: {
        "contents": [
            {"role": "model", "parts": parts_of(ids, "functionCall")},
            {"role": "user", "parts": parts_of(ids[::-1], "functionResponse")},
        ]
    },
}


@pytest.mark.parametrize("name", HISTORIES)
def test_histories_are_parsed_in_linear_time(name: str) -> None:
    """Answers with fields that a client added; calls whose results come in the reverse order."""
    endpoint = ENDPOINTS[name]

    def make(count: int) -> bytes:
        ids = [f"call_{number}" for number in range(count)]
        return json.dumps({**endpoint.smallest, **HISTORIES[name](ids)}).encode()

    assert growth(endpoint.parse_body, make, start=512) < GROWTH_MAX


PATTERN_PIECES = (
    *("[", "[^", "\\", "[\\", "(?", "(?<", "{", "{1", "{1,", "{1,1", "a{1", "+", "*+", "\\k<"),
    *("[a-", "[[", "&&", "[&&", "]", "[]", "\\0", "(", "{,"),
)


@pytest.mark.parametrize("piece", PATTERN_PIECES)
def test_patterns_are_translated_in_linear_time(piece: str) -> None:
    assert growth(lambda text: translate_pattern(text), repeated(piece)) < GROWTH_MAX
    assert growth(first_unsupported, repeated(piece)) < GROWTH_MAX


@settings(max_examples=examples(15))
@given(st.text(st.sampled_from("[]\\{},(?<=!>*+1a^-&k"), min_size=1, max_size=5))
def test_patterns_of_any_piece(piece: str) -> None:
    assert growth(lambda text: translate_pattern(text), repeated(piece)) < GROWTH_MAX


GRAMMARS: dict[str, Callable[[int], str]] = {
    **{
        piece: repeated(piece, 'root ::= "a" ')
        for piece in (
            *("(", "|", '"', '"a"', "[", "[a-z]", "#", "\n", " ", '"a"*', '"a"{1,2}', "root "),
            *("\\", "[\\", '"\\', "::=", "x ::= ", "\n \t"),
        )
    },
    "rules": lambda count: "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(count)),
    "users": lambda count: 'root ::= "a"\n' + "".join(f"r{n} ::= root\n" for n in range(count)),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_are_translated_in_linear_time(name: str) -> None:
    def translate(text: str) -> None:
        with suppress(GbnfError):
            translate_gbnf(text)

    assert growth(is_gbnf, GRAMMARS[name]) < GROWTH_MAX
    assert growth(translate, GRAMMARS[name]) < GROWTH_MAX


JSON_TEXTS = {
    "open strings": repeated('\\"', '"'),
    "quotes": repeated('"'),
    "backslashes": repeated("\\"),
    "open lists": repeated("["),
    "closed lists": repeated("]"),
    "lists": repeated("[],", "[", "1]"),
    "objects": repeated('{"a":', "", ""),
    "escaped": repeated('"\\\\\\"",', "[", "1]"),
    "members": repeated('"a":1,', "{", '"b":1}'),
    "numbers": repeated("9"),
    "fractions": repeated("1.", "", ""),
}


@pytest.mark.parametrize("name", JSON_TEXTS)
def test_json_texts_are_read_in_linear_time(name: str) -> None:
    make = JSON_TEXTS[name]
    assert growth(nesting_depth, make) < GROWTH_MAX
    assert growth(lambda text: count_values(text.encode(), 100), make) < GROWTH_MAX
    assert growth(parse_arguments, make) < GROWTH_MAX
    assert growth(lambda text: parse_schema(text, "schema"), make) < GROWTH_MAX


def members(value: object) -> Callable[[int], object]:
    return lambda count: {"properties": {f"p{n}": value for n in range(count)}}


SCHEMAS: dict[str, Callable[[int], object]] = {
    "members": members({"type": "string"}),
    "patterns": members({"pattern": "a"}),
    "named patterns": lambda count: {"patternProperties": {f"p{n}": {} for n in range(count)}},
    "lists": lambda count: {"anyOf": [{"items": {}}] * count},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_translated_in_linear_time(name: str) -> None:
    make = SCHEMAS[name]
    assert growth(lambda schema: translate_schema(schema, strict=False), make) < GROWTH_MAX

    def check(schema: str) -> bool:
        return satisfies('{"p1": [1, "a"]}', OutputFormat("json_schema", schema))

    assert growth(check, lambda count: json.dumps(make(count))) < GROWTH_MAX


def test_tools_become_a_grammar_in_linear_time() -> None:
    def make(count: int) -> Prompt:
        tools = tuple(Tool(f"f{n}", "", '{"type":"object"}', strict=True) for n in range(count))
        return Prompt(tools=tools)

    assert growth(lambda prompt: build_grammar(prompt, HERMES), make) < GROWTH_MAX


CALL = '{"name":"f","%s":{}}'
ANSWERS: dict[str, Callable[[ToolStyle], str]] = {
    "spaces": lambda style: style.opening.strip() + "{} ",
    "openings": lambda style: style.opening.strip(),
    "calls": lambda style: style.opening + CALL % style.arguments + style.closing,
    "broken calls": lambda style: style.opening + "{x",
    "unknown calls": lambda style: style.opening + '{"name":"g"}' + style.closing,
    "beginnings": lambda style: style.opening.strip()[:-1],
}
AFTER_OPENING = (" ", '{"id":"', "[", '{"name":"f","arguments":{"a":"b', ",")


def parse_answer(style: ToolStyle, chars: int) -> Callable[[str], None]:
    """Return a parser that is given so many characters at a time."""

    def run(text: str) -> None:
        number = itertools.count()
        parser = ToolCallParser(style, ["f"], lambda: str(next(number)))
        for at in range(0, len(text), chars):
            parser.push(text[at : at + chars])
        parser.finish()

    return run


@pytest.mark.parametrize("chars", [3, 10**9])
@pytest.mark.parametrize("style", [HERMES, LLAMA3, MISTRAL], ids=lambda style: style.family)
def test_tool_calls_are_parsed_in_linear_time(style: ToolStyle, chars: int) -> None:
    """Token by token, and as one text."""
    run = parse_answer(style, chars)
    for make in ANSWERS.values():
        assert growth(run, repeated(make(style))) < GROWTH_MAX
    for piece in AFTER_OPENING:
        assert growth(run, repeated(piece, style.opening)) < GROWTH_MAX


SPLITTERS: dict[str, Callable[[], ThinkingSplitter | HarmonySplitter]] = {
    "begin": lambda: ThinkingSplitter(TAGS, is_open=False),
    "thought": lambda: ThinkingSplitter(TAGS, is_open=True),
    "harmony": lambda: HarmonySplitter(HERMES.opening, HERMES.closing, HERMES.arguments),
}


@pytest.mark.parametrize("name", SPLITTERS)
@pytest.mark.parametrize("before", ["", "<|channel|>"])
@pytest.mark.parametrize("piece", [" \n", "</thin", "a ", "<|mess"])
def test_thoughts_are_split_in_linear_time(name: str, before: str, piece: str) -> None:
    """Token by token: a model may write white space, or a header, without end."""

    def run(count: int) -> None:
        splitter = SPLITTERS[name]()
        splitter.push(before)
        for _ in range(count):
            splitter.push(piece)
        splitter.finish("limit")

    assert growth(run, lambda count: count, start=1_024) < GROWTH_MAX


@pytest.mark.parametrize(
    ("piece", "stop"),
    [("a", "a" * 999 + "b"), ("a" * 998 + "c", "a" * 999 + "b"), ("ab", "ab" * 499 + "c")],
)
def test_stop_strings_are_found_in_linear_time(piece: str, stop: str) -> None:
    """A stop string has at most 1,000 characters, so what is held back is bounded."""

    def run(text: str) -> None:
        data = text.encode()
        made = Detokenizer(lambda at: data[at : at + 1], (stop, f"{stop}{stop}"[:999]))
        for at in range(len(data)):
            made.push(at)
        made.finish()

    assert growth(run, repeated(piece)) < GROWTH_MAX


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(prepared(tmp_path_factory.mktemp("model")))


def chat(count: int, text: str = "") -> Prompt:
    """Return a chat of so many messages."""
    roles: tuple[Role, Role] = ("user", "assistant")
    return Prompt(
        tuple(Segment(roles[n % 2], text, f"messages[{n}]", None, n) for n in range(count))
    )


def results(count: int) -> Prompt:
    """Return a chat of so many calls and results, which become text of one message."""
    calls = tuple(
        Segment("assistant", "", "m", None, 1, call=ToolCall(f"c{n}", "f", '{"a": "\\""}'))
        for n in range(count)
    )
    found = tuple(Segment("tool", "x", "m", None, 2 + n, answers=f"c{n}") for n in range(count))
    return Prompt((Segment("user", "x", "m", None, 0), *calls, *found))


PROMPTS: dict[str, Callable[[int], Prompt]] = {
    "messages": chat,
    "opaque messages": lambda count: chat(min(count, 128)),
    "results": results,
    "tools": lambda count: Prompt(
        chat(1, "x").segments, tools=tuple(Tool(f"f{n}") for n in range(count))
    ),
    "spaces": lambda count: chat(2, " " * count),
    "words": lambda count: chat(2, "a b" * count),
    "one word": lambda count: chat(2, "a" * count),
    "special words": lambda count: chat(2, "<|im_end|>" * count),
    "marks": lambda count: chat(2, "\u0301" * count),
    "names": lambda count: Prompt((Segment("user", "x", "m", "n" * count, 0),)),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_rendered_in_linear_time(renderer: Renderer, name: str) -> None:
    """Through the sandboxed template, the layout and the tokenizer, each time as a new owner."""
    owner = itertools.count(1)

    assert growth(lambda one: renderer.render(one, next(owner)), PROMPTS[name]) < GROWTH_MAX
