"""What each SDK sees of a failure, a slow answer and a disconnect, at each endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from google.genai import errors

from gateway.errors import Kind, Refusal
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


KINDS: dict[Kind, dict[str, Any]] = {
    Kind.BAD: {
        "Chat": openai.BadRequestError, "Anthropic": anthropic.BadRequestError,
        "Gemini": (400, "INVALID_ARGUMENT"),
    },
    Kind.AUTH: {
        "Chat": openai.AuthenticationError, "Anthropic": anthropic.AuthenticationError,
        "Gemini": (401, "UNAUTHENTICATED"),
    },
    Kind.QUOTA: {
        "Chat": openai.RateLimitError, "Anthropic": anthropic.PaymentRequiredError,
        "Gemini": (429, "RESOURCE_EXHAUSTED"),
    },
    Kind.PERMISSION: {
        "Chat": openai.PermissionDeniedError, "Anthropic": anthropic.PermissionDeniedError,
        "Gemini": (403, "PERMISSION_DENIED"),
    },
    Kind.NOT_FOUND: {
        "Chat": openai.NotFoundError, "Anthropic": anthropic.NotFoundError,
        "Gemini": (404, "NOT_FOUND"),
    },
    Kind.TIMEOUT: {"Anthropic": anthropic.RequestTimeoutError},
    Kind.CONFLICT: {"Chat": openai.ConflictError, "Anthropic": anthropic.ConflictError},
    Kind.TOO_BIG: {
        "Chat": openai.APIStatusError, "Anthropic": anthropic.ContentTooLargeError,
        "Gemini": (413, "INVALID_ARGUMENT"),
    },
    Kind.RATE: {
        "Chat": openai.RateLimitError, "Anthropic": anthropic.RateLimitError,
        "Gemini": (429, "RESOURCE_EXHAUSTED"),
    },
    Kind.INTERNAL: {
        "Chat": openai.InternalServerError, "Anthropic": anthropic.InternalServerError,
        "Gemini": (500, "INTERNAL"),
    },
    Kind.BUSY: {
        "Chat": openai.InternalServerError, "Anthropic": anthropic.OverloadedError,
        "Gemini": (503, "UNAVAILABLE"),
    },
    Kind.DEADLINE: {
        "Chat": openai.InternalServerError, "Anthropic": anthropic.GatewayTimeoutError,
        "Gemini": (504, "DEADLINE_EXCEEDED"),
    },
}  # fmt: skip
"""What each SDK raises for a kind of refusal: a class, or Gemini's code and status."""
TOLD = {
    "Chat": ("some_code", "contents"),
    "Anthropic": ("some_code", "req_r1"),
    "Gemini": ("Why.", "SOME_CODE", "contents", "3s"),
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


def told(error: Any) -> tuple[Any, ...]:
    """Return what an application reads of an error beside its class."""
    if isinstance(error, errors.APIError):
        info, bad, retry = error.details["error"]["details"]
        field = bad["fieldViolations"][0]["field"]
        return error.message, info["reason"], field, retry["retryDelay"]
    if isinstance(error, anthropic.APIStatusError):
        return error.error_code, error.request_id
    return error.code, error.param


@pytest.mark.parametrize(
    ("sdk", "kind"),
    [(sdk, kind) for kind, by_sdk in KINDS.items() for sdk in SDKS if name_of(sdk) in by_sdk],
    ids=lambda one: one.name if isinstance(one, Kind) else name_of(one),
    indirect=["sdk"],
)
async def test_each_kind_of_refusal_raises_its_exception(sdk: Chat, kind: Kind) -> None:
    """A mock transport answers with the encoded refusal."""
    raised = KINDS[kind][name_of(sdk)]

    def answer(request: httpx2.Request) -> httpx2.Response:
        refusal = Refusal(kind, "some_code", "Why.", param="contents", retry_after_s=3.0)
        status, body = sdk.dialect.error_body(refusal, "r1")
        head = {"content-type": "application/json", **sdk.dialect.headers("r1")}
        return httpx2.Response(status, content=body, headers=head)

    transport = httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
    client = sdk.connect("http://gateway", "k", **{sdk.http_client: transport})
    with pytest.raises(Exception, match=r"Why\.") as caught:
        _ = [event async for event in await sdk.stream(client, "m", 8)]
    await sdk.close(client)

    error: Any = caught.value
    if name_of(sdk) == "Gemini":
        assert (error.code, error.status) == raised
        raised = errors.ServerError if error.code >= 500 else errors.ClientError
    assert type(error) is raised
    assert told(error) == TOLD[name_of(sdk)]


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
