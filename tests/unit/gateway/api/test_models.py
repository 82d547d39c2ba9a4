"""`GET /v1/models`: one path, three formats."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gateway.config import ModelSettings
from gateway.dialects.anthropic.family import list_models as anthropic_list
from gateway.dialects.gemini.family import list_models as gemini_list
from gateway.dialects.protocol import ListedModel
from gateway.errors import Refusal
from tests.unit.gateway.engines.fake_link import FakeLink
from tests.unit.gateway.gateway_fixture import GatewayFixture

MODELS = [ListedModel(f"m{n}", 1_700_000_000, 8192, 4096) for n in range(5)]


async def list_models(
    gateway: GatewayFixture, path: str, headers: dict[str, str]
) -> dict[str, Any]:
    status, found, _ = await gateway.ask(path, method="GET", headers=headers)
    assert status == 200, found
    answer: dict[str, Any] = found
    return answer


async def test_headers_select_the_format(gateway: GatewayFixture) -> None:
    openai = await list_models(gateway, "/v1/models", {})
    anthropic = await list_models(gateway, "/v1/models", {"anthropic-version": "2023-06-01"})
    gemini = await list_models(gateway, "/v1/models", {"x-goog-api-client": "x"})
    beta = await list_models(gateway, "/v1beta/models", {})

    assert (openai["object"], openai["data"][0]["id"]) == ("list", gateway.model)
    assert (anthropic["data"][0]["type"], anthropic["has_more"]) == ("model", False)
    assert gemini == beta
    assert gemini["models"][0]["name"] == f"models/{gateway.model}"


async def test_every_format_tells_the_context(gateway: GatewayFixture) -> None:
    """Clients cut histories by it; OpenAI's format has vLLM's name for it."""
    openai = await list_models(gateway, "/v1/models", {})
    anthropic = await list_models(gateway, "/v1/models", {"anthropic-version": "2023-06-01"})
    gemini = await list_models(gateway, "/v1beta/models", {})

    assert openai["data"][0]["max_model_len"] == gateway.context_tokens
    assert anthropic["data"][0]["max_input_tokens"] == gateway.context_tokens
    assert gemini["models"][0]["inputTokenLimit"] == gateway.context_tokens


async def test_a_model_may_take_every_name(unopened_gateway: GatewayFixture) -> None:
    """Agents ask for small models by names of their own. The list has no such name."""
    gateway = unopened_gateway
    gateway.config = replace(gateway.config, model=ModelSettings(aliases=("*",)))
    await gateway.open()
    status, answer, _ = await gateway.ask(body=gateway.chat(model="gpt-5.4-nano"))
    one = await list_models(gateway, "/v1/models/gpt-5.4-nano", {})
    listed = await list_models(gateway, "/v1/models", {})
    await gateway.close()

    assert (status, answer["model"], one["id"]) == (200, "gpt-5.4-nano", "gpt-5.4-nano")
    assert [model["id"] for model in listed["data"]] == [gateway.model]
    assert list(gateway.store.query("select distinct model from ledger")) == [(gateway.model,)]


async def test_shows_a_model_by_id_with_or_without_prefix(
    gateway: GatewayFixture,
) -> None:
    """Gemini's names have a prefix; an unknown id is not found, in the client's format."""
    one = await list_models(
        gateway, f"/v1/models/{gateway.model}", {"anthropic-version": "2023-06-01"}
    )
    two = await list_models(gateway, f"/v1beta/models/{gateway.model}", {})
    alpha = await list_models(gateway, f"/v1alpha/models/{gateway.model}", {})
    status, error, _ = await gateway.ask(
        "/v1/models/none", method="GET", headers={"x-goog-api-client": "x"}
    )

    three = await list_models(gateway, f"/v1/models/{gateway.model}", {})
    missing, of_openai, _ = await gateway.ask("/v1/models/none", method="GET")

    assert (three["object"], three["id"]) == ("model", gateway.model)
    assert (missing, of_openai["error"]["code"]) == (404, "model_not_found")
    assert (one["type"], one["id"]) == ("model", gateway.model)
    assert alpha == two
    assert two["name"] == f"models/{gateway.model}"
    assert (status, error["error"]["status"]) == (404, "NOT_FOUND")


def test_anthropic_pages_go_both_ways() -> None:
    """After an id, or before another."""
    first = anthropic_list(MODELS, {"limit": "2"})
    second = anthropic_list(MODELS, {"limit": "2", "after_id": first["last_id"]})
    before = anthropic_list(MODELS, {"limit": "2", "before_id": "m3"})
    last = anthropic_list(MODELS, {"limit": "2", "after_id": "m3"})

    def ids(page: dict[str, Any]) -> list[str]:
        return [model["id"] for model in page["data"]]

    assert [ids(first), ids(second), ids(before), ids(last)] == [
        ["m0", "m1"],
        ["m2", "m3"],
        ["m1", "m2"],
        ["m4"],
    ]
    assert [first["has_more"], before["has_more"], last["has_more"]] == [True, True, False]


def test_gemini_pages_follow_their_token() -> None:
    """Each model occurs once."""
    first = gemini_list(MODELS, {"pageSize": "3"})
    second = gemini_list(MODELS, {"pageSize": "3", "pageToken": first["nextPageToken"]})

    assert [len(first["models"]), len(second["models"])] == [3, 2]
    assert "nextPageToken" not in second


@pytest.mark.parametrize("query", [{"limit": "0"}, {"limit": "x"}, {"after_id": "none"}])
def test_refuses_invalid_pages(query: dict[str, str]) -> None:
    """The error names the parameter."""
    with pytest.raises(Refusal):
        anthropic_list(MODELS, query)


async def test_a_model_that_failed_is_no_model_of_the_lists(gateway: GatewayFixture) -> None:
    """Asked by name it says what a request of it would."""
    (replica,) = gateway.gateway.context.models.default.replicas
    replica.link = FakeLink("its weights are not numbers")
    listed = await list_models(gateway, "/v1/models", {})
    status, one, _ = await gateway.ask(f"/v1/models/{gateway.model}", method="GET")

    assert listed["data"] == []
    assert (status, one["error"]["code"]) == (503, "model_failed")
