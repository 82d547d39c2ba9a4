"""Anthropic's Messages: settings that are taken, versions, answers and errors to the byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from engine.api import Sampling
from gateway.dialects import anthropic_wire as wire
from gateway.dialects.anthropic import COUNT_DIALECT, DIALECT
from gateway.dialects.canonical import (
    Asked,
    Begin,
    CacheAsk,
    Call,
    CallText,
    Cause,
    ChoiceEnd,
    Delta,
    Diagnosis,
    End,
    OutputFormat,
    Reply,
    Text,
    UsageRecord,
)
from gateway.errors import Kind, Refusal
from tests.gateway.test_anthropic_conformance import named
from tests.gateway.transcripts import DOCUMENT, check_golden, outcome

NEWER = "2026-10-21"
REPLY = Reply("msg_1", "smollm2", 1_700_000_000)
USAGE = UsageRecord(28, {"5m": 16}, {"5m": 3, "1h": 5}, 4, 5, 16)
BEGIN = UsageRecord(28, {"5m": 16}, {"5m": 3, "1h": 5}, 4, 0, 16)
SCRIPT: list[Delta] = [
    Begin(BEGIN, Diagnosis("miss", "system", 20, 8, "system[0]")),
    Text(0, "Let me "),
    Text(0, "see 🙂"),
    CallText(0, 0, "call_1", "weather"),
    CallText(0, 0, arguments='{"city": "Os'),
    CallText(0, 0, arguments='lo"}'),
    CallText(0, 1, "call_2", "time"),
    Text(0, "Done."),
    ChoiceEnd(0, "tool_calls"),
    End(USAGE),
]


def parse(version: str = "", **fields: Any) -> Call:
    """A good request with more fields."""
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "m", "max_tokens": 9, "messages": messages, **fields}
    return DIALECT.parse(json.dumps(body).encode(), Asked(version=version))


def refused(version: str = "", **fields: Any) -> Refusal:
    """Why such a request is refused."""
    with pytest.raises(Refusal) as raised:
        parse(version, **fields)
    assert raised.value.kind is Kind.BAD
    return raised.value


def stream(deltas: list[Delta]) -> bytes:
    """The whole stream."""
    encoder = DIALECT.encoder(parse(stream=True), REPLY)
    return b"".join(map(encoder.stream, deltas)) + encoder.close()


def unary(deltas: list[Delta]) -> dict[str, Any]:
    """The whole message."""
    found = json.loads(DIALECT.encoder(parse(), REPLY).unary(deltas))
    assert isinstance(found, dict)
    return found


def ended(end: ChoiceEnd, *before: Delta) -> list[Delta]:
    return [Begin(BEGIN), *before, end, End(USAGE)]


# --- requests ------------------------------------------------------------------------------------


def test_defaults_change_nothing() -> None:
    """What a client leaves out is the model's own distribution, and plain caching."""
    call = parse()

    assert call.generation.sampling == Sampling()
    assert (call.generation.max_tokens, call.operation, call.stream) == (9, "generate", False)
    assert call.cache == CacheAsk(profile="anthropic", lookback=20)
    assert (call.partition, call.digests) == ("", ())


def test_every_field_that_can_be_honoured_arrives() -> None:
    """A field that is read and forgotten is worse than one that is refused."""
    call = parse(
        "2023-06-01",
        stream=True,
        stop_sequences=["END", "\n\nHuman:"],
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        seed=7,
        min_tokens=2,
        ignore_eos=True,
        cache_salt="s",
        priority=-3,
        metadata={"user_id": "u"},
        output_config={"format": {"type": "json_schema", "schema": {"type": "object", "a": 1}}},
    )

    assert call.generation.sampling == Sampling(temperature=0.5, top_k=40, top_p=0.9, seed=7)
    assert call.generation.stop == ("END", "\n\nHuman:")
    assert (call.generation.min_tokens, call.generation.ignore_eos) == (2, True)
    assert (call.stream, call.client_user, call.partition, call.priority) == (True, "u", "s", -3)
    assert call.prompts[0].output_format == OutputFormat(
        "json_schema", '{"type":"object","a":1}', "output_config.format.schema"
    )


