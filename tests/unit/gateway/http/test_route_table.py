"""The route table: matching, parameters, Allow and duplicate declarations."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from gateway.http.route_table import PathNotFound, RouteTable, canonical
from tests.tables import each_row

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


@each_row(
    ("method", "path", "found", "parameters"),
    [
        ("GET", "/v1/models", "GET /v1/models", {}),
        ("HEAD", "/v1/models", "GET /v1/models", {}),
        ("HEAD", "/v1/models/a", "GET /v1/models/{name}", {"name": "a"}),
        ("GET", "/v1/m%6fdels", "GET /v1/models", {}),
        ("GET", "/v1/models/a%2Fb%25c", "GET /v1/models/{name}", {"name": "a/b%c"}),
        ("GET", "/v1/models/%C3%A4", "GET /v1/models/{name}", {"name": "ä"}),
        ("GET", "/v1/models/", "GET /v1/models", {}),
        ("GET", "/v1//models//a/", "GET /v1/models/{name}", {"name": "a"}),
        (
            "POST",
            "/v1//models/a:go/",
            "POST /{version}/models/{target}",
            {"version": "v1", "target": "a:go"},
        ),
        (
            "POST",
            "/v1beta/models/a/b:go",
            "POST /{version}/models/{target}",
            {"version": "v1beta", "target": "a/b:go"},
        ),
    ],
)
def test_path_matches_its_declared_route(
    table: RouteTable[str], method: str, path: str, found: str, parameters: dict[str, str]
) -> None:
    """Parameters are decoded once, and an encoded slash stays within its segment. A slash too many,
    from the end of a base URL, changes nothing."""
    assert table.find(make_mocked_request(method, path)) == (found, parameters)


@each_row(
    "path", ["/V1/models", "/v2/models/x:go", "/v1%2Fmodels", "/v1/models%2F", "*", "/", "//"]
)
def test_undeclared_path_is_not_found(table: RouteTable[str], path: str) -> None:
    """The whole path must match, including case."""
    with pytest.raises(web.HTTPNotFound):
        table.find(make_mocked_request("GET", path))


@each_row(
    ("path", "similar"),
    [
        ("/v1/v1/models", "/v1/models"),
        ("/v1/v1beta/models/a:go", "/v1beta/models/a:go"),
        ("/api//v1/models/", "/v1/models"),
        ("/v1/chat/v1/models", "/v1/models"),
        ("/models", "/v1/models"),
        ("/v2/models", ""),
        ("/" + "x/" * 4_000 + "v1/models", ""),
    ],
)
def test_path_of_a_wrong_base_url_has_a_similar_one(
    table: RouteTable[str], path: str, similar: str
) -> None:
    """The commonest mistakes: the version twice, another server's prefix, no version."""
    with pytest.raises(PathNotFound) as missing:
        table.find(make_mocked_request("GET", path))

    assert missing.value.similar == similar


@each_row(
    ("path", "close"),
    [
        ("/v1/model", "/v1/models"),
        ("/V1/Models", "/v1/models"),
        ("/v2/models", "/v1/models"),
        ("/v1/modelss/a", "/v1/models/a"),
        ("/v1beta/model/a:go", "/v1beta/models/a:go"),
        ("/v1", "/v1/models"),
        ("/v1/files", ""),
        ("/abcdefghijklmnopqrstuvwxyz/models/abcdefgh", ""),
        ("/v1/abcdefghijklmnopqrstuvwxyz", ""),
        ("/v1/" + "models" * 20, ""),
        ("/", ""),
    ],
)
def test_path_with_a_slip_has_a_close_one(table: RouteTable[str], path: str, close: str) -> None:
    """One letter or the case; what stands for a parameter stays as it is."""
    with pytest.raises(PathNotFound) as missing:
        table.find(make_mocked_request("GET", path))

    assert missing.value.close == close


def test_wrong_method_lists_methods_of_every_matching_route(table: RouteTable[str]) -> None:
    """Two declared paths may match one request path; Allow must list the methods of both."""
    with pytest.raises(web.HTTPMethodNotAllowed) as caught:
        table.find(make_mocked_request("PUT", "/v1/models/x"))

    assert caught.value.allowed_methods == {"DELETE", "GET", "HEAD", "POST"}


def test_route_cannot_be_declared_twice(table: RouteTable[str]) -> None:
    """The chosen handler must not depend on declaration order."""
    with pytest.raises(AssertionError, match="declared twice"):
        table.add("GET", "/v1/models/{name}", "another")
