"""Older majors of Google's SDK, each in a separate process, against a complete gateway.

They call another version of the API and spell fields differently.
"""

from __future__ import annotations

import pytest

from tests.e2e.older_sdks import VERSIONS, run_script
from tests.unit.gateway.gateway_fixture import GatewayFixture

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("room_for_tools")]


@pytest.mark.parametrize("version", VERSIONS["google-genai"])
async def test_older_sdk_works_unchanged(unopened_gateway: GatewayFixture, version: str) -> None:
    """Applications upgrade to a new major late."""
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
