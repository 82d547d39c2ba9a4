"""What every dialect of JSON bodies promises: a call or a refusal, and each field documented."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.anthropic import messages, wire
from gateway.dialects.canonical import Call, RequestMetadata
from gateway.dialects.openai import chat, completions, responses
from gateway.dialects.protocol import Dialect
from gateway.dialects.tolerance import Mode
from gateway.errors import Kind
from tests.golden.transcripts import DOCUMENT, outcome, refusal_of

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
MESSAGE_CHARS_MAX = 1_000


class Fields(NamedTuple):
    """A dialect, its smallest body, and the fields that it reads, refuses and records.

    `heading`: the part of docs/dialects.md that names them; empty: any part."""

    dialect: Dialect
    smallest: dict[str, Any]
    read: tuple[str, ...]
    refused: tuple[str, ...]
    recorded: tuple[str, ...] = ()
    heading: str = ""

    def parse(self, mode: Mode = "standard", /, **fields: Any) -> Call:
        body = json.dumps({"model": "m", **self.smallest, **fields}).encode()
        return self.parse_body(body, mode)

    def parse_body(self, body: bytes, mode: Mode = "standard") -> Call:
        return self.dialect.parse(body, RequestMetadata(tolerance=mode))


DIALECTS = {
    "chat": Fields(
        chat.DIALECT,
        {"messages": MESSAGES},
        chat.ChatBody.__struct_fields__,
        tuple(chat.REFUSED_FIELDS),
        tuple(chat.RULES.records),
    ),
    "completions": Fields(
        completions.DIALECT,
        {"prompt": "hi"},
        completions.CompletionBody.__struct_fields__,
        tuple(completions.REFUSED_FIELDS),
        tuple(completions.RULES.records),
    ),
    "responses": Fields(
        responses.DIALECT,
        {"input": "hi"},
        responses.ResponsesBody.__struct_fields__,
        tuple(responses.REFUSED_FIELDS),
        tuple(responses.RULES.records),
    ),
    "messages": Fields(
        messages.DIALECT,
        {"max_tokens": 1, "messages": MESSAGES},
        wire.Body.__struct_fields__,
        tuple(wire.REFUSED_FIELDS),
        heading="\n## Anthropic\n",
    ),
}
every_dialect = pytest.mark.parametrize("fields", DIALECTS.values(), ids=DIALECTS)

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


@every_dialect
@given(body=st.binary(max_size=60))
def test_any_bytes_parse_to_a_call_or_a_refusal(fields: Fields, body: bytes) -> None:
    """A parser raises no other exception."""
    got = outcome(fields.parse_body, body)

    assert isinstance(got, Call) or got.kind is Kind.BAD


@every_dialect
@given(data=st.data())
def test_any_json_value_parses_to_a_call_or_a_refusal(fields: Fields, data: st.DataObject) -> None:
    """Types are checked before a value is used."""
    names = st.sampled_from([*fields.read, *fields.refused])
    more = data.draw(st.dictionaries(names, JSON, max_size=4))
    body = {"model": "m", **fields.smallest, **more}
    got = outcome(fields.parse_body, json.dumps(body).encode())

    assert isinstance(got, Call) or (got.kind is Kind.BAD and len(got.message) < MESSAGE_CHARS_MAX)


@every_dialect
def test_every_field_is_documented(fields: Fields) -> None:
    """docs/dialects.md lists each field as honoured, accepted or refused."""
    text = DOCUMENT.read_text()
    part = text.partition(fields.heading)[2].partition("\n## ")[0] if fields.heading else text
    names = {*fields.read, *fields.refused, *fields.recorded}

    assert {name for name in names if f"`{name}`" not in part} == set()


@pytest.mark.parametrize(
    ("fields", "name"),
    [(fields, name) for fields in DIALECTS.values() for name in fields.refused],
)
def test_refuses_unsupported_field_by_name(fields: Fields, name: str) -> None:
    """An ignored setting would give an answer to another request; null is no setting."""
    refusal = refusal_of(fields.parse, "strict", **{name: {"some": "thing"}})

    assert (refusal.code, refusal.param) == ("unsupported_parameter", name)
    assert refusal.message.startswith(f"{name}: ")
    assert fields.parse(**{name: None}) == fields.parse()
