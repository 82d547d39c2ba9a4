"""What every dialect of JSON bodies promises: a call or a refusal, and each field documented."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.anthropic import wire as anthropic
from gateway.dialects.canonical import Call
from gateway.dialects.gemini import wire as gemini
from gateway.dialects.openai import chat, completions
from gateway.dialects.openai.responses import dialect as responses
from gateway.errors import Kind
from tests.golden.transcripts import DOCUMENT, outcome, refusal_of
from tests.tables import each_row
from tests.unit.gateway.dialects.requests import (
    CHAT,
    COMPLETIONS,
    ENDPOINTS,
    GEMINI,
    MESSAGES,
    RESPONSES,
    Endpoint,
)

MESSAGE_CHARS_MAX = 1_000


RESULT = [{"role": "tool", "tool_call_id": "c", "content": "1"}]


def without_nulls(value: Any) -> Any:
    """Return a value of JSON without its null members."""
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {name: without_nulls(one) for name, one in value.items() if one is not None}


class Fields(NamedTuple):
    """The fields that an endpoint reads, refuses and records.

    `heading`: the part of docs/dialects.md that names them; empty: any part."""

    endpoint: Endpoint
    read: tuple[str, ...]
    refused: tuple[str, ...] = ()
    recorded: tuple[str, ...] = ()
    heading: str = ""


FIELDS = {
    "chat": Fields(
        CHAT,
        chat.ChatBody.__struct_fields__,
        tuple(chat.REFUSED_FIELDS),
        tuple(chat.RULES.records),
    ),
    "completions": Fields(
        COMPLETIONS,
        completions.CompletionBody.__struct_fields__,
        tuple(completions.REFUSED_FIELDS),
        tuple(completions.RULES.records),
    ),
    "responses": Fields(
        RESPONSES,
        responses.ResponsesBody.__struct_fields__,
        tuple(responses.REFUSED_FIELDS),
        tuple(responses.RULES.records),
    ),
    "messages": Fields(
        MESSAGES,
        anthropic.Body.__struct_fields__,
        tuple(anthropic.REFUSED_FIELDS),
        heading="\n## Anthropic\n",
    ),
    "gemini": Fields(
        GEMINI,
        tuple(map(gemini.to_camel_case, gemini.GenerateBody.__struct_fields__)),
    ),
}
every_endpoint = pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)
every_dialect = pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)

WORDS = ("type", "role", "content", "text", "format", "mode", "ttl", "name")
KINDS = ("message", "user", "function", "input_text", "json_schema")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(WORDS), inner | st.sampled_from(KINDS), max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@every_endpoint
@each_row(
    "body",
    [
        *(b"", b"nul", b"[]", b'"x"', b'{"model":"m"', b'{"temperature":NaN}'),
        *(b"\xff", b'{"model":"\xff"}', b'{"model":"\xed\xa0\x80"}', b'{"model":"\\ud800"}'),
        *(b"[" * 200_000, b'{"a":' * 100_000),
        b'{"model":"m","messages":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"model":"m","seed":' + b"9" * 4_400 + b"}",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_refuses_invalid_body(endpoint: Endpoint, body: bytes) -> None:
    """Every decoder error is a client error."""
    refusal_of(endpoint.parse_body, body)


@every_endpoint
@each_row(
    ("number", "shown", "most"),
    [
        ("1e400", "1e400", "1.8e308"),
        ("-2.5E309", "-2.5E309", "1.8e308"),
        ("9" * 5_000, "99999… (5000 characters)", "4300 digits"),
    ],
)
def test_a_number_out_of_range_is_named_with_its_place_and_the_limit(
    endpoint: Endpoint, number: str, shown: str, most: str
) -> None:
    """The body is valid JSON; what is wrong is one number deep in a schema that a tool wrote."""
    body = f'{{"model":"1e400","tools":[{{"parameters":{{"maximum":{number}}}}}]}}'
    refusal = refusal_of(endpoint.parse_body, body.encode())

    assert (refusal.code, refusal.param) == ("invalid_value", "tools[0].parameters.maximum")
    assert shown in refusal.message
    assert f"expected at most {most}." in refusal.message


@every_endpoint
@given(body=st.binary(max_size=60))
def test_any_bytes_parse_to_a_call_or_a_refusal(endpoint: Endpoint, body: bytes) -> None:
    """A parser raises no other exception."""
    got = outcome(endpoint.parse_body, body)

    assert isinstance(got, Call) or got.kind is Kind.BAD


@every_dialect
@given(data=st.data())
def test_any_json_value_parses_to_a_call_or_a_refusal(fields: Fields, data: st.DataObject) -> None:
    """Types are checked before a value is used."""
    names = st.sampled_from([*fields.read, *fields.refused])
    more = data.draw(st.dictionaries(names, JSON, max_size=4))
    got = outcome(lambda given_: fields.endpoint.parse(**given_), more)

    assert isinstance(got, Call) or (got.kind is Kind.BAD and len(got.message) < MESSAGE_CHARS_MAX)


@every_dialect
def test_every_field_is_documented(fields: Fields) -> None:
    """docs/dialects.md lists each field as honoured, accepted or refused."""
    text = DOCUMENT.read_text()
    part = text.partition(fields.heading)[2].partition("\n## ")[0] if fields.heading else text
    names = {*fields.read, *fields.refused, *fields.recorded}

    assert {name for name in names if f"`{name}`" not in part} == set()


@each_row(
    ("endpoint", "name"),
    [(fields.endpoint, name) for fields in FIELDS.values() for name in fields.refused],
)
def test_refuses_unsupported_field_by_name(endpoint: Endpoint, name: str) -> None:
    """An ignored setting would give an answer to another request; null is no setting."""
    refusal = endpoint.refused("strict", **{name: {"some": "thing"}})

    assert (refusal.code, refusal.param) == ("unsupported_parameter", name)
    assert refusal.message.startswith(f"{name}: ")
    assert endpoint.parse(**{name: None}) == endpoint.parse()


HI = {"role": "user", "content": "hi"}
CALLED = {"id": "c", "function": {"name": "f", "arguments": None}, "type": None}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": None}


@each_row(
    ("endpoint", "fields"),
    [
        (CHAT, {"stream": True, "stream_options": {"include_usage": None}}),
        (CHAT, {"messages": [HI, {"role": "assistant", "tool_calls": [CALLED]}, *RESULT]}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "strict": None}}]}),
        (RESPONSES, {"stream": True, "stream_options": {"include_obfuscation": None}}),
        (RESPONSES, {"input": [{**HI, "type": None}]}),
        (MESSAGES, {"messages": [HI, {"role": "assistant", "content": [THOUGHT]}, HI]}),
        (MESSAGES, {"context_management": {"edits": None}}),
        (GEMINI, {"generationConfig": {"responseModalities": None, "thinkingConfig": None}}),
    ],
)
def test_a_null_counts_as_omitted_at_any_depth(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    """Typed clients write every field that they have."""
    assert endpoint.parse(**fields).prompts == endpoint.parse(**without_nulls(fields)).prompts


@every_endpoint
def test_an_empty_nucleus_is_greedy(endpoint: Endpoint) -> None:
    """At any temperature: only the best token is left."""
    settings: dict[str, Any] = {"temperature": 1}
    greedy: dict[str, Any] = {**settings, "top_p": 0}
    if endpoint is GEMINI:
        settings, greedy = {"generationConfig": settings}, {"generationConfig": greedy}

    assert endpoint.parse(**settings).generation.sampling.temperature == 1.0
    assert endpoint.parse(**greedy).generation.sampling.temperature == 0.0