def test_an_empty_nucleus_is_the_best_token_alone() -> None:
    """Whatever the temperature."""
    assert parse(top_p=0, temperature=1).generation.sampling.temperature == 0.0


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k"])
def test_the_newer_version_has_no_sampling_settings(name: str) -> None:
    """Not even at their defaults; null is none."""
    default: dict[str, Any] = {name: 1}
    nothing: dict[str, Any] = {name: None}

    assert refused(NEWER, **default).param == name
    assert parse(NEWER, **nothing) == parse(NEWER)
    assert parse("2023-06-01", **default) == parse(**default)


def test_another_version_is_refused_and_unknown_betas_are_not() -> None:
    """Versions change meanings; betas are only offers."""
    body = json.dumps(
        {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    ).encode()

    assert refused("2027-01-01").param == "anthropic-version"
    assert DIALECT.parse(body, Asked(version=NEWER, betas=("whatever-2027",))) == parse(NEWER)


def test_max_tokens_is_required() -> None:
    """Its SDKs always send it."""
    assert refused(max_tokens=None).code == "missing_required_parameter"


def test_no_tokens_at_all_is_a_prewarm() -> None:
    """Computed and written, not answered."""
    call = parse(max_tokens=0, tool_choice={"type": "auto"}, cache_control={"type": "ephemeral"})

    assert (call.operation, call.generation.max_tokens) == ("prewarm", 0)
    assert call.prompts[0].segments[-1].retention == "5m"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "output_config.format",
        ),
        (
            {
                "tools": [{"name": "t", "input_schema": {"type": "object"}}],
                "tool_choice": {"type": "any"},
            },
            "tool_choice",
        ),
    ],
)
def test_what_shapes_an_answer_has_no_place_in_a_prewarm(
    fields: dict[str, Any], param: str
) -> None:
    """Four refusals, as Anthropic has them."""
    assert refused(max_tokens=0, **fields).param == param


