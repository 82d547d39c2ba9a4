"""Older majors of Anthropic's SDK, each in a separate process, against a complete gateway.

They send the key in another header and another version of the API.
"""

from __future__ import annotations

import pytest

from tests.e2e.older_sdks import VERSIONS, run_script
from tests.unit.gateway.gateway_fixture import GatewayFixture

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("room_for_tools")]


@pytest.mark.parametrize("version", VERSIONS["anthropic"])
async def test_older_sdk_works_unchanged(unopened_gateway: GatewayFixture, version: str) -> None:
    """Applications upgrade to a new major late."""
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
