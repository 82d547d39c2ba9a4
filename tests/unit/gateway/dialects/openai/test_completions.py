"""OpenAI's legacy completions: prompts of four shapes, echo, best_of, logprobs by offset."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion

from gateway.dialects.canonical import Call, ChoiceEnd, Delta, End, Prompt, Text, TokenText
from gateway.dialects.openai import completions as openai_completions
from gateway.errors import Kind, Refusal
from tests.golden.transcripts import DOCUMENT, REPLY, SCRIPT, USAGE, check_golden, events, outcome

DIALECT = openai_completions.DIALECT


def parse(**fields: Any) -> Call:
    """A good request with more fields."""
    return DIALECT.parse(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def refused(**fields: Any) -> Refusal:
    """Why such a request is refused."""
    with pytest.raises(Refusal) as raised:
        parse(**fields)
    assert raised.value.kind is Kind.BAD
    return raised.value


def stream(call: Call, deltas: list[Delta]) -> bytes:
    """The whole stream."""
    encoder = DIALECT.encoder(call, REPLY)
    return b"".join(map(encoder.stream, deltas)) + encoder.close()


def unary(call: Call, deltas: list[Delta]) -> Any:
    """The whole answer."""
    return json.loads(DIALECT.encoder(call, REPLY).unary(deltas))


# --- requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", [Prompt(text="a")]),
        (["a", "b"], [Prompt(text="a"), Prompt(text="b")]),
        ([1, 2], [Prompt(token_ids=(1, 2))]),
        ([[1], [2, 3]], [Prompt(token_ids=(1,)), Prompt(token_ids=(2, 3))]),
        (["a", [1]], [Prompt(text="a"), Prompt(token_ids=(1,))]),
    ],
)
def test_a_prompt_has_four_shapes(prompt: Any, prompts: list[Prompt]) -> None:
    """Text, texts, token ids, lists of token ids."""
    assert list(parse(prompt=prompt).prompts) == prompts


@pytest.mark.parametrize("prompt", ["a", [1, 2], [[1], [2]]])
def test_a_prompt_is_the_same_beside_fields_that_change_nothing(prompt: Any) -> None:
    """Bodies that have nothing unusual are read in a shorter way."""
    expected = parse(prompt=prompt)

    assert parse(prompt=prompt, metadata={}) == expected


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        (None, "prompt"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        ([-1], "prompt[0]"),
        ([1, "a"], "prompt[1]"),
        ([True], "prompt[0]"),
        ([1, 2**31], "prompt[1]"),
        ([[1], [2, 1.5]], "prompt[1][1]"),
        (["a"] * 129, "prompt"),
    ],
)
def test_a_prompt_of_another_shape_is_refused_with_its_path(prompt: Any, param: str) -> None:
    """The client has many prompts and wants to know which."""
    assert refused(prompt=prompt).param == param


def test_defaults_are_the_originals() -> None:
    """Sixteen tokens, one choice, no logprobs, no echo."""
    generation = parse().generation

    assert (generation.max_tokens, generation.choices, generation.samples) == (16, 1, 1)
    assert (generation.sampling.logprobs, generation.echo) == (None, False)


def test_best_of_computes_more_than_it_returns() -> None:
    """Ranking needs logprobs, which the client did not ask to see."""
    call = parse(n=2, best_of=5)
    generation = call.generation

    assert (generation.choices, generation.samples) == (2, 5)
    assert generation.sampling.logprobs == 0
    assert not generation.report_logprobs
    assert "logprobs" in refused(logprobs=21).message
    assert unary(call, SCRIPT)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 1, "best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 21}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"suffix": "after"}, "suffix"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], param: str) -> None:
    """best_of cannot stream: the best is known at the end."""
    assert refused(**fields).param == param


def test_echo_alone_may_ask_for_nothing_new() -> None:
    """Scoring a text: its own logprobs, no output."""
    generation = parse(echo=True, max_tokens=0, logprobs=2).generation

    assert (generation.echo, generation.max_tokens, generation.prompt_logprobs) == (True, 0, 2)


@pytest.mark.parametrize("name", sorted(openai_completions.REFUSED_FIELDS))
def test_a_field_that_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    """Silence would answer another question than was asked."""
    refusal = refused(**{name: {"some": "thing"}})

    assert (refusal.code, refusal.param) == ("unsupported_parameter", name)
    assert parse(**{name: None}) == parse()


NAMES = sorted(openai_completions.CompletionBody.__struct_fields__)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4))
def test_any_json_in_any_field_is_a_call_or_a_refusal(fields: dict[str, Any]) -> None:
    """Types are checked before anything is done with a value."""
    body = {"model": "m", "prompt": "hi", **fields}
    got = outcome(DIALECT.parse, json.dumps(body).encode())

    assert isinstance(got, Call) or got.kind is Kind.BAD


def test_every_field_is_documented() -> None:
    """Honoured, accepted or refused: a client finds each field in one table."""
    fields = {*NAMES, *openai_completions.REFUSED_FIELDS, *openai_completions.IGNORED_FIELDS}

    assert {name for name in fields if f"`{name}`" not in DOCUMENT.read_text()} == set()


# --- answers -------------------------------------------------------------------------------------


def test_a_stream_is_what_was_agreed_to_the_byte() -> None:
    """Clients parse bytes; a change of them is a change of contract."""
    call = parse(stream=True, stream_options={"include_usage": True}, n=2, logprobs=1)

    check_golden("openai_completions_stream.txt", stream(call, SCRIPT))


def test_a_unary_answer_is_what_was_agreed_to_the_byte() -> None:
    """The same, for the other shape."""
    call = parse(n=2, logprobs=1)

    check_golden("openai_completions_unary.json", DIALECT.encoder(call, REPLY).unary(SCRIPT))


def test_the_official_client_reads_both_shapes() -> None:
    """Its types are what most callers have."""
    call = parse(stream=True, stream_options={"include_usage": True}, n=2)
    answer = Completion.model_validate(unary(parse(n=2, logprobs=1), SCRIPT))
    # In a stream the finish reason is null until the end; the client builds these unchecked.
    chunks = [Completion.construct(**c) for c in events(stream(call, SCRIPT))[:-1] if c["choices"]]

    assert [choice.text for choice in answer.choices] == ["Good 🙂", "Gut"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert "".join(c.choices[0].text for c in chunks if c.choices[0].index == 0) == "Good 🙂"


def test_offsets_point_into_the_text_whatever_is_split() -> None:
    """A token of half a character begins where its character will stand."""
    smile = "🙂".encode()
    tokens = tuple(
        TokenText(n, data, -1.0) for n, data in enumerate([b"a", smile[:2], smile[2:], b"b"])
    )
    deltas: list[Delta] = [Text(0, "a", tokens[:1]), Text(0, "🙂b", tokens[1:])]
    deltas += [ChoiceEnd(0, "stop"), End(USAGE)]

    logprobs = unary(parse(logprobs=0), deltas)["choices"][0]["logprobs"]

    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["tokens"] == ["a", r"bytes:\xf0\x9f", r"bytes:\x99\x82", "b"]
    assert logprobs["top_logprobs"] is None


def test_alternatives_of_half_a_character_stay_apart() -> None:
    """They are keys of one object; written alike, one would hide the other."""
    top = (TokenText(1, b"\xf0", -1.0), TokenText(2, b"\xf1", -2.0))
    deltas: list[Delta] = [
        Text(0, "a", (TokenText(0, b"a", -0.5, top),)),
        ChoiceEnd(0, "stop"),
        End(USAGE),
    ]

    logprobs = unary(parse(logprobs=2), deltas)["choices"][0]["logprobs"]

    assert logprobs["top_logprobs"] == [{r"bytes:\xf0": -1.0, r"bytes:\xf1": -2.0}]


def test_an_echoed_first_token_has_no_logprob() -> None:
    """Nothing came before it; null says so."""
    deltas: list[Delta] = [
        Text(0, "a", (TokenText(0, b"a", None),)),
        ChoiceEnd(0, "stop"),
        End(USAGE),
    ]

    logprobs = unary(parse(logprobs=0, echo=True), deltas)["choices"][0]["logprobs"]

    assert logprobs["token_logprobs"] == [None]


def test_usage_comes_once_and_only_when_asked() -> None:
    """In a last chunk without choices, before the end mark."""
    asked = events(stream(parse(stream=True, stream_options={"include_usage": True}), SCRIPT))
    plain = events(stream(parse(stream=True), SCRIPT))

    assert asked[-2]["usage"]["total_tokens"] == 25
    assert [chunk["usage"] for chunk in asked[:-2]] == [None] * (len(asked) - 2)
    assert not any("usage" in chunk for chunk in plain[:-1])
