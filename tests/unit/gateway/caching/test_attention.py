"""`X-Trunkline-Attention`: allowed by the configuration, told in the answer, refused by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from engine.api import AttentionWindow
from engine.config import EngineConfig
from gateway.caching.attention import ATTENTION_HEADER, parse_attention
from gateway.errors import Refusal
from tenancy.accounts.tenants import change_tenant
from tests.tables import each_row
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture

CHAT = "/v1/chat/completions"
LONG = "words of a long prompt " * 8
WINDOW = {ATTENTION_HEADER: "window=64;sinks=16"}
SHARED = 96
CACHED = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture
def unopened_gateway(unopened_gateway: GatewayFixture) -> GatewayFixture:
    """Return a gateway whose engine computes windows, and may."""
    unopened_gateway.engine_config = EngineConfig(heartbeat_s=0.05, attention_policies=("window",))
    return unopened_gateway


def change_engine(gateway: GatewayFixture, **change: Any) -> None:
    """Let the engine tell something else of itself."""
    assert gateway.engine.info is not None
    gateway.engine.info = msgspec.structs.replace(gateway.engine.info, **change)


def anthropic(gateway: GatewayFixture, text: str) -> dict[str, Any]:
    content = [{"type": "text", "text": text, **CACHED}]
    return {
        "model": gateway.model,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": content}],
    }


def gemini(text: str) -> dict[str, Any]:
    return {
        "contents": [{"role": "user", "parts": [{"text": text}]}],
        "generationConfig": {"maxOutputTokens": 4},
    }


@each_row(
    ("value", "expected"),
    [
        ("window=4096;sinks=64", AttentionWindow(4096, 64)),
        ("sinks=0; window=64", AttentionWindow(64, 0)),
        (" window = 100 ; sinks = 5 ", AttentionWindow(112, 16)),
        ("window=65", AttentionWindow(80, 16)),
        ("window=1048576;sinks=65536", AttentionWindow(2**20, 2**16)),
    ],
)
def test_windows_are_rounded_up_to_blocks(value: str, expected: AttentionWindow) -> None:
    """Sinks are a block where the header does not name them."""
    assert parse_attention([value], "allowed") == expected
    assert parse_attention([value], "window=64;sinks=16") == expected


@each_row(
    "values",
    [
        ["window=63"],
        ["window=1048577"],
        ["window=64;sinks=65537"],
        ["sinks=16"],
        ["window=64;window=64"],
        ["window=64;sink=16"],
        ["window=-64"],
        ["window=6_4"],
        ["window=٦٤"],
        ["window=64;"],
        ["window"],
        [""],
        ["quest=64"],
        ["window=" + "9" * 5_000],
        ["window=64", "window=64"],
        ["full", "full"],
        ["Full"],
    ],
)
def test_other_values_are_refused_with_the_form(values: list[str]) -> None:
    """The error is short for any header, and says what would be right."""
    with pytest.raises(Refusal, match=r"expected full, or window=W;sinks=S") as caught:
        parse_attention(values, "allowed")

    assert caught.value.code == "invalid_value"
    assert len(str(caught.value)) < 400


def told(response: Any) -> dict[str, str]:
    return dict(part.split("=") for part in response.headers["X-Trunkline-Cache"].split("; "))


async def test_every_dialect_takes_and_tells_the_window(gateway: GatewayFixture) -> None:
    """The answer says the window as it was rounded; one without the header says nothing of it."""
    rounded = {ATTENTION_HEADER: "window=70;sinks=3"}
    bodies = [
        (CHAT, gateway.chat(LONG)),
        ("/v1/messages", anthropic(gateway, LONG)),
        (f"/v1beta/models/{gateway.model}:generateContent", gemini(LONG)),
    ]
    for path, body in bodies:
        status, answer, response = await gateway.ask(path, body, headers=rounded)
        assert status == 200, answer
        found = told(response)
        assert (found["attention"], found["window"], found["sinks"]) == ("window", "80", "16")
        _, _, plain = await gateway.ask(path, body)
        assert "attention" not in told(plain)
    await gateway.check_quiet()


async def test_a_window_reads_and_leaves_the_shared_prefix_alone(gateway: GatewayFixture) -> None:
    """Before and after a plain request of the same prompt."""

    async def cached(headers: dict[str, str] | None = None) -> int:
        status, answer, _ = await gateway.ask(CHAT, gateway.chat(LONG), headers=headers)
        assert status == 200, answer
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    found = [await cached(WINDOW), await cached(WINDOW), await cached(), await cached(WINDOW)]

    assert found == [0, SHARED, SHARED, SHARED]
    assert await cached() > SHARED


async def test_a_breakpoint_beyond_the_window_is_neither_written_nor_read(
    gateway: GatewayFixture,
) -> None:
    """It is refused by its bound and billed as fresh; a promise of others behind it is not read,
    so it is not broken either."""
    status, first, _ = await gateway.ask("/v1/messages", anthropic(gateway, LONG))
    assert status == 200, first
    assert first["usage"]["cache_creation_input_tokens"] > SHARED
    status, answer, response = await gateway.ask(
        "/v1/messages", anthropic(gateway, LONG), headers=WINDOW
    )

    assert status == 200, answer
    usage, found = answer["usage"], told(response)
    assert (usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]) == (0, 0)
    assert usage["trunkline"]["cache"]["bound"] == "attention"
    assert (found["lease"], found["bound"]) == ("refused", "attention")
    assert found["miss"] == "attention"
    assert int(found["physical"]) == SHARED
    contracts = gateway.gateway.context.contracts
    assert contracts.promises.by_class(contracts.clock())["5m"].get("broken", 0) == 0
    await gateway.check_quiet()


async def test_a_quote_tells_what_the_window_leaves(gateway: GatewayFixture) -> None:
    """With the header a quote has the numbers of the request with the header."""
    await gateway.ask("/v1/messages", anthropic(gateway, LONG))
    quote = {"endpoint": "/v1/messages", "request": anthropic(gateway, LONG)}
    status, plain, _ = await gateway.ask("/v1/cache/quote", quote)
    assert status == 200, plain
    status, found, _ = await gateway.ask("/v1/cache/quote", quote, headers=WINDOW)

    assert status == 200, found
    assert plain["physical"]["cached_tokens"] > SHARED
    assert found["physical"]["cached_tokens"] == SHARED
    assert (found["read"], found["write"]) == ({}, {})
    assert found["promise"]["lease"] == "refused"
    assert found["promise"]["bound"] == "attention"
    assert found["miss"]["cause"] == "attention"


async def test_a_window_is_no_bound_of_memory(gateway: GatewayFixture) -> None:
    """A tenant whose ceiling holds fewer tokens than the prompt runs it under a window."""
    change_engine(gateway, blocks=14)
    status, answer, _ = await gateway.ask(CHAT, gateway.chat(LONG * 2))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    status, answer, _ = await gateway.ask(CHAT, gateway.chat(LONG * 2), headers=WINDOW)

    assert status == 200, answer


def short_requests(gateway: GatewayFixture) -> list[tuple[str, dict[str, Any]]]:
    """Return a request of each dialect, and a quote, with their paths."""
    return [
        (CHAT, gateway.chat()),
        ("/v1/messages", anthropic(gateway, "short")),
        (f"/v1beta/models/{gateway.model}:generateContent", gemini("short")),
        ("/v1/cache/quote", {"endpoint": CHAT, "request": gateway.chat()}),
    ]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"attention_policies": ()}, "attention_not_allowed"),
        ({"attention_lacks": "no kernel computes them"}, "attention_not_available"),
    ],
)
async def test_what_the_engine_may_not_or_cannot_is_refused_in_each_dialect(
    gateway: GatewayFixture, change: dict[str, Any], code: str
) -> None:
    """By name, with what would be right, and not silently computed without the window."""
    change_engine(gateway, **change)
    for path, body in short_requests(gateway):
        status, answer, _ = await gateway.ask(path, body, headers=WINDOW)
        text = json.dumps(answer)
        assert status == 400, answer
        assert ATTENTION_HEADER in text
        assert "leave the header out" in text
        if path == CHAT:
            assert answer["error"]["code"] == code
    await gateway.check_quiet()


async def test_a_window_narrower_than_the_models_own_is_refused(gateway: GatewayFixture) -> None:
    """With the least that would be right."""
    change_engine(gateway, kv_windows=(128,))
    status, answer, _ = await gateway.ask(CHAT, gateway.chat(), headers=WINDOW)

    assert (status, answer["error"]["code"]) == (400, "invalid_value")
    assert "expected at least 127" in answer["error"]["message"]


async def test_logprobs_of_a_cut_prompt_are_refused(gateway: GatewayFixture) -> None:
    """They would not be the model's."""
    body = {
        "model": gateway.model,
        "prompt": LONG,
        "max_tokens": 1,
        "echo": True,
        "logprobs": 1,
    }
    status, answer, _ = await gateway.ask("/v1/completions", body, headers=WINDOW)
    assert (status, answer["error"]["code"]) == (400, "attention_with_prompt_logprobs")
    status, answer, _ = await gateway.ask(
        "/v1/completions", {**body, "prompt": "hi"}, headers=WINDOW
    )

    assert status == 200, answer


