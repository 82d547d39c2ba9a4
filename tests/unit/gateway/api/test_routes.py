"""The error format of paths without a route."""

from __future__ import annotations

from tests.tables import each_row
from tests.unit.gateway.gateway_fixture import GatewayFixture


@each_row(
    ("path", "headers", "shape"),
    [
        ("/v1/embeddings", {}, "openai"),
        ("/metrics", {}, "openai"),
        ("/v1/messages/batches", {}, "anthropic"),
        ("/v1/files", {"anthropic-version": "2023-06-01"}, "anthropic"),
        ("/v1beta/files", {}, "gemini"),
        ("/upload/v1beta/files", {}, "gemini"),
        ("/v1/interactions", {"x-goog-api-client": "genai"}, "gemini"),
    ],
)
async def test_an_endpoint_that_is_not_offered_has_its_familys_error(
    gateway: GatewayFixture, path: str, headers: dict[str, str], shape: str
) -> None:
    """By the path where only one family has it, else by the client's headers."""
    status, body, _ = await gateway.ask(path, {}, headers=headers)

    assert status == 404
    found = "anthropic" if "type" in body else "gemini" if "status" in body["error"] else "openai"
    assert found == shape


async def test_a_method_that_is_not_allowed_has_its_paths_error(gateway: GatewayFixture) -> None:
    """No header says that the client is Anthropic's."""
    status, body, _ = await gateway.ask("/v1/messages", method="GET")

    assert (status, body["type"]) == (405, "error")
