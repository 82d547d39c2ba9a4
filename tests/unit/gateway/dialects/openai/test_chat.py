"""OpenAI's chat dialect: accepted fields, refusals, and the encoded bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.api import Sampling
from gateway.dialects.canonical import (
    CallText,
    ChoiceEnd,
    Delta,
    End,
    Segment,
    Text,
)
from gateway.dialects.openai import chat as openai_chat
from gateway.errors import Kind, Refusal
from tests.golden.transcripts import (
    REPLY,
    SCRIPT,
    USAGE,
    check_golden,
    events,
)
from tests.tables import each_row
from tests.unit.gateway.dialects.requests import CHAT

DIALECT, parse = CHAT.dialect, CHAT.parse
stream, unary = CHAT.streamed, CHAT.unary


def refused(**fields: Any) -> Refusal:
    """Return the strict mode's refusal of the smallest request with more fields."""
    return CHAT.refused("strict", **fields)


# --- requests ------------------------------------------------------------------------------------


def test_defaults_are_plain_sampling_of_one_choice() -> None:
    """Omitted fields leave the model's own distribution and the server's token limit."""
    call = parse()

    assert call.generation.sampling == Sampling()
    assert (call.generation.max_tokens, call.generation.choices) == (None, 1)
    assert call.prompts[0].segments == (Segment("user", "hi", "messages[0].content"),)
    assert (call.stream, call.include_usage, call.partition) == (False, False, "")


def test_honoured_fields_reach_the_call() -> None:
    """A field that is decoded and dropped is worse than a refused one."""
    call = parse(
        stream=True,
        stream_options={"include_usage": True},
        n=2,
        stop=["END", "\n"],
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"42": -100},
        seed=7,
        logprobs=True,
        top_logprobs=3,
        user="u",
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[5],
        priority=-3,
        add_generation_prompt=False,
    )

    assert call.generation.sampling == Sampling(
        temperature=0.5,
        top_k=40,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        logit_bias={42: -100.0},
        seed=7,
        logprobs=3,
    )
    generation = call.generation
    assert (generation.choices, generation.samples, generation.max_tokens) == (2, 2, 9)
    assert (generation.stop, generation.stop_token_ids) == (("END", "\n"), (5,))
    assert (generation.min_tokens, generation.ignore_eos) == (2, True)
    assert (call.stream, call.include_usage, call.client_user, call.priority) == (
        True,
        True,
        "u",
        -3,
    )
    assert not call.prompts[0].add_generation_prompt


def test_a_penalty_that_no_logit_survives_is_refused() -> None:
    """In fp32 a smaller one may be 0, and 0 times minus infinity is no number."""
    refusal = CHAT.refused("standard", repetition_penalty=5e-324)

    assert (refusal.kind, refusal.param) == (Kind.BAD, "repetition_penalty")
    assert "0.01" in refusal.message
    assert parse(repetition_penalty=0.01).generation.sampling.repetition_penalty == 0.01


def test_null_equals_an_omitted_field() -> None:
    """SDKs and gateways send null for unset fields."""
    names = [
        "n",
        "stop",
        "seed",
        "temperature",
        "max_tokens",
        "logit_bias",
        "stream",
        "tools",
        "user",
    ]

    assert parse(**dict.fromkeys(names)) == parse()


def test_each_part_is_a_segment() -> None:
    """A breakpoint may follow any part; the template joins them."""
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = parse(
        messages=[
            {"role": "developer", "content": "d"},
            {"role": "user", "content": content, "name": "ann"},
            {"role": "assistant", "content": None, "refusal": "no"},
        ]
    )

    assert [(s.role, s.text, s.path, s.name, s.message) for s in call.prompts[0].segments] == [
        ("developer", "d", "messages[0].content", None, 0),
        ("user", "a", "messages[1].content[0]", "ann", 1),
        ("user", "b", "messages[1].content[1]", "ann", 1),
        ("assistant", "no", "messages[2].content", None, 2),
    ]