def allow(gateway: GatewayFixture, attention: str) -> None:
    """Change the setting of ada, whose key the requests have."""
    change_tenant(gateway.store, "ada", {"attention": attention})
    gateway.gateway.context.authenticator.refresh_now()


async def test_a_tenant_may_be_denied_windows(gateway: GatewayFixture) -> None:
    """In each dialect and in quotes; what asks for all tokens, or for nothing, runs as before."""
    allow(gateway, "never")
    for path, body in short_requests(gateway):
        status, answer, _ = await gateway.ask(path, body, headers=WINDOW)
        assert status == 400, answer
        assert "not allowed to this tenant; leave the header out" in json.dumps(answer)
        if path == CHAT:
            assert answer["error"]["code"] == "attention_not_allowed"
    for headers in ({}, {ATTENTION_HEADER: "full"}):
        status, answer, _ = await gateway.ask(CHAT, gateway.chat(), headers=headers)
        assert status == 200, answer
    await gateway.check_quiet()


async def test_a_tenants_window_is_that_of_requests_without_the_header(
    gateway: GatewayFixture,
) -> None:
    """A request's own header comes first, and `full` asks for no window."""
    allow(gateway, "window=70;sinks=16")
    quote = {"endpoint": "/v1/messages", "request": anthropic(gateway, LONG)}
    seen = []
    for headers in ({}, {ATTENTION_HEADER: "window=96"}, {ATTENTION_HEADER: "full"}):
        status, answer, response = await gateway.ask(CHAT, gateway.chat(LONG), headers=headers)
        assert status == 200, answer
        seen.append(told(response).get("window"))
    await gateway.ask("/v1/messages", anthropic(gateway, LONG), headers={ATTENTION_HEADER: "full"})
    _, bounded, _ = await gateway.ask("/v1/cache/quote", quote)
    _, whole, _ = await gateway.ask("/v1/cache/quote", quote, headers={ATTENTION_HEADER: "full"})

    assert seen == ["80", "96", None]
    assert bounded["physical"]["cached_tokens"] == 80 + 16 + 16
    assert whole["physical"]["cached_tokens"] > 80 + 16 + 16
    await gateway.check_quiet()


