"""Drafts at the gateway: the header that turns them off, and a client's prediction."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.api import Request
from gateway.dialects.canonical import Call, GenerationParameters, Prompt, Rendered
from gateway.generation.admission import admit
from gateway.generation.generation import DRAFTS_HEADER
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture
from tests.unit.gateway.generation.test_admission import NOW, identity

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
GENERATE = "/v1beta/models/{}:generateContent"


def bodies(gateway: GatewayFixture) -> dict[str, dict[str, Any]]:
    """Return a small request of each dialect, by its path."""
    one = {"role": "user", "content": "hi"}
    return {
        CHAT: gateway.chat(),
        "/v1/completions": {"model": gateway.model, "prompt": "hi", "max_tokens": 2},
        "/v1/responses": {"model": gateway.model, "input": "hi", "max_output_tokens": 16},
        MESSAGES: {"model": gateway.model, "messages": [one], "max_tokens": 2},
        GENERATE.format(gateway.model): {"contents": [{"parts": [{"text": "hi"}]}]},
    }


async def test_every_dialect_takes_the_header(gateway: GatewayFixture) -> None:
    """A client measures, or distrusts drafts, in whichever API it speaks."""
    for path, body in bodies(gateway).items():
        for word in ("off", "auto"):
            status, answer, _ = await gateway.ask(path, body, headers={DRAFTS_HEADER: word})
            assert status == 200, (path, answer)
    await gateway.check_quiet()


async def test_another_word_is_refused_in_every_dialect(gateway: GatewayFixture) -> None:
    """Taken for on or off, it would be the opposite of what was meant half of the time."""
    for path, body in bodies(gateway).items():
        status, answer, _ = await gateway.ask(path, body, headers={DRAFTS_HEADER: "none"})
        assert status == 400, path
        message = answer["error"]["message"]
        assert "X-Trunkline-Drafts: 'none'; expected auto or off." in message, path
    await gateway.check_quiet()


@pytest.mark.parametrize(
    "lines",
    [
        ["X-Trunkline-Drafts:"],
        ["X-Trunkline-Drafts: off", "X-Trunkline-Drafts: off"],
        ["X-Trunkline-Drafts: " + "x" * 4_000],
    ],
)
async def test_the_error_is_short_for_any_header(gateway: GatewayFixture, lines: list[str]) -> None:
    body = json.dumps(gateway.chat()).encode()
    answer = await gateway.raw(gateway.post(CHAT, body, *lines, "Connection: close"))
    head, _, text = answer.partition(b"\r\n\r\n")

    assert head.split(b" ")[1] == b"400", answer
    assert b"X-Trunkline-Drafts" in text
    assert len(text) < 400


@pytest.mark.parametrize(
    "content",
    ["a predicted text", "", [{"type": "text", "text": "in"}, {"type": "text", "text": "parts"}]],
)
async def test_a_prediction_changes_neither_answer_nor_bill(
    gateway: GatewayFixture, content: object
) -> None:
    """It says only what the client expects."""
    prediction = {"type": "content", "content": content}
    _, plain, _ = await gateway.ask(CHAT, gateway.chat())
    status, answer, _ = await gateway.ask(CHAT, gateway.chat(prediction=prediction))

    assert status == 200, answer
    assert answer["choices"] == plain["choices"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == plain["usage"][name]


@pytest.mark.parametrize(
    ("prediction", "field"),
    [
        ("a text", "prediction"),
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"content": "x"}, "prediction.type"),
        ({"type": "content", "content": 7}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content"),
        ({"type": "content", "content": "x", "weight": 1}, "prediction.weight"),
        ({"type": "content", "content": "\ue0f0"}, "prediction"),
    ],
)
async def test_another_prediction_is_refused_by_its_field(
    gateway: GatewayFixture, prediction: object, field: str
) -> None:
    status, answer, _ = await gateway.ask(CHAT, gateway.chat(prediction=prediction))

    assert status == 400
    assert answer["error"]["param"].startswith(field), answer
    assert field in answer["error"]["message"]
    await gateway.check_quiet()


async def test_a_prediction_longer_than_the_context_is_refused(gateway: GatewayFixture) -> None:
    """It could never be the answer, and its tokens take memory."""
    most = gateway.context_tokens
    prediction = {"type": "content", "content": "x y " * most}
    status, answer, _ = await gateway.ask(CHAT, gateway.chat(prediction=prediction))

    assert (status, answer["error"]["param"]) == (400, "prediction")
    assert f"expected at most the model's context, {most} tokens" in answer["error"]["message"]
    await gateway.check_quiet()


def _admitted(*, drafts: bool) -> Request:
    call = Call("m", (Prompt(token_ids=(1, 2)),), GenerationParameters(), drafts=drafts)
    rendered = [Rendered((1, 2), prediction=(5, 6, 7))]
    return admit(call, rendered, identity(), "id", NOW, b"namespace", [()])[0]


def test_the_engine_gets_the_prediction_unless_drafts_are_off() -> None:
    """Without drafts nothing reads it, so it takes no memory there."""
    on, off = _admitted(drafts=True), _admitted(drafts=False)

    assert (on.drafts, on.prediction, on.sent_tokens) == (True, (5, 6, 7), 5)
    assert (off.drafts, off.prediction, off.sent_tokens) == (False, (), 2)


TEXT = "a file of which the answer repeats most lines, one after another"
PREDICTED = {"type": "content", "content": TEXT}


@pytest.fixture
async def drafting(unopened_gateway: GatewayFixture) -> AsyncIterator[GatewayFixture]:
    """Yield a gateway whose engine drafts and whose model answers TEXT."""
    gateway = unopened_gateway
    gateway.draft_step_s = (1.0,) * 64
    await gateway.open()
    gateway.say(TEXT)
    yield gateway
    await gateway.close()


def wanted(gateway: GatewayFixture, **more: Any) -> dict[str, Any]:
    """Return a chat that ends with its text, with a prediction."""
    return gateway.chat(max_tokens=200, ignore_eos=False, prediction=PREDICTED, **more)


async def test_usage_counts_the_tokens_of_the_prediction(drafting: GatewayFixture) -> None:
    """In an answer and in a stream; each accepted one saved a step, and none is billed twice."""
    status, answer, _ = await drafting.ask(CHAT, wanted(drafting))
    assert status == 200, answer
    usage = answer["usage"]
    events = await drafting.stream(wanted(drafting, stream_options={"include_usage": True}))
    streamed = events[-2]["usage"]
    details = usage["completion_tokens_details"]

    assert answer["choices"][0]["message"]["content"] == TEXT
    assert usage["completion_tokens"] / 2 < details["accepted_prediction_tokens"]
    assert details["accepted_prediction_tokens"] < usage["completion_tokens"]
    assert streamed["completion_tokens_details"] == details
    assert streamed["completion_tokens"] == usage["completion_tokens"]


async def test_drafts_that_are_off_are_counted_nowhere(drafting: GatewayFixture) -> None:
    """The header turns all sources off, the client's own too."""
    _, answer, _ = await drafting.ask(CHAT, wanted(drafting), headers={DRAFTS_HEADER: "off"})
    details = answer["usage"]["completion_tokens_details"]

    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0
    assert drafting.gateway.context.metrics.drafts.rows() == []


async def test_operators_see_drafts_by_tenant_and_source(drafting: GatewayFixture) -> None:
    """In the data behind the dashboard; other requests' usage has no prediction."""
    await drafting.ask(CHAT, wanted(drafting))
    _, plain, _ = await drafting.ask(
        CHAT, drafting.chat(max_tokens=200, ignore_eos=False), who="bob"
    )
    found = await AdminClient(drafting).ask("GET", "/admin/v1/analytics")
    rows = found[1]["drafts"]

    details = plain["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0
    (row,) = [one for one in rows if one["source"] == "prediction"]
    assert (row["tenant"], row["accepted"] > 10) == ("ada", True)