@each_row("name", sorted(openai_chat.NEUTRAL_VALUES.keys() - {"reasoning_effort"}))
def test_refused_field_at_its_default_is_accepted(name: str) -> None:
    """Some clients send every field they know."""
    for value in openai_chat.NEUTRAL_VALUES[name]:
        assert parse(**{name: value}) == parse()
        assert parse("strict", **{name: value}) == parse()
    assert refused(**{name: 7}).param == name


@each_row(
    ("fields", "param", "says"),
    [
        ({"temprature": 0}, "temprature", "Did you mean 'temperature'?"),
        ({"n": 129}, "n", "129"),
        ({"n": 0}, "n", ">= 1; received 0"),
        ({"temperature": 2.5}, "temperature", "<= 2.0; received 2.5"),
        ({"stop": ["a"] * 5}, "stop", "<= 4; received length 5"),
        ({"stop": [""]}, "stop[0]", ">= 1"),
        *(({"max_tokens": few}, "max_tokens", f">= 1; received {few}") for few in (0, -1)),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20; received 21"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"logit_bias": {"7": 101}}, "logit_bias", "<= 100"),
        ({"logit_bias": {"seven": 1}}, "logit_bias", "expected a token id"),
        ({"logit_bias": {"²": 1}}, "logit_bias", "expected a token id"),
        ({"seed": 2**63}, "seed", "<="),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"messages": []}, "messages", ">= 1"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "requires content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "empty"),
        ({"messages": [{"role": "root", "content": ""}]}, "messages[0].role", "root"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c1"}]}]},
            "messages[0].tool_calls[0].function",
            "required",
        ),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": {}}]},
            "tools[0].name",
            "unknown field `name`; expected type, function",
        ),
        (
            {"messages": [{"role": "user", "contents": "x"}]},
            "messages[0].contents",
            "did you mean `content`?",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "matching regex '^[a-zA-Z0-9_-]+$'",
        ),
        ({"store": True}, "store", "expected false"),
        ({"service_tier": "flex"}, "service_tier", 'expected "auto" or "default"'),
        ({"response_format": {"type": "x"}}, "response_format.type", '"json_object"'),
        (
            {"messages": [{"role": "user", "content": "x", "audio": {}}]},
            "messages[0].audio",
            "not supported",
        ),
        ({"modalities": ["text", "audio"]}, "modalities[1]", "audio"),
    ],
)
def test_refuses_invalid_value_with_path_and_limit(
    fields: dict[str, Any], param: str, says: str
) -> None:
    """The message has the expected and the received value."""
    refusal = refused(**fields)

    assert refusal.param == param
    assert says in refusal.message


@pytest.mark.parametrize("name", ["request_id", "rid", "session_id"])
def test_request_names_have_no_effect(name: str) -> None:
    """Clients of other engines send them for logs and for routing."""
    assert replace(parse("strict", **{name: "mine"}), ignored=()) == parse()


def test_error_does_not_quote_a_long_value() -> None:
    """Errors are logged and read."""
    assert len(refused(service_tier="x" * 100_000).message) < 500
    assert len(refused(**{"x" * 100_000: 1}).message) < 500


# --- answers -------------------------------------------------------------------------------------


def test_stream_matches_the_golden_transcript() -> None:
    """Clients parse bytes; a changed byte is a changed contract."""
    call = parse(stream=True, stream_options={"include_usage": True}, n=2, logprobs=True)

    check_golden("openai_chat_stream.txt", stream(call, SCRIPT))


def test_unary_answer_matches_the_golden_transcript() -> None:
    call = parse(n=2, logprobs=True, top_logprobs=1)

    check_golden("openai_chat_unary.json", DIALECT.encoder(call, REPLY).unary(SCRIPT))


def test_stream_has_no_usage_or_logprobs_by_default() -> None:
    """A chunk without choices breaks simple clients."""
    found = events(stream(parse(stream=True), SCRIPT))

    assert found[-1] == "[DONE]"
    assert all(chunk["choices"] for chunk in found[:-1])
    assert not any("usage" in chunk for chunk in found[:-1])
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in found[:-1])


