"""Ignored fields over the wire: the header, the metric, the tenant's sums, and the two other modes.

The dialects' own rules have unit tests in tests/unit/gateway/dialects/test_tolerance.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tenancy.accounts.keys import change_key, find_key
from tests.actors import TESTER
from tests.unit.gateway.gateway_fixture import CONTEXT, GatewayFixture, parse_events

HEADER = "X-Trunkline-Ignored"
LITELLM = {"provider_specific_fields": {"refusal": None}}


def second_turn(gateway: GatewayFixture, **more: Any) -> dict[str, Any]:
    """Return a chat whose history has a field that the client added, with a hint."""
    body = gateway.chat(reasoning_effort="high", **more)
    answer = {"role": "assistant", "content": "hello", **LITELLM}
    return {**body, "messages": [*body["messages"], answer, *body["messages"]]}


@pytest.mark.parametrize("stream", [False, True])
async def test_ignored_fields_are_named_and_counted(gateway: GatewayFixture, stream: bool) -> None:
    """No setting is dropped silently."""
    status, answer, response = await gateway.ask(body=second_turn(gateway, stream=stream))
    _, _, plain = await gateway.ask(body=gateway.chat(stream=stream))
    context = gateway.gateway.context
    tenant = await context.analytics.overview()

    assert status == 200, answer
    names = "reasoning_effort, messages[].provider_specific_fields"
    assert response.headers[HEADER] == names
    assert HEADER not in plain.headers
    assert tenant["ignored_fields"] == {"reasoning_effort": 1, "history": 1}
    text = context.metrics.exposition().decode()
    assert 'trunkline_ignored_fields_total{field="reasoning_effort"} 1' in text


async def test_a_key_overrides_the_servers_tolerance(gateway: GatewayFixture) -> None:
    """One application can be strict beside another that cannot be changed."""
    body, context = second_turn(gateway, temprature=1), gateway.gateway.context
    by_default, _, _ = await gateway.ask(body=body)
    key = find_key(context.store, gateway.keys["ada"])
    change_key(context.store, str(key.key_id), tolerance="lenient", by=TESTER)
    context.authenticator.refresh_now()
    lenient, _, response = await gateway.ask(body=body)
    change_key(context.store, str(key.key_id), tolerance="strict", by=TESTER)
    context.authenticator.refresh_now()
    strict, answer, _ = await gateway.ask(body=second_turn(gateway))

    assert (by_default, lenient, strict) == (400, 200, 400)
    assert "temprature" in response.headers[HEADER]
    assert answer["error"]["param"] == "reasoning_effort"


async def test_counting_tokens_names_ignored_fields(gateway: GatewayFixture) -> None:
    """A client tries its request by counting it first."""
    body = {"model": gateway.model, "messages": [{"role": "user", "content": "hi"}]}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 2048}}
    status, answer, response = await gateway.ask("/v1/messages/count_tokens", {**body, **thinking})

    assert status == 200, answer
    assert response.headers[HEADER] == "thinking"


async def test_a_quote_tolerates_what_the_endpoint_tolerates(gateway: GatewayFixture) -> None:
    """A quoted request is refused if and only if the real one is."""
    body = {"endpoint": "/v1/chat/completions", "request": second_turn(gateway)}
    status, answer, _ = await gateway.ask("/v1/cache/quote", body)

    assert status == 200, answer


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_cap_the_answer_at_the_context(
    gateway: GatewayFixture, stream: bool
) -> None:
    """Clients, not users, choose 16,384 or 64,000 output tokens; small models have less room."""
    body = {
        "model": gateway.model,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 64_000,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    status, answer, _ = await gateway.ask("/v1/messages", body)
    short = {**body, "max_tokens": 3, "stream": False}
    _, few, _ = await gateway.ask("/v1/messages", short)

    assert status == 200, answer
    if stream:
        assert '"stop_reason":"model_context_window_exceeded"' in answer
    else:
        usage = answer["usage"]
        assert answer["stop_reason"] == "model_context_window_exceeded"
        assert usage["input_tokens"] + usage["output_tokens"] == CONTEXT
    assert few["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_continuous_usage_counts_every_chunk(gateway: GatewayFixture, path: str) -> None:
    """Load generators read the tokens of each chunk."""
    body = gateway.chat(
        stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    if path == "/v1/completions":
        body |= {"prompt": "hello"}
        del body["messages"]
    status, text, _ = await gateway.ask(path, body)
    events = [event for event in parse_events(text) if event != "[DONE]"]
    counts = [event["usage"]["completion_tokens"] for event in events]

    assert status == 200, text
    assert counts == sorted(counts)
    assert (counts[-1], counts[-2]) == (8, 8)
    assert len({event["usage"]["prompt_tokens"] for event in events}) == 1
    assert [len(event["choices"]) for event in events][-1] == 0