@pytest.mark.parametrize(
    "change",
    [
        {"attention_policies": ()},
        {"attention_lacks": "no kernel computes them"},
        {"kv_windows": (128,)},
    ],
)
async def test_a_tenants_window_refuses_nothing(
    gateway: GatewayFixture, change: dict[str, Any]
) -> None:
    """Where the header would be refused, requests without it are computed in full."""
    allow(gateway, "window=64;sinks=16")
    change_engine(gateway, **change)
    status, answer, response = await gateway.ask(CHAT, gateway.chat(LONG))

    assert status == 200, answer
    assert "attention" not in told(response)


async def test_a_tenants_window_spares_logprobs_and_prewarms(gateway: GatewayFixture) -> None:
    """Logprobs of a prompt that it would cut, and what is computed for later requests."""
    allow(gateway, "window=64;sinks=16")
    body = {"model": gateway.model, "prompt": LONG, "max_tokens": 1, "echo": True, "logprobs": 1}
    status, answer, response = await gateway.ask("/v1/completions", body)
    assert status == 200, answer
    assert "attention" not in told(response)
    warm = {**anthropic(gateway, LONG), "max_tokens": 0}
    status, answer, response = await gateway.ask("/v1/messages", warm)

    assert status == 200, answer
    assert "attention" not in told(response)
    assert answer["usage"]["cache_creation_input_tokens"] > SHARED


async def test_the_record_and_a_counter_tell_the_window(gateway: GatewayFixture) -> None:
    """Requests without a window have null, and are not counted."""
    admin = AdminClient(gateway)
    ids = []
    for headers in ({}, WINDOW):
        _, _, response = await gateway.ask(CHAT, gateway.chat(LONG), headers=headers)
        ids.append(response.headers["X-Request-Id"])
    await gateway.check_quiet()
    found = [(await admin.ask("GET", f"/admin/v1/requests/{one}"))[1]["attention"] for one in ids]

    assert found == [None, "window=64;sinks=16"]
    async with gateway.session.get(f"{gateway.admin_url}/metrics") as answer:
        assert 'trunkline_attention_requests_total{policy="window"} 1.0' in await answer.text()


async def test_a_workspace_sees_its_tenants_setting(gateway: GatewayFixture) -> None:
    """Beside the other settings of its policy."""
    allow(gateway, "window=64;sinks=16")
    _, found, _ = await gateway.ask("/v1/cache", method="GET")

    assert found["policy"]["attention"] == "window=64;sinks=16"
