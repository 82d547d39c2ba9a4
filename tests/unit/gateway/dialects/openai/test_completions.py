"""OpenAI's legacy completions: prompts of four shapes, echo, best_of and logprobs by offset."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.dialects.canonical import (
    ChoiceEnd,
    Delta,
    End,
    Prompt,
    Text,
    TokenText,
)
from gateway.errors import Refusal
from tests.golden.transcripts import (
    REPLY,
    SCRIPT,
    USAGE,
    check_golden,
    events,
)
from tests.tables import each_row
from tests.unit.gateway.dialects.requests import COMPLETIONS

DIALECT, parse = COMPLETIONS.dialect, COMPLETIONS.parse
stream, unary = COMPLETIONS.streamed, COMPLETIONS.unary


def refused(**fields: Any) -> Refusal:
    """Return the strict mode's refusal of the smallest request with more fields."""
    return COMPLETIONS.refused("strict", **fields)


# --- requests ------------------------------------------------------------------------------------


@each_row(
    ("prompt", "prompts"),
    [
        ("a", [Prompt(text="a")]),
        (["a", "b"], [Prompt(text="a"), Prompt(text="b")]),
        ([1, 2], [Prompt(token_ids=(1, 2))]),
        ([[1], [2, 3]], [Prompt(token_ids=(1,)), Prompt(token_ids=(2, 3))]),
        (["a", [1]], [Prompt(text="a"), Prompt(token_ids=(1,))]),
    ],
)
def test_accepts_four_prompt_shapes(prompt: Any, prompts: list[Prompt]) -> None:
    """Text, texts, token ids, lists of token ids."""
    assert list(parse(prompt=prompt).prompts) == prompts


@pytest.mark.parametrize("prompt", ["a", [1, 2], [[1], [2]]])
def test_ignored_fields_do_not_change_the_prompt(prompt: Any) -> None:
    """They disable the fast decoder, which must not matter."""
    expected = parse(prompt=prompt)

    assert parse(prompt=prompt, metadata={}) == expected


@each_row(
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
def test_refuses_invalid_prompt_with_path(prompt: Any, param: str) -> None:
    """The path tells which of many prompts is invalid."""
    assert refused(prompt=prompt).param == param


def test_defaults_match_openais() -> None:
    """Sixteen tokens, one choice, no logprobs, no echo."""
    generation = parse().generation

    assert (generation.max_tokens, generation.choices, generation.samples) == (16, 1, 1)
    assert (generation.sampling.logprobs, generation.echo) == (None, False)


def test_best_of_samples_more_than_it_returns() -> None:
    """Ranking needs logprobs that the client did not request."""
    call = parse(n=2, best_of=5)
    generation = call.generation

    assert (generation.choices, generation.samples) == (2, 5)
    assert generation.sampling.logprobs == 0
    assert not generation.report_logprobs
    assert "logprobs" in refused(logprobs=21).message
    assert unary(call, SCRIPT)["choices"][0]["logprobs"] is None


@each_row(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 1, "best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 21}, "best_of"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"suffix": "after"}, "suffix"),
        ({"messages": []}, "messages"),
    ],
)
def test_refuses_contradictory_fields(fields: dict[str, Any], param: str) -> None:
    """For one, a stream cannot rank samples."""
    assert refused(**fields).param == param


def test_echo_accepts_zero_max_tokens() -> None:
    """The request scores a text: its logprobs, and no output."""
    generation = parse(echo=True, max_tokens=0, logprobs=2).generation

    assert (generation.echo, generation.max_tokens, generation.prompt_logprobs) == (True, 0, 2)


# --- answers -------------------------------------------------------------------------------------


def test_stream_matches_the_golden_transcript() -> None:
    """Clients parse bytes; a changed byte is a changed contract."""
    call = parse(stream=True, stream_options={"include_usage": True}, n=2, logprobs=1)

    check_golden("openai_completions_stream.txt", stream(call, SCRIPT))


def test_unary_answer_matches_the_golden_transcript() -> None:
    call = parse(n=2, logprobs=1)

    check_golden("openai_completions_unary.json", DIALECT.encoder(call, REPLY).unary(SCRIPT))


def test_text_offsets_count_characters_of_split_tokens() -> None:
    """A token with a part of a character has that character's offset."""
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


def test_partial_characters_have_distinct_names() -> None:
    """They are keys of one object; equal names would hide one."""
    top = (TokenText(1, b"\xf0", -1.0), TokenText(2, b"\xf1", -2.0))
    deltas: list[Delta] = [
        Text(0, "a", (TokenText(0, b"a", -0.5, top),)),
        ChoiceEnd(0, "stop"),
        End(USAGE),
    ]

    logprobs = unary(parse(logprobs=2), deltas)["choices"][0]["logprobs"]

    assert logprobs["top_logprobs"] == [{r"bytes:\xf0": -1.0, r"bytes:\xf1": -2.0}]


def test_first_echoed_token_has_no_logprob() -> None:
    """No token precedes it, so the logprob is null."""
    deltas: list[Delta] = [
        Text(0, "a", (TokenText(0, b"a", None),)),
        ChoiceEnd(0, "stop"),
        End(USAGE),
    ]

    logprobs = unary(parse(logprobs=0, echo=True), deltas)["choices"][0]["logprobs"]

    assert logprobs["token_logprobs"] == [None]


def test_usage_chunk_is_sent_once_and_on_request() -> None:
    """It is the last chunk before `[DONE]` and has no choices."""
    request = events(stream(parse(stream=True, stream_options={"include_usage": True}), SCRIPT))
    plain = events(stream(parse(stream=True), SCRIPT))

    assert request[-2]["usage"]["total_tokens"] == 25
    assert not any("usage" in chunk for chunk in request[:-2])
    assert not any("usage" in chunk for chunk in plain[:-1])
