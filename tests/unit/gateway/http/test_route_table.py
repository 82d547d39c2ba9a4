"""Which declared route a method and a path find, and which of several."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from gateway.http.route_table import RouteTable, canonical

DECLARED = (
    ("POST", "/{version:v1|v1beta}/models/{target:.+}"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("DELETE", "/v1/models/{name}"),
)


@pytest.fixture
def table() -> RouteTable[str]:
    made = RouteTable[str]()
    for method, path in DECLARED:
        made.add(method, path, f"{method} {canonical(path)}")
    return made


@pytest.mark.parametrize(
    ("method", "path", "found", "parameters"),
    [
        ("GET", "/v1/models", "GET /v1/models", {}),
        ("GET", "/v1/m%6fdels", "GET /v1/models", {}),
        ("GET", "/v1/models/a%2Fb%25c", "GET /v1/models/{name}", {"name": "a/b%c"}),
        ("GET", "/v1/models/%C3%A4", "GET /v1/models/{name}", {"name": "ä"}),
        (
            "POST",
            "/v1beta/models/a/b:go",
            "POST /{version}/models/{target}",
            {"version": "v1beta", "target": "a/b:go"},
        ),
    ],
)
def test_a_path_finds_its_route(
    table: RouteTable[str], method: str, path: str, found: str, parameters: dict[str, str]
) -> None:
    """Parameters are decoded once; an encoded slash stays within its segment."""
    assert table.find(make_mocked_request(method, path)) == (found, parameters)


@pytest.mark.parametrize(
    "path", ["/v1/models/", "/V1/models", "/v2/models/x:go", "//v1/models", "*"]
)
def test_other_paths_find_nothing(table: RouteTable[str], path: str) -> None:
    """A path is matched as a whole, with its case and its slashes."""
    with pytest.raises(web.HTTPNotFound):
        table.find(make_mocked_request("GET", path))


def test_a_wrong_method_names_those_of_every_route_with_that_path(table: RouteTable[str]) -> None:
    """Allow is a promise: two declared paths may match one that a client sent."""
    with pytest.raises(web.HTTPMethodNotAllowed) as caught:
        table.find(make_mocked_request("PUT", "/v1/models/x"))

    assert caught.value.allowed_methods == {"DELETE", "GET", "POST"}


def test_a_route_is_declared_once(table: RouteTable[str]) -> None:
    """Which of two handlers answers must not depend on their order."""
    with pytest.raises(AssertionError, match="declared twice"):
        table.add("GET", "/v1/models/{name}", "another")