def test_first_chunk_opens_choice_0() -> None:
    """The official client's accumulator fails if choice 1 comes first."""
    choices = [
        chunk["choices"][0] for chunk in events(stream(parse(stream=True, n=2), SCRIPT))[:-1]
    ]

    assert [choice["index"] for choice in choices[:2]] == [0, 1]
    assert [choice["delta"].get("role") for choice in choices].count("assistant") == 2
    assert choices[0]["delta"]["role"] == "assistant"


def test_choice_without_text_is_an_empty_message() -> None:
    """A model may generate nothing."""
    call = parse(stream=True)
    silent: list[Delta] = [ChoiceEnd(0, "stop"), End(USAGE)]
    choices = [chunk["choices"][0] for chunk in events(stream(call, silent))[:-1]]
    answer = unary(parse(), silent)

    assert [choice["finish_reason"] for choice in choices] == [None, "stop"]
    assert answer["choices"][0]["message"]["content"] == ""


CALLS: list[Delta] = [
    CallText(0, 0, "call_1", "clock"),
    CallText(0, 0, arguments='{"zone":'),
    CallText(0, 0, arguments='"UTC"}'),
    CallText(0, 1, "call_2", "clock", "{}"),
    ChoiceEnd(0, "tool_calls"),
    End(USAGE),
]


def test_first_piece_of_a_call_has_its_id_and_name() -> None:
    """Clients open a call at its id and append the other pieces."""
    chunks = events(stream(parse(stream=True), CALLS))[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]

    assert deltas[0] == {"role": "assistant", "content": None, "refusal": None}
    assert [delta["tool_calls"] for delta in deltas[1:-1]] == [
        [
            {
                "index": 0,
                "id": "call_1",
                "type": "function",
                "function": {"name": "clock", "arguments": ""},
            }
        ],
        [{"index": 0, "function": {"arguments": '{"zone":'}}],
        [{"index": 0, "function": {"arguments": '"UTC"}'}}],
        [
            {
                "index": 1,
                "id": "call_2",
                "type": "function",
                "function": {"name": "clock", "arguments": "{}"},
            }
        ],
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_message_with_only_calls_has_null_content() -> None:
    """The official client's types distinguish null from an empty text."""
    (choice,) = unary(parse(), CALLS)["choices"]
    spoken = unary(parse(), [Text(0, "Hm."), *CALLS])

    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0] == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "clock", "arguments": '{"zone":"UTC"}'},
    }
    assert spoken["choices"][0]["message"]["content"] == "Hm."


DELTAS = st.lists(
    st.builds(Text, st.integers(0, 2), st.text(max_size=3))
    | st.builds(ChoiceEnd, st.integers(0, 2), st.sampled_from(["stop", "length"])),
    max_size=10,
)


@given(DELTAS)
def test_unary_answer_is_the_fold_of_the_stream(some: list[Text | ChoiceEnd]) -> None:
    """Both must carry the same content."""
    ended = {delta.index for delta in some if isinstance(delta, ChoiceEnd)}
    rest = [ChoiceEnd(index, "length") for index in range(3) if index not in ended]
    deltas: list[Delta] = [*some, *rest, End(USAGE)]
    call = parse(stream=True, n=3)
    texts, reasons = ["", "", ""], [None, None, None]
    for chunk in events(stream(call, deltas))[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
        reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]

    answer = unary(call, deltas)

    assert [c["message"]["content"] for c in answer["choices"]] == texts
    assert [c["finish_reason"] for c in answer["choices"]] == reasons


def test_stream_error_is_an_event_that_the_client_raises() -> None:
    """A stream that only ends looks complete."""
    refusal = Refusal(Kind.BUSY, "engine_restarting", "The engine stopped.", retry_after_s=1.0)
    (event,) = events(DIALECT.encoder(parse(stream=True), REPLY).error_event(refusal))

    assert event["error"] == {
        "message": "The engine stopped.",
        "type": "server_error",
        "param": None,
        "code": "engine_restarting",
    }
