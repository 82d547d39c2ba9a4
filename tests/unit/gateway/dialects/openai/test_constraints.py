"""Constraints on the answer under other servers' names, in each of OpenAI's endpoints."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gateway.dialects.canonical import OutputFormat
from tests.tables import each_row
from tests.unit.gateway.dialects.requests import CHAT, COMPLETIONS, RESPONSES, Endpoint

ENDPOINTS = {
    "chat": CHAT,
    "completions": COMPLETIONS,
    "several prompts": structs.replace(
        COMPLETIONS, smallest={"model": "m", "prompt": ["hi", "ho"]}
    ),
    "responses": RESPONSES,
}
ALL = pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
LARK = 'start: "a" | "b"'
TOOL = {"type": "function", "function": {"name": "f"}}


@ALL
@each_row(
    ("fields", "wanted"),
    [
        ({"guided_json": SCHEMA}, OutputFormat("json_schema", TEXT, "guided_json", strict=False)),
        ({"guided_json": TEXT}, OutputFormat("json_schema", TEXT, "guided_json", strict=False)),
        ({"json_schema": SCHEMA}, OutputFormat("json_schema", TEXT, "json_schema", strict=False)),
        ({"guided_regex": r"\d+"}, OutputFormat("regex", r"\d+", "guided_regex")),
        ({"regex": r"\d+"}, OutputFormat("regex", r"\d+", "regex")),
        ({"guided_choice": ["a.b", "c"]}, OutputFormat("regex", r"a\.b|c", "guided_choice")),
        ({"guided_grammar": LARK}, OutputFormat("lark", LARK, "guided_grammar")),
        ({"grammar": "root ::= x"}, OutputFormat("lark", "root ::= x", "grammar")),
        ({"ebnf": "root ::= x"}, OutputFormat("lark", "root ::= x", "ebnf")),
        (
            {"structured_outputs": {"json": SCHEMA}},
            OutputFormat("json_schema", TEXT, "structured_outputs.json", strict=False),
        ),
        (
            {"structured_outputs": {"json_object": True, "regex": None}},
            OutputFormat("json_object", path="structured_outputs.json_object"),
        ),
        (
            {"structured_outputs": {"regex": "a+"}},
            OutputFormat("regex", "a+", "structured_outputs.regex"),
        ),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            OutputFormat("regex", "a|b", "structured_outputs.choice"),
        ),
        (
            {"structured_outputs": {"grammar": LARK}},
            OutputFormat("lark", LARK, "structured_outputs.grammar"),
        ),
        ({"structured_outputs": None, "guided_json": None}, OutputFormat()),
        ({"structured_outputs": {}, "guided_json": {}, "guided_regex": ""}, OutputFormat()),
        ({"guided_choice": [], "regex": None}, OutputFormat()),
    ],
)
def test_constraint_is_the_output_format(
    endpoint: Endpoint, fields: dict[str, Any], wanted: OutputFormat
) -> None:
    """Its path is the field that the client knows, which an error names."""
    call = endpoint.parse(**fields)

    assert [prompt.output_format for prompt in call.prompts] == [wanted] * len(call.prompts)
    assert call.ignored == ()


@pytest.mark.parametrize("field", ["regex", "pattern", "value"])
def test_response_format_may_be_a_pattern_or_a_grammar(field: str) -> None:
    pattern = CHAT.parse(response_format={"type": "regex", field: "a+"})
    grammar = CHAT.parse(response_format={"type": "grammar", "grammar": LARK})

    wanted = OutputFormat("regex", "a+", "response_format")
    assert pattern.prompts[0].output_format == wanted
    assert grammar.prompts[0].output_format == OutputFormat("lark", LARK, "response_format.grammar")


@ALL
def test_hints_of_the_newer_form_are_named(endpoint: Endpoint) -> None:
    options = {"regex": "a", "disable_any_whitespace": True, "disable_fallback": False}

    call = endpoint.parse(structured_outputs=options)
    assert call.ignored == ("structured_outputs.disable_any_whitespace",)


@ALL
@each_row(
    ("fields", "param"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_regex": 3}, "guided_regex"),
        ({"guided_regex": "a" * 32_769}, "guided_regex"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": ["a"] * 1_001}, "guided_choice"),
        ({"ebnf": 3}, "ebnf"),
        ({"grammar": "x" * 131_073}, "grammar"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_regex": "a", "structured_outputs": {"json_object": True}}, "structured_outputs"),
    ],
)
def test_bad_constraint_is_refused_by_name(
    endpoint: Endpoint, fields: dict[str, Any], param: str
) -> None:
    found = endpoint.refused(**fields)

    assert (found.param or "").startswith(param)


@ALL
def test_strict_mode_refuses_other_servers_names(endpoint: Endpoint) -> None:
    found = endpoint.refused("strict", structured_outputs={"regex": "a"})

    assert (found.code, found.param) == ("unsupported_parameter", "structured_outputs")


def test_constraint_may_repeat_the_response_format_but_not_contradict_it() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    found = CHAT.refused(response_format=form, guided_json={"type": "object"})

    same = CHAT.parse(response_format=form, guided_json=SCHEMA)
    assert same.prompts == CHAT.parse(response_format=form).prompts
    assert (found.param, "response_format" in found.message) == ("guided_json", True)
    assert CHAT.refused(response_format={"type": "regex"}).param == "response_format"


def test_pattern_excludes_tools_that_may_be_called() -> None:
    """A grammar constrains the whole output, calls included."""
    found = CHAT.refused(guided_regex="a", tools=[TOOL])

    assert found.param == "guided_regex"
    uncalled = CHAT.parse(guided_regex="a", tools=[TOOL], tool_choice="none")
    called = CHAT.parse(guided_json=SCHEMA, tools=[TOOL])
    kinds = [call.prompts[0].output_format.kind for call in (uncalled, called)]
    assert kinds == ["regex", "json_schema"]


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4))
def test_choice_matches_exactly_its_texts(choices: list[str]) -> None:
    """The pattern's syntax is a subset of Python's."""
    pattern = CHAT.parse(guided_choice=choices).prompts[0].output_format.schema

    assert all(re.fullmatch(pattern, choice) for choice in choices)
    assert not re.fullmatch(pattern, choices[0] + choices[-1] + "x" * 99)
