"""Anthropic's Messages: accepted settings, versions and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import MessageTokensCount
from msgspec import structs

from engine.api import Sampling
from gateway.dialects.anthropic import wire
from gateway.dialects.anthropic.messages import COUNT_DIALECT, DIALECT
from gateway.dialects.canonical import (
    CacheDirectives,
    OutputFormat,
    RequestMetadata,
)
from gateway.errors import Refusal
from tests.tables import each_row
from tests.unit.gateway.dialects.requests import MESSAGES

NEWER = "2026-10-21"


OLDER = "2023-06-01"
parse = MESSAGES.parse


def refused(version: str = "", **fields: Any) -> Refusal:
    """Return the strict mode's refusal of the smallest request with more fields."""
    return structs.replace(MESSAGES, version=version).refused("strict", **fields)


def test_defaults_are_plain_sampling_and_plain_caching() -> None:
    """Omitted fields leave the model's own distribution and plain caching."""
    call = parse()

    assert call.generation.sampling == Sampling()
    assert (call.generation.max_tokens, call.operation, call.stream) == (9, "generate", False)
    assert call.cache == CacheDirectives(profile="anthropic", lookback=20)
    assert (call.partition, call.digests) == ("", ())


def test_honoured_fields_reach_the_call() -> None:
    """A field that is decoded and dropped is worse than a refused one."""
    call = structs.replace(MESSAGES, version=OLDER).parse(
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


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k"])
def test_every_version_honours_sampling_settings(name: str) -> None:
    """Today's clients send the newer version together with the temperature that a user set."""
    calls = [
        structs.replace(MESSAGES, version=one).parse(**{name: 1}) for one in (NEWER, OLDER, "")
    ]

    assert calls[0] == calls[1]
    assert calls[0].generation.sampling == calls[2].generation.sampling


def test_refuses_unknown_version() -> None:
    """A version changes meanings."""
    assert refused("2027-01-01").param == "anthropic-version"


def test_max_tokens_is_required() -> None:
    """Anthropic's SDKs always send it."""
    assert refused(max_tokens=None).code == "missing_required_parameter"


def test_zero_max_tokens_is_a_prewarm() -> None:
    """The prompt is computed and written, and nothing is generated."""
    call = parse(max_tokens=0, tool_choice={"type": "auto"}, cache_control={"type": "ephemeral"})

    assert (call.operation, call.generation.max_tokens) == ("prewarm", 0)
    assert call.prompts[0].segments[-1].retention == "5m?"


@each_row(
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
def test_prewarm_refuses_fields_that_shape_an_answer(fields: dict[str, Any], param: str) -> None:
    """Anthropic refuses the same four."""
    assert refused(max_tokens=0, **fields).param == param


def test_counting_accepts_a_request_without_max_tokens() -> None:
    """The count is that of the request that would be sent."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    call = COUNT_DIALECT.parse(json.dumps(body).encode(), RequestMetadata(version=NEWER))

    assert call.operation == "count"
    assert call.prompts == parse().prompts
    assert json.loads(COUNT_DIALECT.count_body(7, 0)) == {"input_tokens": 7}
    assert MessageTokensCount.model_validate_json(COUNT_DIALECT.count_body(7, 0)).input_tokens == 7


def test_diagnostics_null_remembers_and_id_compares() -> None:
    """Null opts in before an earlier message exists."""
    first = parse(diagnostics={"previous_message_id": None}).cache
    then = parse(diagnostics={"previous_message_id": "msg_0"}).cache

    assert (first.remember, first.compare_with) == (True, "")
    assert (then.remember, then.compare_with) == (True, "msg_0")
    assert parse(diagnostics=None).cache == parse().cache


def test_settings_have_digests() -> None:
    """Digests explain a miss between equal prompts; the values are not kept."""
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


def test_thread_refusal_has_the_code_of_the_sdks_fallback() -> None:
    """The SDK's tool runner first requests a thread, and fails on any other error."""
    refusal = refused(thread={"type": "create"})

    assert (refusal.code, refusal.param) == ("thread_unsupported_request", "thread")
    assert parse(thread=None) == parse()


def test_output_format_is_an_alias_of_output_config_format() -> None:
    """Older SDKs send it; errors name the field that was sent."""
    form = {"type": "json_schema", "schema": {"type": "object"}}
    other = {"type": "json_schema", "schema": {"type": "string"}}
    old, new = parse(output_format=form), parse(output_config={"format": form})

    assert old.prompts[0].output_format.schema == new.prompts[0].output_format.schema
    assert old.prompts[0].output_format.path == "output_format.schema"
    assert old.digests == new.digests
    assert parse(output_format=form, output_config={"format": form}) == old
    assert refused(output_format=form, output_config={"format": other}).param == "output_format"
    assert refused(max_tokens=0, output_format=form).param == "output_format"


@pytest.mark.parametrize("name", sorted(wire.NEUTRAL_VALUES))
def test_refused_field_at_a_neutral_value_is_accepted(name: str) -> None:
    """Some clients send empty lists."""
    neutral: dict[str, Any] = {name: wire.NEUTRAL_VALUES[name]}

    assert parse(**neutral) == parse()


@each_row(
    ("fields", "param", "says"),
    [
        ({"max_tokens": -1}, "max_tokens", ">= 0; received -1"),
        ({"max_tokens": "9"}, "max_tokens", "int"),
        ({"temperature": 1.5}, "temperature", "<= 1.0; received 1.5"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences", "<= 64; received length 65"),
        ({"stop_sequences": ["\n"]}, "stop_sequences[0]", "non-whitespace"),
        ({"stop_sequences": "a"}, "stop_sequences", "array"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "thinking.type",
            "extended thinking",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens", "1024"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", "xml"),
        ({"diagnostics": {"previous_message_id": ""}}, "diagnostics.previous_message_id", ">= 1"),
        ({"speed": "fast"}, "speed", "fast"),
        ({"service_tier": "flex"}, "service_tier", "flex"),
        ({"priority": 1}, "priority", "<= 0"),
        ({"system": 7}, "system", "int"),
        ({"metadata": {"user_id": "u" * 513}}, "metadata.user_id", "<= 512; received length 513"),
        (
            {"context_management": {"edits": [{"type": "compact_20260112"}]}},
            "context_management.edits[0].type",
            "compact",
        ),
        ({"maxtokens": 5}, "maxtokens", "'max_tokens'"),
        ({"model": ""}, "model", ">= 1"),
    ],
)
def test_refuses_invalid_value_with_path_and_limit(
    fields: dict[str, Any], param: str, says: str
) -> None:
    """The message has the expected and the received value."""
    refusal = refused(**fields)

    assert refusal.param == param
    assert says in refusal.message


def test_clearing_old_tool_results_is_a_hint() -> None:
    """It saves tokens where the hosted API does it, and can make no answer wrong."""
    edits = [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 9}}]

    assert MESSAGES.parse(context_management={"edits": edits}).ignored == (
        "context_management.edits",
    )
    refusal = MESSAGES.refused("strict", context_management={"edits": edits})
    assert refusal.param == "context_management.edits"


def test_accepts_a_coding_agents_request() -> None:
    """Its cache directives reach the call."""
    wide = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
    call = structs.replace(MESSAGES, version=OLDER).parse(
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
        "assistant",
        "tool",
    ]
    retentions = [segment.retention for segment in prompt.segments]
    assert retentions == ["1h", None, None, None, None, "1h"]


def test_refuses_prefill_with_a_json_format() -> None:
    """The prefill is not known to satisfy the schema."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "{"}]
    config = {"format": {"type": "json_schema", "schema": {"type": "object"}}}

    assert refused(messages=messages, output_config=config).param == "output_config.format"


def test_refuses_float_overflow_and_keeps_long_integers() -> None:
    """A schema must keep its exact numbers to stay the same schema."""
    body = (
        b'{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"hi"}],'
        b'"tools":[{"name":"t","input_schema":{"type":"object","maximum":%s}}]}'
    )
    long = b"9" * 400

    (kept,) = DIALECT.parse(body % long).prompts
    assert long.decode() in kept.tools[0].parameters
    with pytest.raises(Refusal, match="out of range"):
        DIALECT.parse(body % b"1e400")
