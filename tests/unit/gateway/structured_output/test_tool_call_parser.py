"""Tool calls are parsed out of text: nothing lost, nothing invented, however the text is cut."""

from __future__ import annotations

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from gateway.structured_output.tool_call_parser import Cut, ParsedCall, ToolCallParser
from gateway.structured_output.tool_styles import HERMES, LLAMA3, MISTRAL, ToolStyle
from tests.tables import each_row

STYLES = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL}

Folded = list[str | tuple[str, str, str]]


def read(style: ToolStyle, *pieces: str, parallel: bool = True, cut: Cut = "") -> Folded:
    """Return text and calls (id, name, arguments) with neighbours joined."""
    numbers = itertools.count()
    reader = ToolCallParser(style, ("get", "put"), lambda: f"id{next(numbers)}", parallel=parallel)
    found = [piece for text in pieces for piece in reader.push(text)] + reader.finish(cut)
    folded: Folded = []
    for piece in found:
        last = folded[-1] if folded else None
        if isinstance(piece, str):
            folded[-1:] = [last + piece] if isinstance(last, str) else [*folded[-1:], piece]
        elif piece.name:
            folded.append((piece.call_id, piece.name, piece.arguments))
        else:
            assert isinstance(last, tuple)
            folded[-1] = (last[0], last[1], last[2] + piece.arguments)
    assert reader.calls == sum(isinstance(piece, tuple) for piece in folded)
    return folded


ONE = '<tool_call>\n{"name": "get", "arguments": {"a": "}</tool_call>\\""}}\n</tool_call>'
TWO = '<tool_call>\n{"arguments": {"b": [1]}, "name": "put"}\n</tool_call>'
GET, PUT = ("id0", "get", '{"a": "}</tool_call>\\""}'), ("id1", "put", '{"b": [1]}')

