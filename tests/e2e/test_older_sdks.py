"""Older majors of the SDKs, each in a separate process, against a complete gateway.

Applications upgrade to a new major late.
"""

from __future__ import annotations

import pytest

from tests.e2e.older_sdks import VERSIONS, run_script
from tests.unit.gateway.gateway_fixture import GatewayFixture

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("room_for_tools")]


@pytest.mark.parametrize("version", VERSIONS["anthropic"])
async def test_older_anthropic_sdk_works_unchanged(
    unopened_gateway: GatewayFixture, version: str
) -> None:
    """It sends the key in another header and another version of the API."""
    gateway = unopened_gateway
    found = await run_script("older_anthropic.py", "anthropic", version, gateway)

    first, second, beta = found["usages"]
    assert found["texts"][0] == found["texts"][1]
    assert first["cache_creation"]["ephemeral_1h_input_tokens"] > 100
    assert second["cache_read_input_tokens"] == first["cache_creation_input_tokens"]
    assert beta["cache_read_input_tokens"] == first["cache_creation_input_tokens"]
    assert found["counted"] == first["input_tokens"] + first["cache_creation_input_tokens"]
    assert found["call"][0] == "weather"
    assert {found["call"][1], found["json"]} <= {True, False}
    assert (found["models"], found["error"]) == ([gateway.model], "not_found_error")


@pytest.mark.parametrize("version", VERSIONS["google-genai"])
async def test_older_gemini_sdk_works_unchanged(
    unopened_gateway: GatewayFixture, version: str
) -> None:
    """It calls another version of the API and spells fields differently."""
    gateway = unopened_gateway
    found = await run_script("older_gemini.py", "google-genai", version, gateway)

    assert found["texts"][0] == found["texts"][1]
    assert len(set(found["tokens"])) == 1
    assert found["cached"] > 0
    assert found["call"][0] == "weather"
    assert {found["call"][1], found["json"]} <= {"Oslo", "Rome"}
    assert found["resource"][1] >= found["resource"][0] > 0
    assert found["is_listed"]
    assert found["models"] == [f"models/{gateway.model}"]
    assert found["error"] == [403, "PERMISSION_DENIED"]


@pytest.mark.parametrize("version", VERSIONS["openai"])
async def test_older_openai_sdk_works_unchanged(
    unopened_gateway: GatewayFixture, version: str
) -> None:
    """It knows no caching fields and passes them as extra fields."""
    gateway = unopened_gateway
    found = await run_script("older_openai.py", "openai", version, gateway)

    first, second = (usage["prompt_tokens_details"] for usage in found["usages"])
    assert found["texts"][0] == found["texts"][1]
    assert first["cache_write_tokens"] > 100
    assert second["cached_tokens"] == first["cache_write_tokens"]
    assert found["response"][0] == "incomplete"
    assert found["response"][1]
    assert found["kinds"][0] == "response.created"
    assert found["kinds"][1] in ("response.completed", "response.incomplete")
    assert (found["call"][0], len(found["json"])) == ("weather", 2)
    assert {found["call"][1], *found["json"]} <= {"Oslo", "Rome"}
    assert (found["models"], found["error"]) == ([gateway.model], "model_not_found")