def test_counting_takes_the_same_request_without_max_tokens() -> None:
    """What is counted is what would be sent."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    call = COUNT_DIALECT.parse(json.dumps(body).encode(), Asked(version=NEWER))

    assert call.operation == "count"
    assert call.prompts == parse().prompts
    assert json.loads(COUNT_DIALECT.count_body(7, 0)) == {"input_tokens": 7}
    assert MessageTokensCount.model_validate_json(COUNT_DIALECT.count_body(7, 0)).input_tokens == 7


def test_diagnosis_is_remembered_first_and_compared_then() -> None:
    """Null opts in before there is anything to compare with."""
    first = parse(diagnostics={"previous_message_id": None}).cache
    then = parse(diagnostics={"previous_message_id": "msg_0"}).cache

    assert (first.remember, first.compare_with) == (True, "")
    assert (then.remember, then.compare_with) == (True, "msg_0")
    assert parse(diagnostics=None).cache == parse().cache


def test_settings_that_belong_to_a_prompt_have_digests() -> None:
    """They explain a miss that no text explains; what they were is not kept."""
    schema = {"type": "json_schema", "schema": {"title": "secret"}}
    digests = dict(
        parse(
            tool_choice={"type": "none"},
            thinking={"type": "adaptive"},
            output_config={"effort": "low", "format": schema},
        ).digests
    )

    assert set(digests) == {
        "tool_choice",
        "thinking",
        "output_config.effort",
        "output_config.format",
    }
    assert "secret" not in str(digests)
    assert parse(thinking={"type": "disabled"}).digests != parse(thinking=None).digests


@pytest.mark.parametrize("name", sorted(wire.REFUSED))
def test_a_field_that_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    """Silence would answer another question than was asked."""
    something: dict[str, Any] = {name: {"some": "thing"}}
    nothing: dict[str, Any] = {name: None}
    refusal = refused(**something)

    assert (refusal.code, refusal.param) == ("unsupported_parameter", name)
    assert parse(**nothing) == parse()


def test_a_thread_is_refused_so_that_the_sdk_goes_on_without_one() -> None:
    """Its tool runner asks for a thread first, and gives up on any other error."""
    refusal = refused(thread={"type": "create"})

    assert (refusal.code, refusal.param) == ("thread_unsupported_request", "thread")
    assert parse(thread=None) == parse()


def test_the_earlier_spelling_of_the_format_is_the_same() -> None:
    """Older SDKs have a field of its own for it; errors name the one that was sent."""
    form = {"type": "json_schema", "schema": {"type": "object"}}
    other = {"type": "json_schema", "schema": {"type": "string"}}
    old, new = parse(output_format=form), parse(output_config={"format": form})

    assert old.prompts[0].output_format.schema == new.prompts[0].output_format.schema
    assert old.prompts[0].output_format.path == "output_format.schema"
    assert old.digests == new.digests
    assert parse(output_format=form, output_config={"format": form}) == old
    assert refused(output_format=form, output_config={"format": other}).param == "output_format"
    assert refused(max_tokens=0, output_format=form).param == "output_format"


@pytest.mark.parametrize("name", sorted(wire.NEUTRAL))
def test_a_refused_field_that_asks_for_nothing_is_fine(name: str) -> None:
    """Some clients send empty lists."""
    neutral: dict[str, Any] = {name: wire.NEUTRAL[name]}

    assert parse(**neutral) == parse()


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"max_tokens": -1}, "max_tokens", ">= 0 (it is -1)"),
        ({"max_tokens": "9"}, "max_tokens", "int"),
        ({"temperature": 1.5}, "temperature", "<= 1.0 (it is 1.5)"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences", "<= 64 (it has 65)"),
        ({"stop_sequences": ["\n"]}, "stop_sequences[0]", "non-whitespace"),
        ({"stop_sequences": "a"}, "stop_sequences", "array"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type", "steps"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens", "1024"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort", "huge"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", "xml"),
        ({"diagnostics": {"previous_message_id": ""}}, "diagnostics.previous_message_id", ">= 1"),
        ({"speed": "fast"}, "speed", "fast"),
        ({"service_tier": "flex"}, "service_tier", "flex"),
        ({"priority": 1}, "priority", "<= 0"),
        ({"system": 7}, "system", "int"),
        ({"metadata": {"user_id": "u" * 513}}, "metadata.user_id", "<= 512 (it has 513)"),
        (
            {"context_management": {"edits": [{"type": "compact_20260112"}]}},
            "context_management.edits[0].type",
            "compact",
        ),
        ({"maxtokens": 5}, "maxtokens", "'max_tokens'"),
        ({"model": ""}, "model", ">= 1"),
    ],
)
def test_a_bad_value_is_refused_with_its_path_and_limit(
    fields: dict[str, Any], param: str, says: str
) -> None:
    """The message says what would be right and what came."""
    refusal = refused(**fields)

    assert refusal.param == param
    assert says in refusal.message


def test_what_a_coding_agent_sends_is_taken_whole() -> None:
    """Everything at once, as it comes; what it asks of the cache arrives."""
    wide = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
    call = parse(
        "2023-06-01",
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00000;"},
            {"type": "text", "text": "You are an agent.", **wide},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "fix it", "citations": None}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "Reading."},
                    {
                        "type": "tool_use",
                        "id": "toolu_1",
                        "name": "Read",
                        "input": {"file_path": "/a"},
                        "caller": {"type": "direct"},
                    },
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [{"type": "text", "text": "1: x"}],
                        "is_error": False,
                        "cache_control": {"type": "ephemeral", "ttl": "1h"},
                    }
                ],
            },
        ],
        tools=[
            {
                "name": "Read",
                "description": "Reads a file",
                "input_schema": {"type": "object", "additionalProperties": False},
                "eager_input_streaming": True,
            }
        ],
        metadata={"user_id": "device_session"},
        max_tokens=32_000,
        thinking={"type": "adaptive", "display": "omitted"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "medium"},
        stream=True,
        temperature=1,
    )

    (prompt,) = call.prompts
    assert [segment.role for segment in prompt.segments] == [
        "system",
        "user",
        "assistant",
        "assistant",
        "tool",
    ]
    assert [segment.retention for segment in prompt.segments] == ["1h", None, None, None, "1h"]


def test_a_prefill_does_not_go_on_as_json_of_a_schema() -> None:
    """What stands there already is not known to satisfy it."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "{"}]
    config = {"format": {"type": "json_schema", "schema": {"type": "object"}}}

    assert refused(messages=messages, output_config=config).param == "output_config.format"


def test_a_number_that_no_float_holds_is_refused_and_a_long_whole_one_is_kept() -> None:
    """A schema that could not be written down again as it came would be another schema."""
    body = (
        b'{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"hi"}],'
        b'"tools":[{"name":"t","input_schema":{"type":"object","maximum":%s}}]}'
    )
    long = b"9" * 400

    (kept,) = DIALECT.parse(body % long).prompts
    assert long.decode() in kept.tools[0].parameters
    with pytest.raises(Refusal, match="out of range"):
        DIALECT.parse(body % b"1e400")


@given(st.binary(max_size=60))
def test_any_bytes_are_a_call_or_a_refusal(body: bytes) -> None:
    """Nothing else ever comes out of a parser."""
    got = outcome(DIALECT.parse, body)

    assert isinstance(got, Call) or got.kind is Kind.BAD


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "name"]), inner)
    ),
    max_leaves=8,
)
NAMES = sorted(wire.Body.__struct_fields__)