CASES: list[tuple[str, str, Folded]] = [
    ("hermes", "Hello", ["Hello"]),
    ("hermes", "", []),
    ("hermes", ONE, [GET]),
    ("hermes", f"Let me see.\n{ONE}\n{TWO}", ["Let me see.\n", GET, PUT]),
    ("hermes", f"{ONE} so.", [GET, " so."]),
    ("hermes", ONE.removesuffix("_call>"), [GET]),
    ("hermes", ONE + "  \n", [GET]),
    ("hermes", ONE + "\n<tool_ca", [GET]),
    ("hermes", ONE + '\n<tool_call>\n{"name": "ge', [GET]),
    ("hermes", ONE + "\n<tool_call>\nno", [GET, "<tool_call>\nno"]),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"a', [("id0", "get", '{"a')]),
    ("hermes", '<tool_call>\n{"name": "ge', ['<tool_call>\n{"name": "ge']),
    ("hermes", "a < b <tool_c", ["a < b <tool_c"]),
    ("hermes", "<tool_call>{'name'}</tool_call>", ["<tool_call>{'name'}</tool_call>"]),
    ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>x',
     ['<tool_call>{"name": "rm", "arguments": {}}</tool_call>x']),
    ("hermes", f"<tool_call>no{ONE}", ["<tool_call>no", GET]),
    ("hermes", '{"name": "get", "arguments": {}}', ['{"name": "get", "arguments": {}}']),
    ("llama3", ' {"name": "get", "parameters": {}}; {"name": "put", "parameters": {"z": 1}}',
     [("id0", "get", "{}"), ("id1", "put", '{"z": 1}')]),
    ("llama3", '<|python_tag|>{"type": "function", "name": "get", "parameters": {}}',
     [("id0", "get", "{}")]),
    ("llama3", '{"name": "Ann", "age": 3}', ['{"name": "Ann", "age": 3}']),
    ("llama3", 'So: {"name": "get", "parameters": {}}', ['So: {"name": "get", "parameters": {}}']),
    ("llama3", "<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
    ("mistral", '[TOOL_CALLS] [{"name": "get", "arguments": {}}, {"name": "put"}]',
     [("id0", "get", "{}"), ("id1", "put", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "get", "arguments": {}}', [("id0", "get", "{}")]),
    ("mistral", "[TOOL_CALLS]{}", ["[TOOL_CALLS]{}"]),
]  # fmt: skip


@each_row(("style", "text", "folded"), CASES)
def test_separates_calls_from_text(style: str, text: str, folded: Folded) -> None:
    """Text that only resembles a call stays text: at once, and character by character."""
    assert read(STYLES[style], text) == folded
    assert read(STYLES[style], *text) == folded


@each_row(
    ("style", "before", "call"),
    [
        ("hermes", "", ONE),
        ("hermes", "Let me see.", ONE + "\n" + TWO),
        (
            "llama3",
            "",
            '{"name": "get", "parameters": {"a": 1}}; {"name": "put", "parameters": {}}',
        ),
        ("llama3", "So: ", '<|python_tag|>{"type": "function", "name": "get", "parameters": {}}'),
        ("mistral", "", '[TOOL_CALLS] [{"name": "get", "arguments": {}}, {"name": "put"}]'),
    ],
)
@each_row("is_in_pieces", [False, True])
def test_limit_leaves_no_markup_of_a_call(
    style: str, before: str, call: str, *, is_in_pieces: bool
) -> None:
    """A limit may end the output at any character of a call: what a client shows as text, and
    sends back as text, is the text before the call alone."""
    for end in range(len(call) + 1):
        text = before + call[:end]
        found = read(STYLES[style], *(text if is_in_pieces else [text]), cut="limit")

        assert "".join(piece for piece in found if isinstance(piece, str)) == before


@each_row(
    ("style", "text", "cut"),
    [
        ("hermes", "if a <", "stop_string"),
        ("hermes", "if a < b", "limit"),
        ("llama3", '{"name": "Ann', "limit"),
        ("llama3", '{"name": "Ann", "age": 3', "limit"),
        ("mistral", "a[0", "limit"),
    ],
)
def test_text_that_was_no_call_stays_when_cut(style: str, text: str, cut: Cut) -> None:
    """A truncated answer loses nothing but what could only have been a call."""
    assert read(STYLES[style], text, cut=cut) == [text]


def test_stop_string_inside_a_call_leaves_no_markup() -> None:
    assert read(HERMES, 'Hm. <tool_call>\n{"na', cut="stop_string") == ["Hm. "]


@given(
    parts=st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "\n", "{", "}", '"name"', ":", '"get"', ","]
        )
        | st.sampled_from(['"arguments"', '{"a": 1}', "[TOOL_CALLS]", "[", "]", ";", " x ", '\\"']),
        max_size=14,
    ),
    style=st.sampled_from(sorted(STYLES)),
    cuts=st.lists(st.integers(0, 80), max_size=5),
)
def test_any_text_parses_the_same_in_pieces(parts: list[str], style: str, cuts: list[int]) -> None:
    """Also half a call, or two in one."""
    text = "".join(parts)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(ends)]
    whole = read(STYLES[style], text)

    assert read(STYLES[style], *pieces) == whole
    if not any(isinstance(piece, tuple) for piece in whole):
        assert "".join(piece for piece in whole if isinstance(piece, str)) == text


def test_streams_arguments() -> None:
    """A long document in an argument does not wait for its end."""
    reader = ToolCallParser(HERMES, ("get",), lambda: "id")
    first = reader.push('<tool_call>\n{"name": "get", "arguments": {"a": "Once ')
    second = reader.push("upon a time")

    assert first == [ParsedCall(0, "id", "get"), ParsedCall(0, arguments='{"a": "Once ')]
    assert second == [ParsedCall(0, arguments="upon a time")]


def test_holds_back_possible_call() -> None:
    """And no longer than necessary."""
    reader = ToolCallParser(HERMES, ("get",), lambda: "id")

    assert reader.push("So <tool_") == ["So "]
    assert reader.push("box>") == ["<tool_box>"]


def test_is_full_after_one_call_if_not_parallel() -> None:
    assert read(HERMES, f"Hm {ONE}\n{TWO} so", parallel=False) == ["Hm ", GET]


def test_releases_endless_call_head_as_text() -> None:
    """Nothing is held back without limit."""
    text = "<tool_call>" + json.dumps({"arguments": {"a": "x" * 70_000}})
    reader = ToolCallParser(HERMES, ("get",), lambda: "id")

    assert sum(len(p) for p in reader.push(text[:-1]) if isinstance(p, str)) == len(text) - 1
