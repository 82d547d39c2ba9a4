"""What each SDK sees of a failure, a slow answer and a disconnect, at each endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from google.genai import errors

from tests.e2e.sdks import SDKS, Chat
from tests.unit.gateway.gateway_fixture import GatewayFixture

# The HTTP client of Google's SDK warns of its inheritance and closes its sockets late.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Inheritance class:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

DRAINING = {
    "Chat": (openai.InternalServerError, 503),
    "Responses": (openai.InternalServerError, 503),
    "Anthropic": (anthropic.OverloadedError, 529),
    "Gemini": (errors.ServerError, 503),
}
BROKEN = {
    "Chat": openai.APIError,
    "Anthropic": anthropic.APIStatusError,
    "Gemini": errors.ServerError,
}


def name_of(sdk: Chat) -> str:
    return type(sdk).__name__


@pytest.fixture(params=SDKS, ids=name_of)
def sdk(request: pytest.FixtureRequest) -> Chat:
    """Return each SDK in turn."""
    found: Chat = request.param
    return found


@pytest.fixture
async def client(gateway: GatewayFixture, sdk: Chat) -> AsyncIterator[Any]:
    """Yield the SDK's client of the gateway."""
    client = sdk.connect(gateway.url, gateway.keys["ada"])
    yield client
    await sdk.close(client)


async def test_closing_a_stream_cancels_it_in_the_engine(
    gateway: GatewayFixture, sdk: Chat, client: Any
) -> None:
    """`break` in an application must stop the engine's work."""
    gateway.runner.hold_after(20)
    stream = await sdk.stream(client, gateway.model, 300)
    async for event in stream:
        if sdk.has_text(event):
            break
    await sdk.leave(client, stream)
    await gateway.until(lambda: not gateway.gateway.context.running)
    gateway.runner.release()

    await gateway.check_quiet()
    (entry,) = gateway.entries()
    assert entry[0] == "cancelled"
    assert 0 < entry[3] < 300


@pytest.mark.parametrize(
    "sdk", [sdk for sdk in SDKS if name_of(sdk) in BROKEN], ids=name_of, indirect=True
)
async def test_engine_failure_in_a_stream_raises_in_the_sdk(
    gateway: GatewayFixture, sdk: Chat, client: Any
) -> None:
    """A stream that only ends hides the truncation; the error event raises. Responses have an
    event of their own for it."""
    gateway.runner.hold_after(20)
    events = aiter(await sdk.stream(client, gateway.model, 300))
    await anext(events)
    gateway.runner.fail_launch.update(range(2_000))
    gateway.runner.release()
    with pytest.raises(BROKEN[name_of(sdk)]) as caught:
        _ = [event async for event in events]

    if isinstance(caught.value, anthropic.APIStatusError):
        assert caught.value.type in ("api_error", "overloaded_error")
    if isinstance(caught.value, errors.ServerError):
        assert caught.value.code in (500, 503)


async def test_draining_server_is_a_retryable_error(
    gateway: GatewayFixture, sdk: Chat, client: Any
) -> None:
    """With retry-after: a load balancer routes the retry to another server."""
    raised, status = DRAINING[name_of(sdk)]
    await gateway.gateway.drain(0.0)
    with pytest.raises(raised) as caught:
        _ = [event async for event in await sdk.stream(client, gateway.model, 8)]

    error: Any = caught.value
    assert (error.code if name_of(sdk) == "Gemini" else error.status_code) == status
    assert "retry-after" in error.response.headers


@pytest.fixture
def impatient(unopened_gateway: GatewayFixture) -> None:
    """Make the gateway, before it opens, fill a silence at once."""
    unopened_gateway.set_server(stream_keep_alive_s=0.01)


@pytest.mark.usefixtures("impatient")
async def test_filler_keeps_a_slow_answer_open(
    gateway: GatewayFixture, sdk: Chat, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proxies close idle connections; a filler that the SDK does not know would raise in it."""
    sent, filler = [0], sdk.dialect.keep_alive()

    def keep_alive(_: object) -> bytes:
        sent[0] += 1
        return bytes(filler)

    monkeypatch.setattr(type(sdk.dialect), "keep_alive", keep_alive)
    gateway.runner.hold_after(0)

    async def read() -> list[Any]:
        return [event async for event in await sdk.stream(client, gateway.model, 4)]

    reading = asyncio.ensure_future(read())
    await gateway.until(lambda: sent[0] > 2)
    gateway.runner.release()
    events = await reading

    assert sum(map(sdk.has_text, events)) > 0
    assert sdk.is_last(events[-1])
    await gateway.check_quiet()