@given(st.dictionaries(st.sampled_from([*NAMES, *wire.REFUSED]), VALUES, max_size=4))
def test_any_json_in_any_field_is_a_call_or_a_refusal(fields: dict[str, Any]) -> None:
    """Types are checked before anything is done with a value."""
    body = {"model": "m", "max_tokens": 1, "messages": [], **fields}
    got = outcome(DIALECT.parse, json.dumps(body).encode())

    assert isinstance(got, Call) or (got.kind is Kind.BAD and len(got.message) < 900)


def test_every_field_is_documented() -> None:
    """Honoured, accepted or refused: a client finds each field in one table."""
    text = DOCUMENT.read_text().partition("## Anthropic\n")[2].partition("\n## ")[0]

    assert {name for name in [*NAMES, *wire.REFUSED] if f"`{name}`" not in text} == set()


# --- answers -------------------------------------------------------------------------------------


def test_a_stream_is_what_was_agreed_to_the_byte() -> None:
    """Clients parse bytes; a change of them is a change of contract."""
    check_golden("anthropic_stream.txt", stream(SCRIPT))


def test_a_unary_answer_is_what_was_agreed_to_the_byte() -> None:
    """The same, for the other shape."""
    check_golden("anthropic_unary.json", DIALECT.encoder(parse(), REPLY).unary(SCRIPT))


def test_the_official_client_reads_both_shapes() -> None:
    """Its types are what most callers have."""
    message = Message.model_validate(unary(SCRIPT), strict=True)
    reader: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
    read = [reader.validate_python(event) for _, event in named(stream(SCRIPT))]

    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use", "text"]
    assert message.content[1].to_dict()["input"] == {"city": "Oslo"}
    assert message.usage.cache_creation is not None
    assert message.usage.cache_creation.ephemeral_1h_input_tokens == 5
    assert (read[0].type, read[-1].type) == ("message_start", "message_stop")


def test_usage_is_anthropics_sum() -> None:
    """input_tokens is what was neither read nor written."""
    usage = unary(SCRIPT)["usage"]

    assert usage == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 8,
        "cache_read_input_tokens": 16,
        "cache_creation": {"ephemeral_5m_input_tokens": 3, "ephemeral_1h_input_tokens": 5},
        "output_tokens": 5,
        "service_tier": "standard",
    }


def test_the_numbers_of_the_cache_stand_at_the_start_of_a_stream() -> None:
    """A client that leaves early knows what it was charged for the prompt."""
    (_, start), *_, (_, last), _ = named(stream(SCRIPT))

    assert start["message"]["usage"]["cache_read_input_tokens"] == 16
    assert start["message"]["usage"]["output_tokens"] == 0
    assert last["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 8,
        "cache_read_input_tokens": 16,
        "output_tokens": 5,
    }


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (ChoiceEnd(0, "stop"), "end_turn", None),
        (ChoiceEnd(0, "stop", "END"), "stop_sequence", "END"),
        (ChoiceEnd(0, "length"), "max_tokens", None),
        (ChoiceEnd(0, "tool_calls"), "tool_use", None),
    ],
)
def test_each_way_to_stop_has_its_name(end: ChoiceEnd, reason: str, sequence: str | None) -> None:
    """In both shapes."""
    deltas = ended(end, Text(0, "x"))
    last = named(stream(deltas))[-2][1]["delta"]

    assert (last["stop_reason"], last["stop_sequence"]) == (reason, sequence)
    assert unary(deltas)["stop_reason"] == reason
    assert unary(deltas)["stop_sequence"] == sequence


def test_an_answer_without_text_has_no_blocks() -> None:
    """A prewarm says nothing, and so may a model."""
    deltas = ended(ChoiceEnd(0, "length"), Text(0, ""))

    assert unary(deltas)["content"] == []
    assert [name for name, _ in named(stream(deltas))] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]


@pytest.mark.parametrize("arguments", ['{"city": "Os', "[1]", "", "nul", "[" * 5_000])
def test_a_tools_input_that_is_no_object_is_empty(arguments: str) -> None:
    """It was cut off; a client that reads a message needs an object."""
    deltas = ended(
        ChoiceEnd(0, "length"), CallText(0, 0, "c", "t"), CallText(0, 0, arguments=arguments)
    )

    assert unary(deltas)["content"][0]["input"] == {}


