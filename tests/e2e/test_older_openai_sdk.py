"""Older majors of OpenAI's SDK, each in a separate process, against a complete gateway.

They know no caching fields and pass them as extra fields.
"""

from __future__ import annotations

import pytest

from tests.e2e.older_sdks import VERSIONS, run_script
from tests.unit.gateway.gateway_fixture import GatewayFixture

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("room_for_tools")]


@pytest.mark.parametrize("version", VERSIONS["openai"])
async def test_older_sdk_works_unchanged(unopened_gateway: GatewayFixture, version: str) -> None:
    """Applications upgrade to a new major late."""
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