def test_a_tools_input_keeps_its_order_and_numbers() -> None:
    """What the model wrote is what the client gets."""
    deltas = ended(
        ChoiceEnd(0, "tool_calls"),
        CallText(0, 0, "c", "t", '{"b":1.50,"a":12345678901234567890123}'),
    )
    data = DIALECT.encoder(parse(), REPLY).unary(deltas)

    assert b'{"b":1.50,"a":12345678901234567890123}' in data


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (None, None),
        (Diagnosis("hit"), None),
        (Diagnosis("unknown"), {"type": "previous_message_not_found"}),
        (Diagnosis("unavailable", "settings", setting="thinking"), {"type": "unavailable"}),
        (Diagnosis("miss", "partition"), {"type": "unavailable"}),
        *(
            (
                Diagnosis("miss", cause, 7),
                {"type": f"{cause}_changed", "cache_missed_input_tokens": 7},
            )
            for cause in ("model", "tools", "system", "messages")
        ),
        (
            Diagnosis("miss", "system", 7, path="messages[0].content"),
            {"type": "system_changed", "cache_missed_input_tokens": 7},
        ),
        (
            Diagnosis("miss", "system", 7, path="messages[3].content"),
            {"type": "messages_changed", "cache_missed_input_tokens": 7},
        ),
    ],
)
def test_a_miss_is_explained_in_anthropics_terms(
    found: Diagnosis | None, expected: dict[str, Any] | None
) -> None:
    """At the start of a stream and in the message alike."""
    deltas: list[Delta] = [Begin(BEGIN, found), ChoiceEnd(0, "stop"), End(USAGE)]
    reason = expected and {"cache_miss_reason": expected}

    assert unary(deltas)["diagnostics"] == reason
    assert named(stream(deltas))[0][1]["message"]["diagnostics"] == reason


def test_what_an_engine_lost_is_no_difference_between_requests() -> None:
    """The reasons that only an engine knows have no name there."""
    lost: tuple[Cause, ...] = (
        *("expired", "evicted_pressure", "restarted", "below_minimum"),
        *("template", "other_namespace"),
    )

    for cause in lost:
        found = wire.diagnostics(Diagnosis("miss", cause, 7))
        assert found == {"cache_miss_reason": {"type": "unavailable"}}


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "status", "type_"),
    [
        (Kind.BAD, 400, "invalid_request_error"),
        (Kind.AUTH, 401, "authentication_error"),
        (Kind.QUOTA, 402, "billing_error"),
        (Kind.PERMISSION, 403, "permission_error"),
        (Kind.NOT_FOUND, 404, "not_found_error"),
        (Kind.METHOD, 405, "invalid_request_error"),
        (Kind.TIMEOUT, 408, "timeout_error"),
        (Kind.CONFLICT, 409, "conflict_error"),
        (Kind.TOO_BIG, 413, "request_too_large"),
        (Kind.RATE, 429, "rate_limit_error"),
        (Kind.INTERNAL, 500, "api_error"),
        (Kind.DEADLINE, 504, "timeout_error"),
        (Kind.BUSY, 529, "overloaded_error"),
    ],
)
def test_each_kind_has_its_status_and_type(kind: Kind, status: int, type_: str) -> None:
    """Clients retry by status and people search by type."""
    got, body = DIALECT.error_body(Refusal(kind, "c", "m", param="p"), "r1")

    assert got == status
    assert json.loads(body) == {
        "type": "error",
        "error": {"type": type_, "message": "m", "details": {"error_code": "c", "param": "p"}},
        "request_id": "req_r1",
    }


def test_an_error_inside_a_stream_names_its_request() -> None:
    """The same id as in the header, so that support can find it."""
    refusal = Refusal(Kind.BUSY, "engine_restarting", "The engine stopped.")
    ((name, event),) = named(DIALECT.encoder(parse(stream=True), REPLY).error_event(refusal))

    assert name == event["type"] == "error"
    assert event["error"]["type"] == "overloaded_error"
    assert event["request_id"] == DIALECT.headers("1")["request-id"] == "req_1"


def test_a_keep_alive_is_a_named_ping() -> None:
    """The only event that means nothing."""
    assert DIALECT.keep_alive() == b'event: ping\ndata: {"type":"ping"}\n\n'
